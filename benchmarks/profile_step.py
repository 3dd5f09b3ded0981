"""Where does the time of one denoising step go: which kernels, eager and fused?

    python -m benchmarks.profile_step

One guided forward of the SD3.5-medium shape (random weights, bf16) in exact mode, with the blocks' own forwards and
with the fused ones, and the rest of the step (guidance, mean, noise, next state, log-prob). Kernel time by class, as
shares of the whole step. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
    "fused": ("modulated_norm", "gated_residual", "joint_qkv"),
    "attention": ("sdpa", "fmha", "flash", "attention"),
    "gemm": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk"),
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


def kernel_times(work: Callable[[], object]) -> Counter[str]:
    """Microseconds on the device by kernel name, of one call after one that warms up."""
    work()
    measure.synchronise()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        measure.synchronise()
    times: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
    return times


def class_of(kernel: str) -> str:
    """The class that a kernel's name puts it in."""
    name = kernel.lower()
    return next((group for group, words in CLASSES.items() if any(w in name for w in words)), OTHER)


def row_of(name: str, times: Counter[str], rest: Counter[str], seconds: dict[str, measure.Series]) -> dict[str, Any]:
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
        "longest_kernels": [{"name": k[:120], "class": class_of(k), "ms": us / 1e3} for k, us in times.most_common(15)],
    }


if __name__ == "__main__":
    sys.exit(main())
