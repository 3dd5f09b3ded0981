"""What does collecting for training cost: log-probs, trajectory, denoising environment, debug tensors?

Each level of collecting against an evaluation rollout (`rollout=false`) of the same prompt, seeds and steps, with
pictures and with latents alone, so that decoding doesn't hide it. A profile of the calls says where the cost goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measure import (
    PromptSupply,
    Report,
    alternate,
    command_line,
    paired_ratios,
    print_table,
    ratio,
    settings_of,
)
from diffusion_rl.pipeline import RolloutPipeline

SEED = 42
AIM = 1.03
LEVELS: Mapping[str, dict[str, bool]] = {
    "evaluation": {"rollout": False},
    "log_probs": {"rollout_debug_mode": False},
    "trajectory": {"rollout_debug_mode": False, "rollout_return_dit_trajectory": True},
    "environment": {
        "rollout_debug_mode": False,
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
    },
    "debug": {
        "rollout_debug_mode": True,
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
    },
}
PROFILED = (  # (label, file, function): cumulative time, so that a row holds what it calls
    ("model forward", "engine.py", "_predict"),
    ("whole transition", "transition.py", "advance"),
    ("  noise", "noise.py", "normal_noise"),
    ("  mean and deviation", "base.py", "transition"),
    ("  log-prob", "base.py", "log_prob"),
    ("  recording steps", "recorder.py", "record_step"),
    ("  recording states", "recorder.py", "record_state"),
    ("results and decoding", "result.py", "sample"),
    ("  copying trajectories", "recorder.py", "trajectory"),
    ("  copying debug tensors", "recorder.py", "debug_tensors"),
    ("  environment", "stable_diffusion3.py", "denoising_env"),
)
LIMIT = (
    "What must be done is one normal number per latent element and step, some ten elementwise operations, one sum and "
    "one copy: about 100 operations an element, against thousands of multiplications an element in the transformer "
    "(128 MFLOP a guided sample-step in the embedded model, 0.1 % of that for collecting). What is measured above that "
    "is the price of many small calls; it does not grow with the model, so a larger one hides it."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    pipeline = RolloutPipeline.from_pretrained(arguments.model)
    report = Report(
        "collecting", __doc__.strip().splitlines()[0], {**settings_of(arguments), "aim": AIM, "levels": dict(LEVELS)}
    )
    for output_type in ("image", "latent"):
        _measure(report, pipeline, arguments, output_type)
    profiles = {level: _profile(pipeline, arguments, level) for level in ("evaluation", "environment", "debug")}
    report.results.append({"name": "profile_s", "calls": arguments.profiled_calls, "output": "latent", **profiles})
    report.limit = LIMIT
    report.write(arguments.out)
    rows = [[r["name"], r["min_s"], r["median_s"], r["over_evaluation"]] for r in report.results if "min_s" in r]
    print_table("Collecting", ["arm", "min s", "median s", "over evaluation"], rows)
    shares = [[label, *(profiles[level].get(label, 0.0) for level in profiles)] for label, _, _ in PROFILED]
    print_table("Seconds under the profiler, latents only", ["call", *profiles], shares)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("collecting", __doc__ or "", repeats=24)
    parser.add_argument("--batch", type=int, default=16, help="samples of the request")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--profiled-calls", type=int, default=3, help="rollouts under the profiler")
    return parser.parse_args(argv)


def _rollout(
    pipeline: RolloutPipeline, arguments: argparse.Namespace, level: str, output_type: str
) -> Callable[[], object]:
    (prompt,) = PromptSupply().take(1)
    fields: dict[str, Any] = {
        "seed": SEED,
        "num_outputs_per_prompt": arguments.batch,
        "num_inference_steps": arguments.steps,
        "output_type": output_type,
        **LEVELS[level],
    }
    return lambda: pipeline(prompt, **fields)


def _measure(report: Report, pipeline: RolloutPipeline, arguments: argparse.Namespace, output_type: str) -> None:
    arms = {level: _rollout(pipeline, arguments, level, output_type) for level in LEVELS}
    series = alternate(arms, arguments.repeats)
    for level, one in series.items():
        over = ratio(one, series["evaluation"])
        paired = paired_ratios(one, series["evaluation"])
        report.results.append(
            {**one.row(over_evaluation=over, paired_over_evaluation=paired), "name": f"{output_type}: {level}"}
        )
        if level != "evaluation":
            report.ratios[f"{output_type}_{level}_over_evaluation"] = over


def _profile(pipeline: RolloutPipeline, arguments: argparse.Namespace, level: str) -> dict[str, float]:
    """Cumulative seconds of the calls in `PROFILED`. The profiler itself slows the model's many small calls most."""
    work = _rollout(pipeline, arguments, level, "latent")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(arguments.profiled_calls):
        work()
    profiler.disable()
    table = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    found: dict[str, float] = {}
    for label, file, function in PROFILED:
        times = [t[3] for (path, _, name), t in table.items() if name == function and _is_ours(path, file)]
        if times:
            found[label] = sum(times)
    return found


def _is_ours(path: str, file: str) -> bool:
    return path.endswith(f"/{file}") and "/diffusion_rl/" in path


if __name__ == "__main__":
    raise SystemExit(main())
