"""How long do linear layers of few rows take, by the library and by kernels of our own, and which have the same bits?

    python -m benchmarks.tune_linear

For the widths of two Qwen3 models: the library at several numbers of rows (exact mode's switches), and variants of
`rl_kernels.jit.few_rows` at 16 rows. Weights rotate, so that none is found in the cache. The limit is reading the
weight at the rate at which a large copy reads. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import measure
from rl_kernels.fused import COMPILED
from rl_kernels.settings import exact_library_settings

SHAPES = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (2560, 6144), (4096, 2560), (2560, 19456)]
SHAPES += [(9728, 2560), (1024, 151936), (2560, 151936)]  # (K, N)
ROWS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
ALL = 1024
COPIES = 300 * 2**20  # bytes of weights that rotate
CALLS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the probe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_linear", description=__doc__)
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "tune_linear.json", help="where the result goes")
    parser.add_argument("--seconds", type=float, default=60, help="no new shape begins after that")
    parser.add_argument("--commit", help="what is measured, where the checkout can't say it itself")
    arguments = parser.parse_args(argv)
    report = measure.Report("tune_linear", (__doc__ or "").splitlines()[0], measure.settings_of(arguments))
    began = time.perf_counter()
    for k, n in SHAPES:
        if time.perf_counter() - began > arguments.seconds:
            break
        report.results += probe(k, n)
    report.write(arguments.out)
    return 0


@torch.inference_mode()
def probe(k: int, n: int) -> list[dict[str, object]]:
    """The rows of one shape."""
    torch.manual_seed(0)
    copies = max(2, min(40, COPIES // (2 * k * n)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(ALL, k, device="cuda", dtype=torch.bfloat16)
    limit = 2 * k * n / 4.3e12 * 1e6
    found: list[dict[str, object]] = []
    with exact_library_settings():
        whole = F.linear(x, weights[0])
        for rows in ROWS:
            part = x[:rows].contiguous()
            same = torch.equal(F.linear(part, weights[0]), whole[:rows])
            us = timed(lambda w, part=part: F.linear(part, w), weights)  # type: ignore[misc]
            found.append({"case": f"{k}x{n}, library, {rows} rows", "us": us, "same_bits": same, "limit_us": limit})
            print(found[-1], flush=True)
    part = x[:16].contiguous()
    best = []
    for variant in variants(k) if n < 100_000 else []:
        try:
            ours = few(part, weights[0], *variant)
            same = torch.equal(ours, whole[:16])
            us = timed(lambda w, v=variant: few(part, w, *v), weights)  # type: ignore[misc]
        except Exception as error:  # a variant may not fit the chip
            print(k, n, variant, repr(error)[:120], flush=True)
            continue
        best.append({"case": f"{k}x{n}, ours {variant}, 16 rows", "us": us, "same_bits": same, "limit_us": limit})
    best.sort(key=lambda row: float(str(row["us"])))
    for row in [*best[:4], *[r for r in best if r["same_bits"]][:3]]:
        print(row, flush=True)
    return found + best


def variants(k: int) -> list[tuple[int, int, int, int, bool]]:
    """(columns, depth, stages, warps, weight first)."""
    plain = [(16, 256, 4, 4, False), (32, 128, 4, 4, False), (32, 256, 3, 4, False), (16, 256, 4, 2, False)]
    plain += [(64, 128, 4, 4, False), (16, 512, 3, 4, False)]
    turned = [(64, 64, 6, 4, True), (64, 128, 4, 4, True), (128, 64, 5, 4, True)]
    return [v for v in (*plain, *turned) if v[1] <= k]


def few(
    x: torch.Tensor, weight: torch.Tensor, block: int, depth: int, stages: int, warps: int, first: bool
) -> torch.Tensor:
    """`x @ weight.T` by a variant."""
    from rl_kernels.jit.few_rows import few_rows

    rows, width = len(x), len(weight)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    few_rows[(-(-width // block),)](
        x, weight, out, rows, WIDTH=width, DEPTH=x.shape[1], BLOCK_ROWS=16, BLOCK=block, BLOCK_DEPTH=depth,
        STAGES=stages, WEIGHT_FIRST=first, num_warps=warps, **COMPILED,
    )  # fmt: skip
    return out


def timed(work: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Microseconds of one call, by a graph of many."""
    work(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            work(weights[i % len(weights)])
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS / 3


if __name__ == "__main__":
    sys.exit(main())
