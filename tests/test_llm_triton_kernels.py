"""The language model's Triton kernels: what the twins say, and the same bits in prefill, in chunks and in decode.

On a GPU they run in bf16, fp16 and fp32; without one in Triton's interpreter, in fp32, in a process of its own, and
they are compiled for a GPU, which needs none. All of it is skipped without Triton.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_for_hopper
from interpreter import passed_in_interpreter
from llm_operations import ROWS, Conversations, Memory, Projections, cuts, dense, rowwise, whole

import rl_kernels.certify_paged as certify
import rl_kernels.paged_launch as paged_launch
from rl_kernels.certify_paged import UNIFORM, certify_paged_attention
from rl_kernels.decode_rows import advance_rows, place_rows
from rl_kernels.draw_tokens import draw_tokens
from rl_kernels.fused import interpreted_kernels, triton_is_installed, warps_for
from rl_kernels.gumbel_argmax import gumbel_argmax
from rl_kernels.log_softmax_gather import gather_log_probs, row_log_softmax
from rl_kernels.paged_attention import PagedPlan, paged_attention
from rl_kernels.paged_launch import BLOCKS, TILE
from rl_kernels.verdict_cache import forget

pytestmark = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNABLE = INTERPRETED or torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
# Ours and the twins' rows are rounded from nearly the same fp32 number, up to twice.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
SMALL = [(4, 2, 16), (3, 1, 48)]  # heads, kv_heads, head_dim
SHAPES = SMALL if INTERPRETED else [*SMALL, (32, 8, 128), (16, 8, 64), (14, 2, 64), (8, 8, 80)]
WIDTHS = [192] if INTERPRETED else [64, 192, 896, 2048, 2560]  # a quarter is a head, of a multiple of 16
SPLIT = TILE // 2 if INTERPRETED else paged_launch.SPLIT  # the interpreter is slow
LENGTHS = [1, SPLIT, 3 * SPLIT + 13] if INTERPRETED else [1, TILE - 1, TILE, SPLIT, 2 * SPLIT + 77, 1500]
ALL = slice(None)

runs = pytest.mark.skipif(not RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(INTERPRETED or not RUNNABLE, reason="needs a GPU")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
widths = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(paged_launch, "SPLIT", SPLIT)
    with interpreted_kernels() if INTERPRETED else nullcontext():
        yield


@runs
@dtypes
@shapes
def test_paged_attention_is_causal_attention(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    talks = Conversations.of(LENGTHS, shape, dtype, DEVICE)
    for ours, right in zip(whole(talks), dense(talks), strict=True):
        torch.testing.assert_close(ours.double(), right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@runs
@dtypes
@shapes
def test_a_row_has_the_same_bits_however_its_sequence_is_cut_and_batched(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    chance = random.Random(0)
    talks = Conversations.of(LENGTHS, shape, dtype, DEVICE)
    expected = whole(talks)
    memory = Memory(talks, chance.choice([4, 16]), chance)
    waiting = [(s, first, end) for s, n in enumerate(talks.lengths) for first, end in cuts(n, chance)]
    chance.shuffle(waiting)
    while waiting:
        batch = [waiting.pop() for _ in range(min(chance.choice([1, 2, 5]), len(waiting)))]
        width = chance.choice([0, 2 * SPLIT // memory.page_size])
        for (s, first, end), found in zip(batch, memory.attend(talks, batch, width=width), strict=True):
            assert torch.equal(found, expected[s][first:end]), (s, first, end, len(batch))


@runs
@dtypes
@shapes
def test_a_token_decoded_over_split_contexts_has_the_bits_of_the_prefill(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    chance = random.Random(0)
    talks = Conversations.of(LENGTHS, shape, dtype, DEVICE)
    expected = whole(talks)
    memory = Memory(talks, 16, chance)
    ends = [[chance.randint(1, n) for n in talks.lengths] for _ in range(2)] + [talks.lengths]
    for batch in ([(s, end - 1, end) for s, end in enumerate(own)] for own in ends):
        for split in (True, False):
            found = memory.attend(talks, batch, width=8 * SPLIT // 16, split=split)
            assert all(torch.equal(x, expected[s][first:end]) for x, (s, first, end) in zip(found, batch, strict=True))


def with_a_larger_block(monkeypatch: pytest.MonkeyPatch, *, tile: int) -> torch.dtype:
    """Gives the first of `DTYPES` two kinds of blocks, the larger one with tiles of its own; returns that dtype."""
    small = BLOCKS[DTYPES[0]][0]
    blocks = (small, replace(small, rows=2 * small.rows, tile=tile))
    monkeypatch.setitem(BLOCKS, DTYPES[0], blocks)
    return DTYPES[0]


@runs
def test_sequences_of_many_and_of_few_queries_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = with_a_larger_block(monkeypatch, tile=BLOCKS[DTYPES[0]][0].tile)
    talks = Conversations.of([130, 9, 61, 100], (4, 2, 16), dtype, DEVICE)
    expected = whole(talks)
    memory = Memory(talks, 16, random.Random(0))
    batch = [(0, 129, 130), (1, 0, 9), (2, 60, 61), (3, 40, 100), (0, 3, 11)]
    for (s, first, end), found in zip(batch, memory.attend(talks, batch), strict=True):
        assert torch.equal(found, expected[s][first:end]), (s, first, end)


@runs
def test_where_larger_blocks_give_other_bits_prompts_are_certified_in_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype = with_a_larger_block(monkeypatch, tile=BLOCKS[DTYPES[0]][0].tile // 2)
    monkeypatch.setattr(certify, "LENGTHS", (max(SPLIT, TILE) + 9, 3))
    monkeypatch.setattr(certify, "CHUNKS", (1, 9))
    monkeypatch.setattr(certify, "DECODED", (SPLIT + 1,))
    forget()
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 16, "page_size": 16}
    found = certify_paged_attention(torch.device(DEVICE), **sizes, dtype=dtype)
    forget()
    assert found.implementation == UNIFORM
    assert found.failed_at is not None
    assert found.failed_at.startswith("triton: ")


@runs
@pytest.mark.parametrize("split", [True, False])
def test_a_row_without_context_is_zeros_and_disturbs_nobody(split: bool) -> None:
    talks = Conversations.of([70], (4, 2, 32), torch.float32, DEVICE)
    memory = Memory(talks, 16, random.Random(0))
    plan = PagedPlan.of([[], memory.pages[0], []], [1, 1, 1], [0, 70, 0], page_size=16, device=DEVICE)
    query = torch.cat([torch.ones_like(talks.queries[0][:2]), talks.queries[0][-1:]])[[0, 2, 1]]
    out = paged_attention(query, memory.keys, memory.values, plan, scale=talks.scale, split=split)
    assert torch.equal(out[1], whole(talks)[0][-1])
    assert not out[[0, 2]].any()


@runs
@dtypes
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (9, 9, 64)], ids=str)
def test_heads_are_normed_turned_and_stored_as_the_twin_says(
    shape: tuple[int, int, int], dtype: torch.dtype, norms: bool
) -> None:
    made = Projections.of(5, shape, dtype, norms=norms, device=DEVICE)
    torch.manual_seed(0)
    twin = Projections.of(5, shape, dtype, norms=norms)
    slots = [4, -1, 0, -1, 2]
    found, right = made.paged(ALL, slots), Context().run(twin.paged, ALL, slots)
    assert found[0].is_contiguous()
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x.cpu(), y, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for x, y in zip(found if not norms else found[2:], right if not norms else right[2:], strict=True):
        assert torch.equal(x.cpu(), y)  # products and sums alone, and copies
    for row, slot in enumerate(slots):
        alone = made.paged(slice(row, row + 1))
        assert torch.equal(alone[0][0], found[0][row])
        assert slot < 0 or all(torch.equal(x[0], y[slot]) for x, y in zip(alone[1:], found[1:], strict=True))


@runs
@dtypes
@shapes
def test_attention_reads_queries_keys_and_values_out_of_one_wide_projection(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim = shape
    talks = Conversations.of([70], shape, dtype, DEVICE)
    expected = whole(talks)
    joint = torch.cat([talks.queries[0], talks.keys[0], talks.values[0]], dim=1).flatten(1).unflatten(1, (-1, head_dim))
    query, key, value = joint.split([heads, kv_heads, kv_heads], dim=1)
    talks = Conversations([query], [key], [value])
    found = Memory(talks, 16, random.Random(0))
    assert torch.equal(found.attend(talks, [(0, 0, 70)])[0], expected[0])


@runs
@dtypes
@widths
def test_a_rowwise_kernel_computes_what_its_twin_says(width: int, dtype: torch.dtype) -> None:
    ours = rowwise(width, dtype, DEVICE)
    torch.manual_seed(0)
    twins = rowwise(width, dtype)
    for name, operation in ours.items():
        found = operation(ALL)
        right = Context().run(twins[name], ALL)  # where `interpreted_kernels` doesn't reach
        for x, y in zip(found, right, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x.cpu(), y, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@runs
@dtypes
@widths
def test_a_row_of_every_operation_has_the_same_bits_alone_and_in_any_slice(width: int, dtype: torch.dtype) -> None:
    for name, operation in rowwise(width, dtype, DEVICE).items():
        expected = operation(ALL)
        for first, end in [(0, 1), (5, 6), (69, 70), (1, 3), (3, 10), (7, 70)]:
            for part, full in zip(operation(slice(first, end)), expected, strict=True):
                assert torch.equal(part, full[first:end]), (name, first, end)


@runs
def test_gathered_log_probs_are_those_of_the_whole_row() -> None:
    operations = rowwise(WIDTHS[-1], torch.float32, DEVICE)
    torch.manual_seed(0)
    rowwise_inputs = operations["gather_log_probs"], operations["row_log_softmax"]
    gathered, rows = (operation(ALL)[0] for operation in rowwise_inputs)
    assert all((rows[n][:, None] == gathered[n]).any(0).all() for n in range(ROWS))


@on_gpu
@dtypes
@shapes
def test_paged_attention_is_certified(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": 16}
    found = certify_paged_attention(torch.device(DEVICE), **sizes, dtype=dtype)
    assert found.implementation == "triton", found.failed_at


@on_gpu
@dtypes
def test_a_captured_graph_serves_other_contexts_and_padding(dtype: torch.dtype) -> None:
    talks = Conversations.of([400, 90, 700], (32, 8, 128), dtype, DEVICE)
    expected = whole(talks)
    memory = Memory(talks, 16, random.Random(0))
    plan = PagedPlan.of([[0]] * 4, [1] * 4, [1] * 4, page_size=16, device=DEVICE, width=64)
    query = torch.zeros(4, 32, 128, device=DEVICE, dtype=dtype)
    found = {}
    for split in (True, False):
        paged_attention(query, memory.keys, memory.values, plan, scale=talks.scale, split=split)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found[split] = paged_attention(query, memory.keys, memory.values, plan, scale=talks.scale, split=split)
        for ends in ([400, 90, 700], [17, 90, 256]):
            for s, end in enumerate(ends):
                plan.page_table[s, : len(memory.pages[s])] = torch.tensor(memory.pages[s], dtype=torch.int32)
                plan.context_lengths[s] = end
                query[s] = talks.queries[s][end - 1]
            plan.context_lengths[3] = 0
            graph.replay()
            for s, end in enumerate(ends):
                assert torch.equal(found[split][s], expected[s][end - 1]), (split, s, end)
            assert not found[split][3].any()


@pytest.mark.skipif(INTERPRETED, reason="this is the process that starts the interpreter")
def test_all_of_this_holds_in_the_interpreter() -> None:
    assert passed_in_interpreter(__file__) >= 4 * len(SMALL) + 6


@runs
def test_draws_are_the_twins_and_a_rows_own() -> None:
    width = 5003 if INTERPRETED else 151_936
    scores = torch.randn(9, width).log_softmax(-1)
    scores[4, 7:] = -torch.inf
    scores[5, :-1] = -torch.inf
    keys = torch.randint(-(2**63), 2**63 - 1, (9,))
    right = Context().run(gumbel_argmax, scores, keys)
    found = gumbel_argmax(scores.to(DEVICE), keys.to(DEVICE))
    # Two sums that lie as near as rounding may change places; among nine rows that would be a rare accident.
    assert torch.equal(found.cpu(), right)
    assert int(found[5]) == width - 1
    for row in range(9):
        alone = gumbel_argmax(scores[row : row + 1].to(DEVICE), keys[row : row + 1].to(DEVICE))
        assert torch.equal(alone, found[row : row + 1])


@runs
def test_a_drawn_tokens_log_prob_is_that_of_the_whole_row() -> None:
    width = 9001 if INTERPRETED else 151_936
    logits = (torch.randn(7, width) * 6).to(DEVICE)
    logits[3, 5:] = -torch.inf
    temperatures = torch.tensor([1.0, 0.6, 1.7, 1.0, 0.3, 1.0, 1.0]).to(DEVICE)
    keys = torch.randint(-(2**63), 2**63 - 1, (7,)).to(DEVICE)
    greedy = torch.tensor([False, False, True, False, True, False, False]).to(DEVICE)
    tokens, log_probs = draw_tokens(logits, temperatures, keys, greedy)
    tempered = logits / temperatures[:, None]
    assert torch.equal(log_probs, row_log_softmax(tempered).gather(1, tokens[:, None])[:, 0])
    assert torch.equal(log_probs, gather_log_probs(tempered, tokens[:, None])[:, 0])
    expected = torch.where(greedy, tempered.argmax(-1), gumbel_argmax(tempered, keys))
    assert torch.equal(tokens, expected)
    logits[1, 17] = torch.nan
    assert draw_tokens(logits, temperatures, keys, greedy)[1].isnan().tolist() == [False, True, *[False] * 5]


@runs
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else DTYPES, ids=str)
def test_a_token_is_that_of_the_greatest_sum_whatever_the_logits_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat and steep ones, two that matter in blocks of their own, and such with infinities; cold and hot."""
    width, count = (1001, 8) if INTERPRETED else (151_936, 64)
    if INTERPRETED:  # blocks enough
        for module in ("draw_tokens", "log_softmax_gather"):
            monkeypatch.setattr(importlib.import_module(f"rl_kernels.{module}"), "BLOCK", 256)
    noise = torch.randn(count, width)
    two = torch.full((count, width), -torch.inf)
    two[:, width // 5], two[:, -5] = 0, -1.2
    steep = torch.arange(width).expand(count, -1) % 1111 * 0.5
    certain = noise.clone()
    certain[:, [width // 2, width - 5]] = torch.inf
    cases = [(noise * 0, 0.7), *((two, t) for t in (1.0, 0.9, 0.8)), (steep, 1e-6), (noise, 100.0), (certain, 1.0)]
    greedy = (torch.arange(count) % 4 == 1).to(DEVICE)
    for logits, temperature in cases:
        x, temperatures = logits.to(DEVICE, dtype).contiguous(), torch.full((count,), temperature, device=DEVICE)
        keys = torch.randint(-(2**63), 2**63 - 1, (count,)).to(DEVICE)
        tempered = x.float() / temperatures[:, None]
        tokens, log_probs = draw_tokens(x, temperatures, keys, greedy)
        assert torch.equal(tokens, torch.where(greedy, tempered.argmax(-1), gumbel_argmax(tempered, keys)))
        expected = row_log_softmax(tempered).gather(1, tokens[:, None])[:, 0]
        assert torch.equal(log_probs.nan_to_num(7), expected.nan_to_num(7))


@runs
@pytest.mark.parametrize("rows", [1, 16, 131])
def test_rows_are_placed_and_go_on_as_the_twins_say(rows: int) -> None:
    contexts = [0 if i % 5 == 2 else 1 + 7 * i % 90 for i in range(rows)]
    pages = [[100 * i + n for n in range(-(-context // 8))] for i, context in enumerate(contexts)]
    plans = [
        PagedPlan.of(pages, [1] * rows, contexts, page_size=8, device=device, width=15) for device in (DEVICE, "cpu")
    ]
    positions = torch.tensor([max(context - 1, 0) for context in contexts])
    seeds, drawn = (torch.randint(-(2**63), 2**63 - 1, (rows,)) for _ in range(2))
    drawn, log_probs = drawn % 2**32, torch.randn(rows)

    def step(plan: PagedPlan, device: str) -> list[torch.Tensor]:
        at, tokens, results = (x.to(device) for x in (positions.clone(), drawn + 1, torch.zeros(2, rows).double()))
        found = []
        for _ in range(2):
            found += place_rows(plan, at, seeds.to(device))
            advance_rows(plan, at, drawn.to(device), log_probs.to(device), tokens=tokens, results=results)
            found += [x.clone() for x in (at, tokens, results, plan.context_lengths)]
        return found

    ours, twins = step(plans[0], DEVICE), Context().run(step, plans[1], "cpu")
    for i, (x, y) in enumerate(zip(ours, twins, strict=True)):
        assert x.dtype == y.dtype
        assert torch.equal(x.cpu(), y), i


# --- compiled without a GPU -----------------------------------------------------------------------------------------


LARGEST_SPILL = 32  # bytes a thread
HEADS = {"KV_HEADS": 8, "SHARED": 4, "BLOCK_SHARED": 4, "SPLIT": SPLIT, "HEAD_DIM": 128, "BLOCK_D": 128}


def configurations() -> list[tuple[str, str, dict[str, Any], int]]:
    """Every kernel at the shapes of Qwen3-8B but attention's: file, name, constants, warps."""
    width, vocabulary = 4096, 151936
    norm = {"EPS": 1e-6, "WIDTH": width, "BLOCK": width, "ROWS": 1}
    heads = {"EPS": 1e-6, "HEADS": 32, "KV_HEADS": 8, "BLOCK_HEADS": 4, "HALF": 64, "BLOCK": 64}
    silu = {"WIDTH": 12288, "BLOCK": 1024, "LARGEST_EXPONENT": 88.0}
    row = {"WIDTH": vocabulary, "BLOCK": 4096}
    return [
        ("paged_attention", "merge_splits", {**HEADS, "SCALE": 0.1275}, warps_for(512)),
        ("paged_qkv", "paged_qkv", {**heads, "NORM": True}, warps_for(512)),
        ("paged_qkv", "paged_qkv", {**heads, "NORM": False}, warps_for(512)),
        ("rms_norm", "rms_norm", {**norm, "ADD": True}, warps_for(width)),
        ("rms_norm", "rms_norm", {**norm, "ADD": False}, warps_for(width)),
        ("silu_mul", "silu_mul", silu, warps_for(1024)),
        ("log_softmax_gather", "log_softmax", row, warps_for(4096)),
        ("log_softmax_gather", "gather_log_probs", {**row, "BLOCK_IDS": 64}, warps_for(4096)),
        ("gumbel_argmax", "gumbel_argmax", row, warps_for(4096)),
        ("draw_tokens", "bounds_of_blocks", row, warps_for(4096)),
        ("draw_tokens", "totals_of_blocks", {**row, "BLOCKS": 64}, warps_for(4096)),
        ("draw_tokens", "draw_tokens", {**row, "BLOCKS": 64}, warps_for(8192)),
        ("decode_rows", "place_rows", {"PAGE": 16, "BLOCK": 128}, warps_for(128)),
        ("decode_rows", "advance_rows", {"BLOCK": 128}, warps_for(128)),
    ]


FP32 = ("tops", "totals", "parts", "cos_sin", "scores", "best", "bounds", "temperatures", "log_probs")
LONG = ("slots", "positions", "ids", "tokens", "drawn", "seeds")
INTEGERS = {
    "greedy": "*u8",
    "results": "*fp64",
    "pages": "*i32",
    "starts": "*i32",
    "lengths": "*i32",
    **dict.fromkeys(LONG, "*i64"),
}
IN_FP32 = ("log_softmax_gather", "gumbel_argmax")  # whatever the model's dtype
LOGARITHMS = (*IN_FP32, "draw_tokens")


def compiled_alone(file: str, name: str, dtype: str, constants: dict[str, Any], **options: int) -> Any:
    """A kernel compiled for a Hopper GPU, with pointers to that dtype unless its argument's name says otherwise."""
    kinds = {**INTEGERS, **dict.fromkeys(FP32, "*fp32")}
    if file in (*LOGARITHMS, "decode_rows"):
        kinds["keys"] = "*i64"
    return compiled_for_hopper(file, name, lambda argument: kinds.get(argument, f"*{dtype}"), constants, **options)


def spilled(found: Any, folder: Path) -> int:
    """Bytes a thread keeps in memory for want of registers."""
    from triton import knobs

    (folder / "kernel").write_bytes(found.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(folder / "kernel")]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stack = re.search(r" STACK:(\d+) ", usage)
    assert stack is not None, usage
    return int(stack[1])


@compiles
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("file", "name", "constants", "warps"), configurations())
def test_a_kernel_compiles_without_spills_or_fused_multiply_adds(
    file: str, name: str, constants: dict[str, Any], warps: int, dtype: str, tmp_path: Path
) -> None:
    own = "fp32" if file in IN_FP32 else dtype
    found = compiled_alone(file, name, own, constants, num_warps=warps)
    if file not in LOGARITHMS:  # a logarithm is made of them
        assert not re.search(r"\bfma\.", found.asm["ptx"])
    assert spilled(found, tmp_path) == 0


@compiles
@pytest.mark.parametrize("name", ["paged_attention", "attend_splits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_block_of_attention_takes_the_shared_memory_that_is_said_and_spills_next_to_nothing(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    for block in BLOCKS[dtype] if name == "paged_attention" else BLOCKS[dtype][:1]:
        sizes = {**HEADS, "SCALE": 0.1275, "PAGE": 16, "ROWS": block.rows, "TILE": block.tile}
        short = "fp32" if dtype == torch.float32 else "bf16"
        options = {"num_warps": block.warps, "num_stages": block.stages}
        found = compiled_alone("paged_attention", name, short, sizes, **options)
        assert 1024 * (block.kibibytes - 4) < found.metadata.shared <= 1024 * block.kibibytes
        assert spilled(found, tmp_path) <= LARGEST_SPILL, block


@compiles
def test_a_rows_sum_has_one_order_whatever_the_logits_dtype() -> None:
    """That of `row_log_softmax`, which has them in fp32: how numbers lie over threads decides the order."""
    sizes = {"WIDTH": 151_936, "BLOCK": 4096}
    layouts = {
        tuple(re.findall(r"#blocked = #ttg.blocked<.*>", found.asm["ttgir"]))
        for found in (
            compiled_alone("log_softmax_gather", "log_softmax", "fp32", sizes, num_warps=8),
            *(
                compiled_alone("draw_tokens", "totals_of_blocks", dtype, {**sizes, "BLOCKS": 64}, num_warps=8)
                for dtype in ("bf16", "fp16", "fp32")
            ),
        )
    }
    assert len(layouts) == 1
