"""Which blocks make paged attention fast on this GPU, and do they all give a row the same bits?

    python -m benchmarks.tune_paged_attention --seconds 120
    python -m benchmarks.tune_paged_attention --decode

Each variant computes everything, prompts and single tokens, in blocks of one kind; `as shipped` picks a block by the
number of queries. Cases are replayed from CUDA graphs in turn with what they are compared to: torch's flash and cuDNN
attention over sequences of the same length, and a copy that moves as many bytes as there are keys and values. A variant
that can't be compiled or launched is reported and left out. `--decode` is half a minute with single tokens alone, and
prints the bytes a second of each variant; another number of keys a split gives other bits, to prompts as well. The
defaults are the heads of Qwen3-0.6B. Needs an NVIDIA GPU and Triton.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import measure
from benchmarks.bench_kernels import graph_of
from rl_kernels import paged_launch
from rl_kernels.fused import triton_is_installed
from rl_kernels.paged_attention import PagedPlan, paged_attention
from rl_kernels.paged_launch import BLOCKS, TILE, Block

PAGE_SIZE = 16
CALLS_A_GRAPH = 3
ELEMENT = 2  # bytes of half precision
LIMIT = (
    "Decoding reads each key and value once: its limit is the memory's bandwidth (fraction of copy: of one that reads "
    "half as many bytes, and writes them). Prefill's limit is the matrix instructions' rate; flash and cuDNN attention "
    "stand beside it."
)
# With no need of shared memory, so that nothing is left out before it is tried.
VARIANTS = tuple(
    Block(rows, TILE, warps, stages, kibibytes=0)
    for rows, warps, stages in (
        *((16, 4, 2), (16, 4, 3), (16, 4, 4), (16, 8, 3), (16, 2, 3)),
        *((32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3), (128, 8, 4)),
    )
)
LARGEST_DECODE = 64  # rows of a block that single tokens are timed in
# Of `--decode`: warps, stages, keys a split.
DECODE_VARIANTS = (
    (4, 3, 256),
    (4, 2, 256),
    (4, 4, 256),
    (4, 5, 256),
    (8, 3, 256),
    (2, 3, 256),
    (4, 3, 128),
    (4, 4, 128),
)


@dataclass(frozen=True)
class Case:
    """A batch: queries and keys of each sequence. split: how single tokens' contexts are computed."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    split: bool | None = None


DECODE = {
    f"{count} x {keys}{', split' if split else ''}": Case((1,) * count, (keys,) * count, split)
    for count, keys in ((256, 620), (32, 2000), (16, 2000), (1, 4000))
    for split in (False, True)
}
_MIXED_KEYS = tuple(range(1475, 195, -5))
_SHUFFLED = tuple(torch.tensor(_MIXED_KEYS)[torch.randperm(256, generator=torch.Generator().manual_seed(0))].tolist())
SINGLE_TOKENS = {
    **{name: DECODE[name] for name in ("256 x 620", "32 x 2000", "16 x 2000, split", "1 x 4000, split")},
    "1 x 620, split": Case((1,), (620,), True),
    "256 of 200 to 1475, longest first": Case((1,) * 256, _MIXED_KEYS),
    "256 of 200 to 1475, shuffled": Case((1,) * 256, _SHUFFLED),
}
PREFILL = {
    "8 x 1024": Case((1024,) * 8, (1024,) * 8),
    "1 x 8192": Case((8192,), (8192,)),
    "32 x 600": Case((600,) * 32, (600,) * 32),
}
MIXED = {
    "255 x 620, chunk of 1024": Case((*(1,) * 255, 1024), (*(620,) * 255, 1024)),
    "64 x 620, 5 queries each": Case((5,) * 64, (620,) * 64),
}
# What bits are compared of: a prompt at once, in chunks, and its tokens.
WHOLE = Case((1500,), (1500,))
PIECES = (
    *(Case((size,), (end,)) for size, end in ((5, 5), (20, 300), (64, 700), (300, 1500))),
    *(Case((1,), (end,), split) for end in (1, 64, 257, 1100, 1500) for split in (False, True)),
)


