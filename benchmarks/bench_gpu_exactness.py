"""Same bits at full size on a GPU: what is certified, what is equal, and what exactness costs.

    python -m benchmarks.bench_gpu_exactness --shapes sd3.5-medium,qwen-image-6

For each shape (random weights, public configuration, bf16): the certificate; samples alone against samples in a group,
step by step; replay with autograd against the rollout; the transformer's forward in exact mode against the same forward
with the libraries left alone and against diffusers' own, and all against the matmul ceiling measured in the same run.
With `--compiled` also against diffusers' transformer compiled as a whole at exactly these shapes (the transformer
alone, without guidance), and, where it is certified, our own compiled forward at one fixed number of rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.full_size import SHAPES, Computed, asked, computing, run
from diffusion_rl.batch import Conditioning, DenoiseBatch, Rows
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.compiled import CompiledForward
from diffusion_rl.models.runner import eager
from diffusion_rl.rollout.compilation import compile_family
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.replay import replay_step
from diffusion_rl.sample import RolloutSample
from rl_kernels.mode import LIBRARY

KINDS = ("sde", "cps", "dance", "ode")
LIMIT = (
    "Exact mode runs the same library kernels with split-K switched off and attention pinned to cuDNN: its limit is "
    "the non-exact forward. The forward's own limit is the matmul ceiling of the same run."
)


def main(argv: list[str] | None = None) -> int:
    parser = measure.command_line("gpu_exactness", __doc__ or "", repeats=5)
    parser.add_argument("--shapes", default="sd3.5-medium", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--size", type=int, default=512, help="pixels a side")
    parser.add_argument("--groups", type=measure.integers, default=[1, 4, 24], help="samples of the timed forwards")
    parser.add_argument("--compiled", action="store_true", help="time compiled transformers too (compiles for minutes)")
    parser.add_argument("--compiled-rows", type=int, default=8, help="rows of our compiled forward")
    arguments = parser.parse_args(argv)
    report = measure.Report(
        "gpu_exactness",
        "Are bits independent of the batch at full size, and what does it cost?",
        measure.settings_of(arguments),
        limit=LIMIT,
    )
    ceiling = measure.matmul_ceiling(8192, torch.bfloat16, "cuda")
    report.results.append({"case": "matmul ceiling, bf16 8192^3", "tflops": ceiling})
    exact = True
    for shape in arguments.shapes.split(","):
        torch.compiler.reset()  # it compiles one function at only so many shapes
        family = SHAPES[shape]("cuda")
        began = time.perf_counter()
        engine = RolloutEngine(family)
        about = engine.exactness.describe()
        report.results.append({"case": f"{shape}: certificate", "seconds": time.perf_counter() - began, **about})
        print(shape, "certified:", about["certified"], about["refused"], flush=True)
        rows = [equality(family, kind, arguments.size) for kind in KINDS]
        report.results += [{"case": f"{shape}: equality, {kind}", **row} for kind, row in zip(KINDS, rows, strict=True)]
        exact &= all(row["differing_elements"] == 0 for row in rows)
        ours = None
        if arguments.compiled:
            ours, found = compiled_forward(family, engine, arguments.compiled_rows)
            report.results.append({"case": f"{shape}: compiled at {arguments.compiled_rows} rows", **found})
            print(report.results[-1], flush=True)
        for group in arguments.groups:
            report.results.append({"case": f"{shape}: forward", **cost(family, group, arguments, ceiling, ours=ours)})
            print(report.results[-1], flush=True)
        report.write(arguments.out)
        del family, engine
        torch.cuda.empty_cache()
    return 0 if exact else 1


def equality(family: ModelFamily, kind: str, size: int) -> dict[str, Any]:
    """Differing elements between a group of 5 beside another prompt, and its samples alone; and replay's ratios."""
    group = roll_out(family, kind, size, seeds=(0, 1, 2, 3, 4), neighbours=3)
    differing = compared = 0
    for index in (0, 2, 4):
        alone = roll_out(family, kind, size, seeds=(index,))[0]
        for ours, theirs in zip(tensors(group[index]), tensors(alone), strict=True):
            differing += int((ours != theirs).sum())
            compared += ours.numel()
    row: dict[str, Any] = {"compared_elements": compared, "differing_elements": differing}
    if kind != "ode":
        family.transformer.requires_grad_(True)
        step = 1
        old = torch.stack([s.rollout_log_probs[step] for s in group[:2] if s.rollout_log_probs is not None])
        scored = replay_step(family, group[:2], step).log_probs
        family.transformer.requires_grad_(False)
        ratios = torch.exp(scored.detach().cpu() - old)
        row["replay_ratios"] = [float(r) for r in ratios]
        row["differing_elements"] += int((ratios != 1).sum())
    print(kind, row, flush=True)
    return row


def roll_out(
    family: ModelFamily, kind: str, size: int, *, seeds: tuple[int, ...], neighbours: int = 0
) -> list[RolloutSample]:
    """A guided group of 4 steps, with samples of another prompt in the same batches if asked for."""
    request = partial(asked, size, rollout_sde_type=kind, rollout_return_denoising_env=True)
    requests = {"group": request("short", seeds=seeds)}
    if neighbours:
        others = request("a much longer prompt", seed=99, num_outputs_per_prompt=neighbours)
        requests = {"neighbours": others, **requests}
    return run(RolloutEngine(family), requests)["group"]


