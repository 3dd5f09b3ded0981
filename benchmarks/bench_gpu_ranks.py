"""Same bits on any number of ranks, at full size on GPUs: equality, work and traffic of each rank, and time.

    python -m benchmarks.bench_gpu_ranks --shapes sd3.5-medium,qwen-image-6 --layouts sp2,cfg2,sp2cfg2 --share-device

For each shape (random weights, public configuration, bf16): samples of a mixed batch by one device and by each layout,
element by element; tokens computed and bytes sent by each rank; seconds of a guided group. With --share-device all
ranks run on one GPU and exchange through the host, which shows the bits and not the speed; without it each has a GPU of
its own, over NCCL.
"""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.bench_gpu_exactness import KINDS, tensors
from benchmarks.full_size import SHAPES, asked, load, run
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.startup import start_ranks
from diffusion_rl.sample import RolloutSample
from rl_kernels.verdict_cache import forget

FOLLOWER = "benchmarks.full_size_follower"
LIMIT = (
    "Each rank's share of the tokens is the limit: 1/N of the blocks' work, and around every attention "
    "4 (N - 1) / N^2 of a tensor of all tokens over the link."
)


def main(argv: list[str] | None = None) -> int:
    parser = measure.command_line("gpu_ranks", __doc__ or "", repeats=3)
    parser.add_argument("--shapes", default="sd3.5-medium", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--layouts", default="sp2", help="such as sp2,sp4,cfg2,sp2cfg2")
    parser.add_argument("--size", type=int, default=512, help="pixels a side")
    parser.add_argument("--group", type=int, default=8, help="samples of the timed group")
    parser.add_argument("--share-device", action="store_true", help="all ranks on one GPU, through the host")
    arguments = parser.parse_args(argv)
    report = measure.Report(
        "gpu_ranks",
        "Are bits independent of the number of ranks at full size?",
        measure.settings_of(arguments),
        limit=LIMIT,
    )
    exact = True
    for shape in arguments.shapes.split(","):
        expected: list[torch.Tensor] = []
        baseline = 0.0
        for layout in ("sp1", *arguments.layouts.split(",")):
            row, found, seconds = measured(shape, layout, arguments)
            if layout == "sp1":
                expected, baseline = found, seconds
            differing = sum(int((a != b).sum()) for a, b in zip(expected, found, strict=True))
            row |= {
                "compared_elements": sum(t.numel() for t in found),
                "differing_elements": differing,
                "group_seconds": seconds,
                "one_device_over_this": baseline / seconds,
            }
            exact &= differing == 0
            report.results.append({"case": f"{shape}: {layout}", **row})
            print(report.results[-1], flush=True)
            report.write(arguments.out)
    return 0 if exact else 1


def parallel_of(layout: str, *, share_device: bool) -> ParallelConfig:
    """`sp2`, `cfg2` or `sp2cfg2` as a configuration."""
    degrees = dict(re.findall(r"(sp|cfg)(\d+)", layout))
    return ParallelConfig(
        sp_degree=int(degrees.get("sp", 1)), enable_cfg_parallel=degrees.get("cfg") == "2", share_device=share_device
    )


def measured(shape: str, layout: str, arguments: Any) -> tuple[dict[str, Any], list[torch.Tensor], float]:
    """What the layout's table says and its ranks did, every tensor of a mixed batch, and a group's median seconds."""
    forget()
    parallel = parallel_of(layout, share_device=arguments.share_device)
    config = EngineConfig(shape, device="cuda", parallel=parallel)
    began = time.perf_counter()
    family, exactness, ranks = start_ranks(config, load=load, follower=FOLLOWER)
    engine = RolloutEngine(family, config, exactness=exactness, ranks=ranks)
    started = time.perf_counter() - began
    try:
        found = [tensor for sample in mixed(engine, arguments.size) for tensor in tensors(sample)]
        fields = {"num_outputs_per_prompt": arguments.group, "num_inference_steps": 10, "output_type": "latent"}
        timed = {"group": asked(arguments.size, "short", seed=5, **fields)}
        seconds = measure.alternate({"group": partial(run, engine, timed)}, arguments.repeats, warmups=1)[
            "group"
        ].median
        about = engine.exactness.describe()
        row = {
            "certified": about["certified"],
            "exact": about["enabled"],
            "start_seconds": started,
            "table_of_ranks": [v for v in about["table"] if "ranks" in v["operation"]],  # type: ignore[attr-defined]
            "ranks": engine.ranks.describe(),
        }
        return row, found, seconds
    finally:
        engine.close()
        torch.cuda.empty_cache()


def mixed(engine: RolloutEngine, size: int) -> list[RolloutSample]:
    """All step kinds at once, beside a longer prompt."""
    requests = {kind: asked(size, "short", rollout_sde_type=kind, seeds=(1, 2)) for kind in KINDS}
    requests["longer"] = asked(size, "a much longer prompt", seed=99)
    results = run(engine, requests)
    return [sample for name in requests for sample in results[name]]


if __name__ == "__main__":
    sys.exit(main())