class Batch:
    """Random queries, keys and values of a case, in shuffled pages."""

    def __init__(self, case: Case, arguments: Any) -> None:
        self.case, self.dtype = case, getattr(torch, arguments.dtype)
        self.heads, self.kv_heads, self.head_dim = arguments.heads, arguments.kv_heads, arguments.head_dim
        counts = [-(-keys // PAGE_SIZE) for keys in case.keys]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
        pages = [own.tolist() for own in order.split(counts)]
        self.plan = PagedPlan.of(pages, case.queries, case.keys, page_size=PAGE_SIZE, device="cuda")
        self.query = self._random(sum(case.queries), self.heads)
        self.keys, self.values = (self._random(sum(counts) * PAGE_SIZE, self.kv_heads) for _ in range(2))

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, self.head_dim, device="cuda").to(self.dtype)

    def attend(self) -> torch.Tensor:
        scale = self.head_dim**-0.5
        return paged_attention(self.query, self.keys, self.values, self.plan, scale=scale, split=self.case.split)

    def part(self, piece: Case) -> torch.Tensor:
        """The result for a piece's queries, of the only sequence."""
        (count,), (end,) = piece.queries, piece.keys
        plan = PagedPlan.of(
            [self.plan.page_table[0].tolist()], [count], [end], page_size=PAGE_SIZE, device=self.query.device
        )
        rows, scale = self.query[end - count : end], self.head_dim**-0.5
        return paged_attention(rows, self.keys, self.values, plan, scale=scale, split=piece.split)

    def library(self, backend: SDPBackend) -> Callable[[], object]:
        """torch's causal attention over prompts of equal length."""
        sequences, length = len(self.case.queries), self.case.queries[0]
        shared = self.heads // self.kv_heads
        query, key, value = (
            self._random(sequences * length, self.heads).unflatten(0, (sequences, length)).transpose(1, 2)
            for _ in range(3)
        )
        key, value = (x[:, ::shared].repeat_interleave(shared, dim=1) for x in (key, value))

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return call

    @property
    def bytes_read(self) -> int:
        return 2 * sum(self.case.keys) * self.kv_heads * self.head_dim * ELEMENT

    @property
    def operations(self) -> int:
        """Of both products, of queries and the keys that they see."""
        seen = sum(q * k - q * (q - 1) // 2 for q, k in zip(self.case.queries, self.case.keys, strict=True))
        return 4 * seen * self.heads * self.head_dim


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the variants and writes the report."""
    parser = measure.command_line("paged_attention", __doc__ or "", repeats=10)
    parser.prog = "python -m benchmarks.tune_paged_attention"
    parser.add_argument("--seconds", type=float, default=120, help="no variant is begun after so many")
    parser.add_argument("--decode", action="store_true", help="single tokens alone; nothing is written")
    parser.add_argument("--rows", type=measure.integers, help="only variants of so many rows, as 16,128")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() or not triton_is_installed():
        raise SystemExit("tune_paged_attention times Triton kernels: it needs an NVIDIA GPU and an installed Triton")
    if arguments.decode:
        return _decode_sweep(arguments)
    until = time.monotonic() + arguments.seconds
    report = measure.Report(
        "paged_attention", (__doc__ or "").splitlines()[0], measure.settings_of(arguments), limit=LIMIT
    )
    torch.manual_seed(0)
    batches = {name: Batch(case, arguments) for name, case in {**DECODE, **PREFILL, **MIXED}.items()}
    whole = Batch(WHOLE, arguments)
    bits = _all_bits(whole)
    shipped = BLOCKS[whole.dtype]
    report.results.append({"name": "as shipped", "blocks": [asdict(b) for b in shipped], **_bits(whole, bits)})
    report.results[-1].update(_beside_the_library(batches, arguments.repeats))
    _add_ratios(report, batches)
    report.write(arguments.out)
    for block in VARIANTS:
        if arguments.rows and block.rows not in arguments.rows:
            continue
        if time.monotonic() > until:
            print(f"time is up before {_name(block)}")
            break
        report.results.append({"name": _name(block), **_one_variant(block, whole, bits, batches, arguments.repeats)})
        report.write(arguments.out)
    _print(report)
    return 0


def _decode_sweep(arguments: Any) -> int:
    """Prints, for each of `DECODE_VARIANTS`, the TB/s of each case, and how many elements of a prompt differ when it is
    computed in chunks and single tokens."""
    torch.manual_seed(0)
    batches, whole = {name: Batch(case, arguments) for name, case in SINGLE_TOKENS.items()}, Batch(WHOLE, arguments)
    half = torch.empty(2, batches["256 x 620"].bytes_read // 2, dtype=torch.uint8, device="cuda").view(torch.int64)
    copied = _timed({"copy": partial(half[0].copy_, half[1])}, arguments.repeats)["microseconds"]["copy"]
    rows = [["copy", "", f"{half.nbytes / copied / 1e6:.3f}"]]
    blocks, split = BLOCKS[whole.dtype], paged_launch.SPLIT
    try:
        for warps, stages, keys in DECODE_VARIANTS:
            name = f"{warps} warps, {stages} stages, {keys} keys a split"
            BLOCKS[whole.dtype] = (Block(16, TILE, warps, stages, kibibytes=0), *blocks[1:])
            paged_launch.SPLIT = keys
            try:
                differing = _bits(whole, _all_bits(whole))["differing_elements"]
                micros = _timed({case: batch.attend for case, batch in batches.items()}, arguments.repeats)[
                    "microseconds"
                ]
            except Exception as error:  # a compiler's, a launch's: whatever it is, the next variant may run
                print(f"{name}: {type(error).__name__}: {error}"[:200])
                continue
            speeds = [f"{batch.bytes_read / micros[case] / 1e6:.3f}" for case, batch in batches.items()]
            rows.append([name, differing, *speeds])
    finally:
        BLOCKS[whole.dtype], paged_launch.SPLIT = blocks, split
    measure.print_table("paged attention of single tokens: TB/s of keys and values", ["", "differ", *batches], rows)
    return 0


def _name(block: Block) -> str:
    """Rows, warps and stages."""
    return f"{block.rows}/{block.warps}/{block.stages}"


def _one_variant(
    block: Block, whole: Batch, bits: list[torch.Tensor], batches: dict[str, Batch], repeats: int
) -> dict[str, Any]:
    """What is found with this block alone, or why it can't run."""
    before, BLOCKS[whole.dtype] = BLOCKS[whole.dtype], (block,)
    cases = {**(DECODE if block.rows <= LARGEST_DECODE else {}), **(PREFILL if block.rows > 16 else {})}
    try:
        found = _bits(whole, bits)
        return {**found, **_timed({name: batches[name].attend for name in cases}, repeats)}
    except Exception as error:  # a compiler's, a launch's: whatever it is, the next variant may run
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        BLOCKS[whole.dtype] = before


def _all_bits(whole: Batch) -> list[torch.Tensor]:
    return [whole.attend(), *(whole.part(piece) for piece in PIECES)]


def _bits(whole: Batch, expected: list[torch.Tensor]) -> dict[str, Any]:
    """How many elements differ from the prompt as shipped: of the prompt, its chunks and its single tokens."""
    pieces = (WHOLE, *PIECES)
    wrong = 0
    for piece, found in zip(pieces, _all_bits(whole), strict=True):
        end = piece.keys[0]
        wrong += int((found != expected[0][end - piece.queries[0] : end]).sum())
    return {"differing_elements": wrong}


def _timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Device microseconds of each call."""
    graphs = {name: graph_of(call, CALLS_A_GRAPH) for name, call in calls.items()}
    series = measure.alternate(graphs, repeats, warmups=2)
    return {"microseconds": {name: one.median / CALLS_A_GRAPH * 1e6 for name, one in series.items()}}


def _beside_the_library(batches: dict[str, Batch], repeats: int) -> dict[str, Any]:
    calls: dict[str, Callable[[], object]] = {name: batch.attend for name, batch in batches.items()}
    for name in PREFILL:
        calls[f"{name}, flash"] = batches[name].library(SDPBackend.FLASH_ATTENTION)
        calls[f"{name}, cuDNN"] = batches[name].library(SDPBackend.CUDNN_ATTENTION)
    for name, case in DECODE.items():
        if not case.split:
            half = torch.empty(2, batches[name].bytes_read // 2, dtype=torch.uint8, device="cuda").view(torch.int64)
            calls[f"{name}, copy"] = partial(half[0].copy_, half[1])
    return _timed(calls, repeats)


def _add_ratios(report: measure.Report, batches: dict[str, Batch]) -> None:
    micros = report.results[0]["microseconds"]
    for name in PREFILL:
        report.ratios[f"prefill {name}: TFLOP/s"] = batches[name].operations / micros[name] / 1e6
        for other in ("flash", "cuDNN"):
            report.ratios[f"prefill {name}: {other}'s time over ours"] = micros[f"{name}, {other}"] / micros[name]
    for name, case in DECODE.items():
        if not case.split:
            best = min(micros[name], micros[f"{name}, split"])
            report.ratios[f"decode {name}: TB/s"] = batches[name].bytes_read / best / 1e6
            report.ratios[f"decode {name}: fraction of copy"] = micros[f"{name}, copy"] / best


def _print(report: measure.Report) -> None:
    whole = [name for name, case in DECODE.items() if not case.split]
    rows = []
    for row in report.results:
        micros = {name: f"{value:.1f}" for name, value in row.get("microseconds", {}).items()}
        decode = [f"{micros.get(name, '')} {micros.get(f'{name}, split', '')}" for name in whole]
        rows.append(
            [row["name"], row.get("differing_elements", "error"), *decode, *(micros.get(n, "") for n in PREFILL)]
        )
        if "error" in row:
            print(f"{row['name']}: {row['error']}")
    title = f"paged attention, {report.hardware['gpu']}: microseconds (single tokens: whole, split)"
    measure.print_table(title, ["rows/warps/stages", "differ", *whole, *PREFILL], rows)
    extra = {k: v for k, v in report.results[0]["microseconds"].items() if k not in {**DECODE, **PREFILL}}
    for name, value in {**extra, **report.ratios}.items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