def tensors(sample: RolloutSample) -> list[torch.Tensor]:
    """All that must not depend on the batch: picture, states, log-probs, model outputs."""
    assert sample.generated_output is not None
    assert sample.dit_trajectory is not None
    assert sample.rollout_log_probs is not None
    assert sample.rollout_debug_tensors is not None
    debug = sample.rollout_debug_tensors
    return [
        sample.generated_output,
        sample.dit_trajectory.latents,
        sample.rollout_log_probs,
        debug.rollout_model_outputs,
    ]


def compiled_forward(family: ModelFamily, engine: RolloutEngine, rows: int) -> tuple[Computed | None, dict[str, Any]]:
    """Our compiled forward, if it is certified, and what certification says of it. The family is left as it was."""
    before, began = Computed(family.choices, family.runner), time.perf_counter()
    found = compile_family(family, engine.exactness, rows=rows, wanted="auto")
    seconds = time.perf_counter() - began
    compiled = isinstance(family.runner, CompiledForward) and family.runner.tries
    after = Computed(family.choices, family.runner) if compiled else None
    family.choices, family.runner = before.choices, before.runner
    verdicts = [] if found.certificate is None else found.certificate.verdicts
    table = [vars(v) for v in verdicts if "compiled" in v.operation]
    return after, {"seconds": seconds, "certified": compiled, "table": table}


@torch.no_grad()
def cost(
    family: ModelFamily, group: int, arguments: Any, ceiling: float, *, ours: Computed | None = None
) -> dict[str, Any]:
    """The guided forward of `group` samples: exact, as the engine runs it; the same kernels with the libraries left
    alone, which is the fastest eager one that isn't exact; and the stock blocks with the libraries left alone, as eager
    diffusers runs. If asked for, compiled ones."""
    batch = timed_batch(family, group, arguments.size)
    exact = Computed(family.choices, family.runner)
    arms: dict[str, Callable[[], torch.Tensor]] = {
        "exact": partial(forward, family, batch, exact),
        "library": partial(forward, family, batch, Computed(replace(LIBRARY, fused=exact.choices.fused), eager)),
        "stock": partial(forward, family, batch, Computed(LIBRARY, eager)),
    }
    if arguments.compiled:
        arms["diffusers_compiled"] = diffusers_compiled(family, batch)
    if ours is not None:
        arms["compiled"] = partial(forward, family, batch, ours)
    series = measure.alternate(arms, arguments.repeats, warmups=2)
    with FlopCounterMode(display=False) as counter:  # counts nothing of what a graph replays
        forward(family, batch, Computed(LIBRARY, eager))
    flops = counter.get_total_flops()
    return {
        "samples": group,
        "rows": 2 * group,
        "fused": exact.choices.fused,
        "runner": type(exact.runner).__name__,
        **{f"{name}_ms": taken.median * 1e3 for name, taken in series.items()},
        **{f"exact_over_{name}": measure.ratio(series["exact"], series[name]) for name in arms if name != "exact"},
        "tflop": flops / 1e12,
        "exact_tflops": flops / series["exact"].median / 1e12,
        "fraction_of_ceiling": flops / series["exact"].median / 1e12 / ceiling,
        **{
            f"{name}_fraction_of_ceiling": flops / series[name].median / 1e12 / ceiling
            for name in arms
            if name != "exact"
        },
    }


def forward(family: ModelFamily, batch: DenoiseBatch, how: Computed) -> torch.Tensor:
    """The guided velocity, computed in that way; the family is left as it was."""
    with computing(family, how):
        return family.predict(batch)


def timed_batch(family: ModelFamily, group: int, size: int) -> DenoiseBatch:
    """`group` guided samples of random numbers, at different steps."""
    positive, negative = (family.encode_prompt(p, 512) for p in ("short", "blurry"))
    return DenoiseBatch(
        torch.randn(group, *family.latent_shape(size, size), device=family.device).to(family.dtype),
        torch.linspace(900, 100, group, device=family.device),
        tuple(Conditioning(positive, negative, 4.5) for _ in range(group)),
        size,
        size,
    )


def diffusers_compiled(family: ModelFamily, batch: DenoiseBatch) -> Callable[[], torch.Tensor]:
    """The yardstick: diffusers' own transformer, compiled as a whole for the rows of this batch and no others."""
    model = torch.compile(family.transformer, dynamic=False)
    prompts = [c.negative for c in batch.conditioning if c.negative is not None]
    prompts += [c.positive for c in batch.conditioning]
    rows = Rows(
        torch.cat([batch.latents] * 2), torch.cat([batch.timesteps] * 2), tuple(prompts), batch.height, batch.width
    )
    _, inputs = family.transformer_inputs(rows)
    return lambda: model(**inputs, return_dict=False)[0]


if __name__ == "__main__":
    sys.exit(main())
