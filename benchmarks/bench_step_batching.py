"""Does it pay to advance the samples of different requests together?

Three comparisons on one model: requests sent at once against one after the other, in this process and through HTTP; and
the engine against a plain diffusers loop with the same step (see `plain_diffusers` for why it is a fair one), which is
called once a prompt's group, and also once for all prompts; with pictures, and without, so that denoising shows apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.measure import (
    PromptSupply,
    Report,
    Series,
    alternate,
    command_line,
    integers,
    print_table,
    ratio,
    settings_of,
)
from benchmarks.plain_diffusers import Noise, PlainRollout, generator_noise, plain_rollout
from benchmarks.served import served
from diffusion_rl.cli.exactness import compare_bits
from diffusion_rl.client import RolloutClient
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.sample import RolloutSample

NOISE_LEVEL = 0.7
SEED = 42
LIMIT = (
    "Denoising is the same arithmetic in every order, so the gain of batching ends where one forward's time grows in "
    "proportion to its rows: on a GPU when its tiles are full, on a CPU when matrices are large enough to use all "
    "cores and calls no longer cost more than arithmetic. Text and pictures are computed one at a time for exactness "
    "(no gain there). The plain loop has no exactness to pay for, and decodes its pictures in one batch."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if the samples of the compared arms are not the same."""
    arguments = _arguments(argv)
    pipeline = RolloutPipeline.from_pretrained(arguments.model)
    report = Report(
        "step_batching", __doc__.strip().splitlines()[0], {**settings_of(arguments), "noise_level": NOISE_LEVEL}
    )
    problems = _concurrency(report, arguments, pipeline)
    problems += _against_plain(report, arguments, pipeline)
    report.limit = LIMIT
    report.write(arguments.out)
    rows = [
        [r["name"], r["samples"], r["min_s"], r["median_s"], r["samples_per_s"]]
        for r in report.results
        if "samples" in r
    ]
    print_table("Step batching", ["arm", "samples", "min s", "median s", "samples/s"], rows)
    print_table("Ratios of medians", ["", "times as fast"], [[k, v] for k, v in report.ratios.items()])
    for problem in problems:
        print(f"NOT THE SAME: {problem}")
    return 1 if problems else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("step_batching", __doc__ or "", repeats=9)
    parser.add_argument("--requests", type=int, default=16, help="concurrent requests of one sample each")
    parser.add_argument("--groups", type=integers, default=[4, 8], help="prompts,samples of each, against the loop")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--no-http", dest="http", action="store_false", help="leave out the part through HTTP")
    return parser.parse_args(argv)


def _concurrency(report: Report, arguments: argparse.Namespace, pipeline: RolloutPipeline) -> list[str]:
    """Requests at once against one after the other; says in which places their samples differ."""
    prompts = PromptSupply().take(arguments.requests)
    fields: dict[str, Any] = {"num_inference_steps": arguments.steps, "rollout_debug_mode": False}
    last: dict[str, list[RolloutSample]] = {}

    def keep(name: str, work: Callable[[], list[RolloutSample]]) -> Callable[[], None]:
        return lambda: last.__setitem__(name, work())

    def one_by_one() -> list[RolloutSample]:
        return [pipeline(p, seed=SEED + i, **fields)[0] for i, p in enumerate(prompts)]

    arms = {
        "in_process_together": keep("together", lambda: pipeline(prompts, seed=SEED, **fields)),
        "in_process_one_by_one": keep("one by one", one_by_one),
    }
    series = alternate(arms, arguments.repeats)
    with ExitStack() as stack:
        if arguments.http:
            clients = _clients(stack, arguments.model, len(prompts))
            pool = stack.enter_context(ThreadPoolExecutor(len(prompts)))

            def send(index: int) -> RolloutSample:
                return clients[index].generate(prompts[index], seed=SEED + index, **fields)[0]

            everyone = range(len(prompts))
            http_arms = {
                "http_together": keep("http together", lambda: list(pool.map(send, everyone))),
                "http_one_by_one": keep("http one by one", lambda: [send(i) for i in everyone]),
            }
            series |= alternate(http_arms, arguments.repeats)
    _add(report, series, arguments.requests)
    for place in ("in_process", "http") if arguments.http else ("in_process",):
        report.ratios[f"{place}_together_over_one_by_one"] = ratio(
            series[f"{place}_one_by_one"], series[f"{place}_together"]
        )
    names = list(last)
    return [
        f"sample {index} of {name} and of {names[0]}: {', '.join(differences)}"
        for name in names[1:]
        for index, (one, other) in enumerate(zip(last[names[0]], last[name], strict=True))
        if (differences := compare_bits(one, other).different)
    ]


