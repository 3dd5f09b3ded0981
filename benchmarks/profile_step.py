"""Where does the time of one denoising step go: which kernels, eager and fused?

    python -m benchmarks.profile_step

One guided forward of the SD3.5-medium shape (random weights, bf16) in exact mode, with the blocks' own forwards and
with the fused ones, and the rest of the step (guidance, mean, noise, next state, log-prob). Kernel time by class, as
shares of the whole step. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure
from benchmarks.full_size import sd35_medium
from diffusion_rl.models.fused_blocks import JOINT_TRANSFORMER_BLOCKS
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.schedulers.base import StepTerms, log_prob
from rl_kernels import exact_forward
from rl_kernels.fused import triton_is_installed
from rl_kernels.mode import EXACT

# The first class one of whose words is in a kernel's name is the kernel's.
CLASSES: dict[str, tuple[str, ...]] = {
    "collective": ("nccl", "memcpy ptop"),
    "fused": (
        *("modulated_norm", "gated_residual", "joint_qkv"),
        *("channel_moments", "group_factors", "scaled_channels", "channel_norm"),
    ),
    "attention": ("sdpa", "fmha", "flash", "attention"),
    "convolution": (
        "implicit",
        "fprop",
        "conv2d",
        "conv3d",
        "convolve",
        "winograd",
        "vol2col",
        "im2col",
        "nhwc",
        "nchw",
    ),
    "gemm": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk"),
    "host_copy": ("memcpy dtoh", "memcpy htod"),
    "copy": ("copy", "catarray", "memcpy", "memset", "transpose"),
    "norm": ("layer_norm", "layernorm", "rms_norm", "reduce_kernel", "rowwisemoments"),
    "elementwise": ("elementwise", "gelu", "silu"),
}
OTHER = "other"
LIMIT = (
    "With every elementwise operation free, a forward would take the time of its GEMMs and attention alone: their "
    "share of the step is what is left to reach."
)
STEPS = 10
Key = TypeVar("Key", bound=Hashable)
TEXT_TOKENS = 333


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the profile."""
    arguments = options().parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("profile_step profiles GPU kernels: it needs an NVIDIA GPU, and none is visible here")
    report = measure.Report(
        "profile_step", (__doc__ or "").splitlines()[0], measure.settings_of(arguments), limit=LIMIT
    )
    transformer = sd35_medium("cuda").transformer
    scheduler = partial(scheduler_step, arguments.samples, arguments.size // 8)
    arms = {"eager": False, "fused": True} if triton_is_installed() else {"eager": False}
    seconds: dict[str, measure.Series] = measure.alternate(
        {
            **{name: forward(transformer, arguments, fused=fused) for name, fused in arms.items()},
            "scheduler": scheduler,
        },
        arguments.repeats,
        warmups=2,
    )
    rest = kernel_times(scheduler)
    for name, fused in arms.items():
        times = kernel_times(forward(transformer, arguments, fused=fused))
        report.results.append(row_of(name, times, rest, seconds))
        print(report.results[-1], flush=True)
        for group, share in report.results[-1]["shares_of_step"].items():
            report.ratios[f"{name}: {group}"] = share
    if "fused" in seconds:
        report.ratios["eager_over_fused"] = measure.ratio(seconds["eager"], seconds["fused"])
    report.write(arguments.out)
    return 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "profile_step.json", help="where the result goes")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds, each of all arms in turn")
    parser.add_argument("--samples", type=int, default=24, help="samples of the step; guidance doubles the rows")
    parser.add_argument("--size", type=int, default=512, help="pixels a side")
    parser.add_argument("--commit", help="what is measured, where the checkout can't say it itself")
    return parser


def forward(transformer: torch.nn.Module, arguments: argparse.Namespace, *, fused: bool) -> Callable[[], object]:
    """One exact forward of all rows, negative and positive."""
    rows, side = 2 * arguments.samples, arguments.size // 8
    given = {
        "hidden_states": random(rows, 16, side, side),
        "timestep": torch.linspace(900, 100, rows, device="cuda"),
        "encoder_hidden_states": random(rows, TEXT_TOKENS, 4096),
        "pooled_projections": random(rows, 2048),
        "return_dict": False,
    }
    choices = replace(EXACT, fused=fused)

    @torch.no_grad()
    def run() -> object:
        with exact_forward(transformer, None, choices, JOINT_TRANSFORMER_BLOCKS):
            return transformer(**given)

    return run


