"""Same bits on any number of ranks, at full size on GPUs: equality, work and traffic of each rank, and time.

    python -m benchmarks.bench_gpu_ranks --cases sd3.5-medium:512 sd3.5-medium:1024:4 wan-1.3b:480x832x33:2 \
        --layouts sp2,cfg2,sp2cfg2
    python -m benchmarks.bench_gpu_ranks --cases qwen-image-6:512 --share-device

For each shape (random weights, public configuration, bf16): samples of a mixed batch by one device and by each layout,
element by element; tokens computed and bytes sent by each rank; seconds of a guided group, against one device and
against as many times one device; and where rank 0's time goes (kernels by class, collectives among them, and the share
of the time in which none ran). The link's rates are measured in the same run. With --share-device all ranks run on one
GPU and exchange through the host, which shows the bits and not the speed; without it each has a GPU of its own, over
NCCL. What fails leaves its error in the report, and the rest goes on. `--device cpu` is for trying it.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from benchmarks import measure
from benchmarks.bench_gpu_exactness import KINDS
from benchmarks.full_size import SHAPES, asked, load, run
from benchmarks.link_rates import link_rates
from benchmarks.profile_step import account_of
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.startup import start_ranks
from diffusion_rl.sample import RolloutSample
from rl_kernels.verdict_cache import forget

FOLLOWER = "benchmarks.full_size_follower"
ALONE = "sp1"
PROFILED_STEPS = 2
QUESTION = "Are bits independent of the number of ranks at full size, and what do more ranks gain?"
LIMIT = (
    "Each rank's share of the tokens is the limit: 1/N of the blocks' work (an efficiency of 1), and around every "
    "attention 4 (N - 1) / N^2 of a tensor of all tokens over the link, whose rate is measured in this run."
)


@dataclass(frozen=True)
class Case:
    """What is rolled out: a shape, its pictures or videos, and how many samples the timed group has."""

    shape: str
    height: int
    width: int
    frames: int | None
    group: int

    def __str__(self) -> str:
        frames = "" if self.frames is None else f"x{self.frames}"
        return f"{self.shape} {self.height}x{self.width}{frames}, {self.group} samples"

    @property
    def fields(self) -> dict[str, Any]:
        """Of a request. Of a video the latent alone: decoding it is no rank's share."""
        size: dict[str, Any] = {"height": self.height, "width": self.width}
        return size if self.frames is None else {**size, "num_frames": self.frames, "output_type": "latent"}