def _clients(stack: ExitStack, model: str, count: int) -> list[RolloutClient]:
    url = stack.enter_context(served(model)).url
    return [stack.enter_context(RolloutClient(url)) for _ in range(count)]


def _against_plain(report: Report, arguments: argparse.Namespace, pipeline: RolloutPipeline) -> list[str]:
    """The engine against the plain loop; says if the two don't compute the same samples."""
    prompt_count, group = arguments.groups
    supply = PromptSupply()
    defaults = pipeline.engine.family.defaults

    def engine(output_type: str = "image") -> list[RolloutSample]:
        return pipeline(
            supply.take(prompt_count),
            seed=SEED,
            num_outputs_per_prompt=group,
            num_inference_steps=arguments.steps,
            rollout_noise_level=NOISE_LEVEL,
            rollout_return_dit_trajectory=True,
            rollout_debug_mode=False,
            output_type=output_type,
        )

    def plain(prompts: Sequence[str], noise: Noise, decode: bool = True) -> PlainRollout:
        return plain_rollout(
            pipeline.engine.family.pipeline,
            prompts,
            group=group,
            steps=arguments.steps,
            guidance_scale=defaults.guidance_scale,
            noise_level=NOISE_LEVEL,
            max_sequence_length=defaults.max_sequence_length,
            noise=noise,
            decode=decode,
        )

    def plain_groups(decode: bool) -> list[PlainRollout]:
        prompts = supply.take(prompt_count)
        return [plain([p], generator_noise(SEED + i), decode) for i, p in enumerate(prompts)]

    arms: dict[str, Callable[[], object]] = {
        "engine": engine,
        "plain_call_per_group": lambda: plain_groups(True),
        "plain_one_call": lambda: plain(supply.take(prompt_count), generator_noise(SEED)),
        "engine_latents": lambda: engine("latent"),
        "plain_call_per_group_latents": lambda: plain_groups(False),
    }
    series = alternate(arms, arguments.repeats)
    _add(report, series, prompt_count * group)
    for name in ("plain_call_per_group", "plain_one_call"):
        report.ratios[f"engine_over_{name}"] = ratio(series[name], series["engine"])
    name = "plain_call_per_group_latents"
    report.ratios[f"engine_latents_over_{name}"] = ratio(series[name], series["engine_latents"])
    agreement = _agreement(engine(), plain)
    report.results.append({"name": "largest difference between engine and plain loop, given equal noise", **agreement})
    return [f"the plain loop's {name}: {value:g} apart" for name, value in agreement.items() if not value < 1e-2]


def _agreement(
    samples: Sequence[RolloutSample], plain: Callable[[Sequence[str], Noise], PlainRollout]
) -> dict[str, float]:
    """The largest differences between the engine's samples and the plain loop's, when the loop gets the same noise."""
    seeds = [sample.seed for sample in samples]

    def same_noise(step: int, shape: tuple[int, ...]) -> torch.Tensor:
        stream = NoiseStream.INITIAL_LATENT if step < 0 else NoiseStream.STEP
        return normal_noise(seeds, stream, [max(step, 0)] * len(seeds), shape[1:])

    expected = plain(list(dict.fromkeys(sample.prompt for sample in samples)), same_noise)
    pictures = torch.stack([s.generated_output for s in samples if s.generated_output is not None])
    log_probs = torch.stack([s.rollout_log_probs for s in samples if s.rollout_log_probs is not None])
    assert expected.pictures is not None
    return {
        "pictures": float((pictures - expected.pictures).abs().max()),
        "log_probs": float((log_probs - expected.log_probs).abs().max()),
    }


def _add(report: Report, series: dict[str, Series], samples: int) -> None:
    for one in series.values():
        report.results.append(one.row(samples=samples, samples_per_s=samples / one.median))


if __name__ == "__main__":
    raise SystemExit(main())