@torch.no_grad()
def scheduler_step(samples: int, side: int) -> torch.Tensor:
    """All that a step does with the velocities: guidance, mean, noise, next state, log-prob."""
    kind = step_kinds.get("sde")
    sigmas = torch.linspace(1, 0, STEPS + 1)
    columns = kind.schedule_terms(sigmas, noise_level=0.7).columns()[torch.arange(samples) % (STEPS - 1)]
    terms = StepTerms.from_columns(columns.cuda())
    state = torch.zeros(samples, 16, side, side, device="cuda")
    negative, positive = torch.zeros(2 * samples, 16, side, side, device="cuda", dtype=torch.bfloat16).chunk(2)
    velocity = negative + 4.5 * (positive - negative)
    mean, noise_std = kind.transition(state, velocity, terms)
    seeds, steps = list(range(samples)), [i % (STEPS - 1) for i in range(samples)]
    noise = normal_noise(seeds, NoiseStream.STEP, steps, tuple(mean.shape[1:]), mean.device)
    return log_prob(mean + noise_std * noise, mean, terms, no_const=False)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def kernel_times(work: Callable[[], object]) -> Mapping[str, float]:
    """Microseconds on the device by kernel name, of one call after one that warms up."""
    work()
    times: defaultdict[str, float] = defaultdict(float)
    for name, start, end in kernel_intervals(work)[1]:
        times[name] += (end - start) * 1e6
    return times


def kernel_intervals(work: Callable[[], object]) -> tuple[float, list[tuple[str, float, float]]]:
    """Wall-clock seconds of one call, and what ran on the device: `(kernel, start, end)` in seconds, by start."""
    measure.synchronise()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        seconds = measure.seconds_of(work)
    intervals = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return seconds, sorted(intervals, key=lambda interval: interval[1])


def busy_seconds(intervals: Sequence[tuple[str, float, float]]) -> float:
    """How long at least one kernel ran, given `kernel_intervals`."""
    busy, until = 0.0, float("-inf")
    for _, start, end in intervals:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy


def longest_gaps(intervals: Sequence[tuple[str, float, float]], most: int = 10) -> list[tuple[float, int, str, str]]:
    """Between which kernels the device waited longest in all: `(seconds, times, before, after)`, given
    `kernel_intervals`."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    times: Counter[tuple[str, str]] = Counter()
    last, until = "", float("inf")
    for name, start, end in intervals:
        if start > until:
            seconds[last, name] += start - until
            times[last, name] += 1
        if until == float("inf") or end > until:
            last, until = name, end
    return [(gap, times[pair], *pair) for pair, gap in _longest(seconds)[:most]]


def account_of(work: Callable[[], object]) -> dict[str, Any]:
    """Where the time of one call goes: kernels by class and the longest ones, the share of the time in which any ran,
    and between which of them the device waited longest."""
    seconds, intervals = kernel_intervals(work)
    classes: defaultdict[str, float] = defaultdict(float)
    kernels: defaultdict[str, float] = defaultdict(float)
    for name, start, end in intervals:
        classes[class_of(name)] += end - start
        kernels[name[:120]] += end - start
    return {
        "seconds_under_the_profiler": seconds,
        "busy": busy_seconds(intervals) / seconds,
        "kernels": len(intervals),
        "ms_by_class": {kind: value * 1e3 for kind, value in _longest(classes)},
        "longest_kernels": [{"name": name, "ms": value * 1e3} for name, value in _longest(kernels)[:15]],
        "longest_waits": [
            {"ms": gap * 1e3, "times": times, "before": before[:60], "after": after[:60]}
            for gap, times, before, after in longest_gaps(intervals)
        ],
    }


def _longest(seconds: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def class_of(kernel: str) -> str:
    """The class that a kernel's name puts it in."""
    name = kernel.lower()
    return next((group for group, words in CLASSES.items() if any(w in name for w in words)), OTHER)


def row_of(
    name: str, times: Mapping[str, float], rest: Mapping[str, float], seconds: dict[str, measure.Series]
) -> dict[str, Any]:
    """Kernel time of the forward by class and of the rest of the step, and what each is of the step."""
    groups = dict.fromkeys([*CLASSES, OTHER], 0.0)
    for kernel, microseconds in times.items():
        groups[class_of(kernel)] += microseconds
    groups["scheduler"] = float(sum(rest.values()))
    step = sum(groups.values())
    return {
        "case": name,
        "forward_ms": seconds[name].median * 1e3,
        "scheduler_ms": seconds["scheduler"].median * 1e3,
        "kernel_ms": {group: us / 1e3 for group, us in groups.items()},
        "shares_of_step": {group: us / step for group, us in groups.items()},
        "longest_kernels": [{"name": k[:120], "class": class_of(k), "ms": us / 1e3} for k, us in _longest(times)[:15]],
    }


if __name__ == "__main__":
    sys.exit(main())