def case(text: str) -> Case:
    """SHAPE:SIZE[:SAMPLES], SIZE being SIDE, HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES; 8 samples if nothing is said."""
    found = re.fullmatch(r"([^:]+):(\d+)(?:x(\d+)(?:x(\d+))?)?(?::(\d+))?", text)
    if found is None or found[1] not in SHAPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not SHAPE:SIZE[:SAMPLES], such as wan-1.3b:480x832x33:2; shapes: {', '.join(SHAPES)}"
        )
    shape, height, width, frames, group = found.groups()
    return Case(shape, int(height), int(width or height), frames and int(frames), int(group or 8))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if an element differs, or a part failed."""
    arguments = options().parse_args(argv)
    report = measure.Report("gpu_ranks", QUESTION, measure.settings_of(arguments), limit=LIMIT)
    report.settings["cases"] = [str(one) for one in arguments.cases]
    budget = measure.Budget(arguments.budget_s)
    layouts = arguments.layouts.split(",")
    for ranks in sorted({parallel_ranks(layout) for layout in layouts} - {1} if arguments.link_mib else ()):
        row = attempted(lambda ranks=ranks: rates(ranks, arguments))
        noted(report, arguments, {"case": f"link, {ranks} ranks", **row})
    for _, cases in groupby(arguments.cases, key=lambda one: one.shape):
        expected: dict[Case, tuple[list[torch.Tensor], float]] = {}
        for layout in (ALONE, *layouts):
            if not budget.allows(0):
                noted(report, arguments, {"case": f"{layout} and what follows", "left_out": "the budget is spent"})
                return conclusion(report)
            cases = list(cases)
            attempt = attempted(partial(measure_layout, cases, layout, expected, report, arguments))
            if "error" in attempt:
                noted(report, arguments, {"case": f"{cases[0].shape}: {layout}", **attempt})
    return conclusion(report)


def options() -> argparse.ArgumentParser:
    parser = measure.command_line("gpu_ranks", __doc__ or "", repeats=3)
    parser.add_argument(
        "--cases",
        nargs="+",
        type=case,
        default=[case("sd3.5-medium:512")],
        help=f"SHAPE:SIZE[:SAMPLES], those of a shape side by side; shapes: {', '.join(SHAPES)}",
    )
    parser.add_argument("--layouts", default="sp2", help="such as sp2,sp4,cfg2,sp2cfg2,sp2-collectives")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps of the timed group")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    parser.add_argument("--share-device", action="store_true", help="all ranks on one GPU, through the host")
    parser.add_argument("--link-mib", type=int, default=64, help="of the tensors that measure the link; 0: none")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no engine is started after so many seconds")
    return parser


def conclusion(report: measure.Report) -> int:
    rows = [
        [r["case"], r["group_seconds"], r["one_device_over_this"], r["efficiency"], r["differing_elements"]]
        for r in report.results
        if "efficiency" in r
    ]
    measure.print_table("Ranks", ["case", "group s", "one device / this", "efficiency", "differing"], rows)
    wrong = [r["case"] for r in report.results if r.get("differing_elements") or "error" in r]
    for name in wrong:
        print(f"WRONG: {name}")
    return 1 if wrong else 0


def attempted(work: Any) -> dict[str, Any]:
    """What the work returns, or the error that it ended with (its traceback goes to standard error): the others'
    results are worth having without it."""
    try:
        return work() or {}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def noted(report: measure.Report, arguments: Any, row: dict[str, Any]) -> None:
    """Adds a row, prints it, and writes the report as far as it has come."""
    report.results.append(row)
    print(row, flush=True)
    report.write(arguments.out)


def rates(ranks: int, arguments: Any) -> dict[str, Any]:
    found = link_rates(ranks, arguments.device, arguments.link_mib << 20, share_device=arguments.share_device)
    return {f"{name}_bytes_per_s": rate for name, rate in found.items()}


def parallel_of(layout: str, *, share_device: bool) -> ParallelConfig:
    """`sp2`, `cfg2`, `sp2cfg2` or `sp2-collectives` as a configuration."""
    degrees = dict(re.findall(r"(sp|cfg)(\d+)", layout))
    return ParallelConfig(
        sp_degree=int(degrees.get("sp", 1)),
        enable_cfg_parallel=degrees.get("cfg") == "2",
        share_device=share_device,
        sequence_exchange="collectives" if layout.endswith("-collectives") else "auto",
    )


def parallel_ranks(layout: str) -> int:
    return layout_of(parallel_of(layout, share_device=False)).ranks


def measure_layout(
    cases: list[Case],
    layout: str,
    expected: dict[Case, tuple[list[torch.Tensor], float]],
    report: measure.Report,
    arguments: Any,
) -> None:
    """One engine of that layout and all cases of its shape; a row each. `expected`: tensors and seconds of one device,
    which that layout leaves there."""
    forget()
    parallel = replace(parallel_of(layout, share_device=arguments.share_device), collective_timeout_s=120.0)
    config = EngineConfig(cases[0].shape, device=arguments.device, parallel=parallel)
    began = time.perf_counter()
    family, exactness, ranks = start_ranks(config, load=load, follower=FOLLOWER)
    engine = RolloutEngine(family, config, exactness=exactness, ranks=ranks)
    started = time.perf_counter() - began
    try:
        about = engine.exactness.describe()
        table: Any = about["table"]
        for one in cases:
            found, row = measured(engine, one, arguments)
            if layout == ALONE:
                expected[one] = found, row["group_seconds"]
            runner = engine.family.runner
            row = {
                "case": f"{one}: {layout}",
                "launches": f"{runner.captured} graphs" if isinstance(runner, CudaGraphs) else "eager",
                "certified": about["certified"],
                "exact": about["enabled"],
                "start_seconds": started,
                "table_of_ranks": [verdict for verdict in table if "ranks" in verdict["operation"]],
                **row,
            }
            if one in expected:
                row |= compared(found, row["group_seconds"], *expected[one], parallel_ranks(layout))
                report.ratios[f"{row['case']}: one device / this"] = row["one_device_over_this"]
            noted(report, arguments, row)
    finally:
        engine.close()


def measured(engine: RolloutEngine, one: Case, arguments: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Every tensor of a mixed batch; a group's median seconds, what its ranks did, and where rank 0's time went."""
    found = [tensor for sample in mixed(engine, one) for tensor in tensors(sample)]
    given = {"num_outputs_per_prompt": one.group, **one.fields, "output_type": "latent", "rollout_debug_mode": False}
    timed = {"group": asked(0, "short", seed=5, num_inference_steps=arguments.steps, **given)}
    series = measure.alternate({"group": partial(run, engine, timed)}, arguments.repeats, warmups=1)["group"]
    before = engine.ranks.describe()
    run(engine, timed)
    after = engine.ranks.describe()
    work = [
        {"device": b["device"], **{name: b[name] - a[name] for name in ("tokens", "bytes_sent")}}
        for a, b in zip(before, after, strict=True)
    ]
    row: dict[str, Any] = {
        "group_seconds": series.median,
        "group_seconds_of_each_repeat": series.seconds,
        "steps": arguments.steps,
        "work_of_ranks": work,
    }
    if engine.family.device.type == "cuda":
        short = {"profiled": asked(0, "short", seed=5, num_inference_steps=PROFILED_STEPS, **given)}
        row["profile_of_rank_0"] = {"steps": PROFILED_STEPS, **account_of(partial(run, engine, short))}
    return found, row


def tensors(sample: RolloutSample) -> list[torch.Tensor]:
    """All that must not depend on the ranks: picture or latent, states, log-probs, model outputs."""
    trajectory, debug = sample.dit_trajectory, sample.rollout_debug_tensors
    assert trajectory is not None
    assert debug is not None
    found = (sample.generated_output, sample.generated_latents, trajectory.latents, sample.rollout_log_probs)
    return [tensor for tensor in (*found, debug.rollout_model_outputs) if tensor is not None]


def compared(
    found: list[torch.Tensor], seconds: float, expected: list[torch.Tensor], alone: float, ranks: int
) -> dict[str, Any]:
    return {
        "compared_elements": sum(t.numel() for t in found),
        "differing_elements": sum(int((a != b).sum()) for a, b in zip(expected, found, strict=True)),
        "one_device_over_this": alone / seconds,
        "efficiency": alone / seconds / ranks,
    }


def mixed(engine: RolloutEngine, one: Case) -> list[RolloutSample]:
    """All step kinds at once, beside a longer prompt."""
    fields = {"rollout_debug_mode": True, **one.fields}
    requests = {kind: asked(0, "short", rollout_sde_type=kind, seeds=(1, 2), **fields) for kind in KINDS}
    requests["longer"] = asked(0, "a much longer prompt", seed=99, **fields)
    results = run(engine, requests)
    return [sample for name in requests for sample in results[name]]


if __name__ == "__main__":
    sys.exit(main())
