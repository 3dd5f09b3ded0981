"""What does computing the common deterministic prefix of a group once save?

A group of G samples that start from one latent and have their first stochastic step at k needs k + G (T - k)
transformer evaluations instead of G T. Counted evaluations must be exactly that, and the results the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.measure import (
    PromptSupply,
    Report,
    alternate,
    command_line,
    integers,
    print_table,
    ratio,
    settings_of,
)
from diffusion_rl.cli.exactness import compare_bits
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import RolloutSample

SEED = 42
LIMIT = (
    "Counted in evaluations the gain is G T / (k + G (T - k)), reached exactly. In time it can't be reached whole: the "
    "k shared steps run at one sample a forward, which uses the machine less well than G samples do, and decoding G "
    "pictures takes as long as ever. `time_over_evaluations` says which part of the ideal gain arrives."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if a count or a bit is wrong."""
    arguments = _arguments(argv)
    pipeline = RolloutPipeline.from_pretrained(arguments.model)
    report = Report("prefix_sharing", __doc__.strip().splitlines()[0], settings_of(arguments), limit=LIMIT)
    problems: list[str] = []
    for group in arguments.groups:
        for first in arguments.first_steps:
            problems += _case(report, pipeline, arguments, group, first)
    report.write(arguments.out)
    columns = ["case", "evaluations", "ideal gain", "shared s", "apart s", "gain", "gain / ideal"]
    keys = ("name", "evaluations_shared", "ideal_gain", "shared_median_s", "apart_median_s", "gain")
    rows = [[*(r[key] for key in keys), r["time_over_evaluations"]] for r in report.results]
    print_table("Prefix sharing", columns, rows)
    for problem in problems:
        print(f"WRONG: {problem}")
    return 1 if problems else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("prefix_sharing", __doc__ or "", repeats=5)
    parser.add_argument("--steps", type=int, default=10, help="denoising steps, T")
    parser.add_argument("--groups", type=integers, default=[8, 24], help="samples of a group, G")
    parser.add_argument("--first-steps", type=integers, default=[2, 5, 8], help="first stochastic step, k")
    return parser.parse_args(argv)


def _case(
    report: Report, pipeline: RolloutPipeline, arguments: argparse.Namespace, group: int, first: int
) -> list[str]:
    """One G and k: adds it to the report, and says what of it is wrong."""
    steps, (prompt,) = arguments.steps, PromptSupply().take(1)
    last: dict[bool, list[RolloutSample]] = {}

    def roll_out(share: bool) -> None:
        last[share] = pipeline(
            prompt,
            seed=SEED,
            num_outputs_per_prompt=group,
            num_inference_steps=steps,
            init_same_noise=True,
            rollout_sde_step_indices=list(range(first, steps)),
            rollout_share_prefix=share,
            rollout_return_dit_trajectory=True,
            rollout_debug_mode=False,
        )

    arms = {"shared": lambda: roll_out(True), "apart": lambda: roll_out(False)}
    series = alternate(arms, arguments.repeats)
    name = f"G={group}, k={first}"
    counted = {share: samples[0].num_evaluations for share, samples in last.items()}
    expected = {True: first + group * (steps - first), False: group * steps}
    gain, ideal = ratio(series["apart"], series["shared"]), expected[False] / expected[True]
    report.ratios[name] = gain
    report.results.append(
        {
            "name": name,
            "evaluations_shared": counted[True],
            "evaluations_apart": counted[False],
            "ideal_gain": ideal,
            "gain": gain,
            "time_over_evaluations": gain / ideal,
            **{f"{arm}_{key}": value for arm, s in series.items() for key, value in s.row().items() if key != "name"},
        }
    )
    problems = [
        f"{name}, share={share}: {counted[share]} evaluations, not {expected[share]}"
        for share in (True, False)
        if counted[share] != expected[share]
    ]
    for one, other in zip(last[True], last[False], strict=True):
        different = compare_bits(one, other).different
        problems += [f"{name}, sample {one.sample_index}: other bits in {part}" for part in different]
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
