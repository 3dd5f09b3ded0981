"""Where does the time of one decoding step go: which kernels, and how much of it does the device wait for the host?

    python -m benchmarks.profile_llm --shape qwen3-0.6b --batch 256 --context 600

Random weights. Steps are timed without a profiler; kernel time by class is of some steps with one. What the kernels
don't fill of a step's time, the device waits. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure
from benchmarks.bench_llm import SHAPES, shape_folder
from llm_runtime import LLM, LLMConfig
from llm_runtime.engine.engine import LLMEngine
from llm_runtime.params import GenerateRequest, sampling_params

# The first class one of whose words is in a kernel's name is the kernel's.
CLASSES: dict[str, tuple[str, ...]] = {
    "attention": ("attend", "paged_attention", "merge_splits"),
    "sampling": ("log_softmax", "gumbel", "argmax", "gather", "of_blocks", "draw_tokens"),
    "norm, rotary, silu": ("rms_norm", "paged_qkv", "silu"),
    "gemm": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "matmul", "linear"),
    "copy": ("copy", "memcpy", "memset", "index"),
}
OTHER = "other"
STEPS = 30
PROFILED = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the profile."""
    arguments = options().parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("profile_llm profiles GPU kernels: it needs an NVIDIA GPU, and none is visible here")
    report = measure.Report("profile_llm", (__doc__ or "").splitlines()[0], measure.settings_of(arguments))
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(Path(temporary), arguments.shape)
        for exact in [True, False] if arguments.inexact else [True]:
            for batch in arguments.batch or [256, 1]:
                report.results.append(row(folder, arguments, batch, exact=exact))
                print(report.results[-1], flush=True)
                gc.collect()  # the engine's memory, for the next one
                torch.cuda.empty_cache()
    report.write(arguments.out)
    return 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_llm", description=__doc__)
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "profile_llm.json", help="where the result goes")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, action="append", help="sequences; default: 256, then 1")
    parser.add_argument("--context", type=int, default=600, help="tokens of each prompt")
    parser.add_argument("--inexact", action="store_true", help="profile inexact mode as well")
    parser.add_argument("--host", action="store_true", help="print the host's own profile as well")
    parser.add_argument("--commit", help="what is measured, where the checkout can't say it itself")
    return parser


def row(folder: Path, arguments: argparse.Namespace, batch: int, *, exact: bool) -> dict[str, Any]:
    """Steps of one engine, timed, and its kernels by class."""
    config = LLMConfig(
        str(folder), device="cuda", load_format="dummy", skip_tokenizer_init=True, random_seed=0,
        max_total_tokens=batch * (arguments.context + 512), deterministic="on" if exact else "off",
    )  # fmt: skip
    with LLM(config=config) as llm:
        engine = llm.engine
        for seed in (1, 0):  # everything is compiled and captured by the first
            prefill = prefilled(engine, batch, arguments.context, seed)
            if seed:
                for _ in range(5):
                    engine.step()
                for request_id in engine.request_ids():
                    engine.abort_request(request_id)
        for _ in range(5):
            engine.step()
        measure.synchronise()
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - began)
        step_ms = 1e3 * sorted(taken)[STEPS // 2]
        if arguments.host:
            host = cProfile.Profile()
            host.enable()
            for _ in range(PROFILED):
                engine.step()
            host.disable()
            pstats.Stats(host).sort_stats("tottime").print_stats(22)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                engine.step()
            measure.synchronise()
        kernels: Counter[str] = Counter()
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name] += event.time_range.elapsed_us() / PROFILED / 1e3
        groups = dict.fromkeys([*CLASSES, OTHER], 0.0)
        for name, ms in kernels.items():
            groups[class_of(name)] += ms
        return {
            "case": f"{arguments.shape}, {batch} sequences, {'exact' if exact else 'inexact'}",
            "graphs": engine.runner.steps.captured,
            "prefill_s": prefill,
            "prefill_tokens_per_second": batch * arguments.context / prefill,
            "step_ms": step_ms,
            "tokens_per_second": batch / step_ms * 1e3,
            "kernels_ms": sum(kernels.values()),
            "device_waits_ms": step_ms - sum(kernels.values()),
            "kernel_ms": groups,
            "longest_kernels": [
                {"name": k[:100], "class": class_of(k), "ms": round(ms, 4)} for k, ms in kernels.most_common(18)
            ],
        }


def prefilled(engine: LLMEngine, batch: int, context: int, seed: int) -> float:
    """Seconds until all sequences decode."""
    params = sampling_params({"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.6})
    for i in range(batch):
        tokens = tuple((7 * i + 3 * j + seed) % 10_000 for j in range(context))
        request = GenerateRequest(input_ids=tokens, sampling=params, seed=i, return_logprob=True)
        engine.add_request(f"{seed}-{i}", request)
    measure.synchronise()
    began = time.perf_counter()
    engine.step()
    while engine.scheduler.waiting or any(s.remaining != 1 for s in engine.scheduler.running):
        engine.step()
    measure.synchronise()
    return time.perf_counter() - began


def class_of(kernel: str) -> str:
    """The class that a kernel's name puts it in."""
    name = kernel.lower()
    return next((group for group, words in CLASSES.items() if any(w in name for w in words)), OTHER)


if __name__ == "__main__":
    sys.exit(main())
