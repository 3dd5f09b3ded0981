"""The language model's operations: right, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llm_operations import ROWS, Conversations, Memory, Projections, cuts, dense, rowwise, whole
from torch.func import functional_call

import rl_kernels.certify_paged as certify
import rl_kernels.paged_attention as paged
from rl_kernels.draw_tokens import draw_tokens
from rl_kernels.log_softmax_gather import gather_log_probs, row_log_softmax
from rl_kernels.paged_attention import PagedPlan, paged_attention
from rl_kernels.paged_qkv import HeadNorms, Rotation, paged_qkv
from rl_kernels.rms_norm import add_rms_norm, rms_norm
from rl_kernels.silu_mul import silu_mul
from rl_kernels.verdict_cache import Verdict, VerdictCache, forget

DTYPES = [torch.float32, torch.bfloat16]
# (heads, kv_heads, head_dim)
SHAPES = [(4, 4, 16), (4, 2, 32), (8, 2, 64), (8, 1, 128), (1, 1, 40), (6, 2, 32), (16, 1, 16)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dtypes
@shapes
def test_paged_attention_is_causal_attention(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    talks = Conversations.of([1, 63, 64, 65, 130], shape, dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    for ours, right in zip(whole(talks), dense(talks), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("count", [1, 2, 3])
@dtypes
@shapes
def test_a_row_has_the_same_bits_however_its_sequence_is_cut_and_batched(
    shape: tuple[int, int, int], dtype: torch.dtype, count: int
) -> None:
    torch.manual_seed(count)
    chance = random.Random(count)
    talks = Conversations.of([1, 5, 64, 129, chance.randint(140, 330)], shape, dtype)
    with threads(1):
        expected = whole(talks)
    memory = Memory(talks, chance.choice([1, 4, 16, 64]), chance)
    waiting = [(s, first, end) for s, n in enumerate(talks.lengths) for first, end in cuts(n, chance)]
    chance.shuffle(waiting)
    with threads(count):
        while waiting:
            batch = [waiting.pop() for _ in range(min(chance.choice([1, 1, 2, 5, 16]), len(waiting)))]
            width = chance.choice([0, 400])
            for (s, first, end), found in zip(batch, memory.attend(talks, batch, width=width), strict=True):
                assert torch.equal(found, expected[s][first:end]), (s, first, end, len(batch))


def test_every_position_decoded_alone_has_the_bits_of_the_prefill() -> None:
    torch.manual_seed(0)
    talks = Conversations.of([700], (4, 2, 32), torch.float32)
    expected = whole(talks)[0]
    memory = Memory(talks, 16, random.Random(1))
    for position in [*range(0, 70), *range(70, 700, 9)]:
        assert torch.equal(memory.attend(talks, [(0, position, position + 1)])[0], expected[position : position + 1])


@pytest.mark.parametrize("size", [0, 2**16, 2**30])
def test_the_size_of_work_groups_changes_no_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    talks = Conversations.of([300, 10, 150], (4, 2, 32), torch.float32)
    expected = whole(talks)
    monkeypatch.setattr(paged, "GROUP_BYTES", size)
    memory = Memory(talks, 16, random.Random(1))
    for ours, before in zip(memory.attend(talks, [(0, 0, 300), (1, 0, 10), (2, 7, 150)]), expected, strict=True):
        assert torch.equal(ours, before[-len(ours) :])


def test_a_row_without_context_is_zeros_and_disturbs_nobody() -> None:
    torch.manual_seed(0)
    talks = Conversations.of([70], (4, 2, 32), torch.float32)
    memory = Memory(talks, 16, random.Random(0))
    plan = PagedPlan.of([[], memory.pages[0], []], [1, 70, 1], [0, 70, 0], page_size=16)
    query = torch.cat([torch.ones(1, 4, 32), talks.queries[0], torch.ones(1, 4, 32)])
    out = paged_attention(query, memory.keys, memory.values, plan, scale=talks.scale)
    assert torch.equal(out[1:71], whole(talks)[0])
    assert not out[[0, 71]].any()


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 0 queries"):
        PagedPlan.of([[0], [1]], [1, 0], [1, 4], page_size=4)
    with pytest.raises(ValueError, match="5 queries and 4 keys"):
        PagedPlan.of([[0]], [5], [4], page_size=4)
    with pytest.raises(ValueError, match="1 pages of 4"):
        PagedPlan.of([[0]], [1], [5], page_size=4)
    plan = PagedPlan.of([[0]], [1], [4], page_size=4)
    cache = torch.zeros(4, 2, 16)
    with pytest.raises(ValueError, match="as many queries as the plan has, 1, got 2"):
        paged_attention(torch.zeros(2, 4, 16), cache, cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="kv_heads that divide 3"):
        paged_attention(torch.zeros(1, 3, 16), cache, cache, plan, scale=1.0)
    with pytest.raises(ValueError, match=r"a positive scale, got -1\.0"):
        paged_attention(torch.zeros(1, 4, 16), cache, cache, plan, scale=-1.0)
    with pytest.raises(ValueError, match="no gradient"):
        paged_attention(torch.zeros(1, 4, 16, requires_grad=True), cache, cache, plan, scale=1.0)


# --- certified --------------------------------------------------------------------------------------------------------


def certified(cache: VerdictCache | None = None) -> Verdict:
    forget()
    cpu = torch.device("cpu")
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16}
    try:
        return certify.certify_paged_attention(cpu, **shape, dtype=torch.float32, cache=cache)
    finally:
        forget()  # what a broken operation was found to do


def test_paged_attention_is_certified_and_the_verdict_remembered(tmp_path: Path) -> None:
    found = certified(VerdictCache(tmp_path))
    assert found == Verdict("paged_attention 4x2x32 float32", "twin", ("twin",))
    again = certified(VerdictCache(tmp_path))
    assert again.cached
    assert again.implementation == "twin"


def test_attention_whose_bits_depend_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_size(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: PagedPlan, **how: Any) -> Any:
        monkeypatch.setattr(paged, "TILE", 64 if len(plan.lengths) == 1 else 32)
        return paged_attention(query, keys, values, plan, **how)

    monkeypatch.setattr(certify, "paged_attention", by_size)
    found = certified()
    assert not found.exact
    assert found.failed_at is not None
    assert found.failed_at.startswith("twin: all prefilled in one batch")


def test_something_else_than_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def hot(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: PagedPlan, **how: Any) -> Any:
        return paged_attention(query, keys, values, plan, **{**how, "scale": 1.01 * how["scale"]})

    monkeypatch.setattr(certify, "paged_attention", hot)
    assert certified().failed_at == "twin: a prefill of 63 tokens is not attention"


# --- row by row -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [17, 64, 100, 896, 2048])
@dtypes
def test_a_row_of_every_operation_has_the_same_bits_alone_and_in_any_slice(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    for name, operation in rowwise(width, dtype).items():
        with threads(1):
            expected = operation(slice(None))
        for count in (1, 2, 3):
            with threads(count):
                for first, end in [(0, ROWS), (0, 1), (5, 6), (69, 70), (1, 3), (3, 10), (7, 70), (2, 67)]:
                    for part, full in zip(operation(slice(first, end)), expected, strict=True):
                        assert torch.equal(part, full[first:end]), (name, first, end, count)


def test_a_very_wide_row_has_the_same_bits_alone_and_on_two_threads() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 100_000), torch.randn(100_000)
    with threads(1):
        expected = rms_norm(x, weight, 1e-6)
    with threads(2):
        assert torch.equal(torch.cat([rms_norm(row[None], weight, 1e-6) for row in x]), expected)


@dtypes
def test_norms_round_where_qwen3_does(dtype: torch.dtype) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(0)
    x, y = torch.randn(2, 9, 256).to(dtype)
    theirs = Qwen3RMSNorm(256, eps=1e-6).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(1 + torch.randn(256))
        normed, total = add_rms_norm(x, y, theirs.weight, 1e-6)
        assert torch.equal(rms_norm(x, theirs.weight, 1e-6), theirs(x))
        assert torch.equal(total, x + y)
        assert torch.equal(normed, theirs(x + y))


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("shape", [(6, 2, 32), (1, 1, 6)], ids=str)
@dtypes
def test_heads_are_normed_and_turned_as_qwen3_does_and_stored(
    shape: tuple[int, int, int], dtype: torch.dtype, norms: bool
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    heads, kv_heads, head_dim = shape
    made = Projections.of(5, shape, dtype, norms=norms)
    found = made.paged(slice(None), slots=[4, -1, 0, -1, 2])
    parts = made.qkv.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    query, key, value = (x.transpose(0, 1)[None] for x in parts)
    if made.norms is not None:
        norm = Qwen3RMSNorm(head_dim, eps=made.norms.eps)
        with torch.no_grad():
            query, key = (
                functional_call(norm, {"weight": weight}, x)
                for weight, x in ((made.norms.query, query), (made.norms.key, key))
            )
    cos, sin = (x.repeat(1, 2)[made.rotation.positions][None].to(dtype) for x in made.rotation.cos_sin.chunk(2, dim=-1))
    query, key = (x[0].transpose(0, 1) for x in apply_rotary_pos_emb(query, key, cos, sin))
    assert torch.equal(found[0], query)
    for ours, right in zip(found[1:], (key, value[0].transpose(0, 1)), strict=True):
        assert torch.equal(ours[[4, 0, 2]], right[[0, 2, 4]])
        assert not ours[[1, 3]].any()


def test_projections_that_do_not_fit_are_refused() -> None:
    made = Projections.of(3, (2, 1, 16), torch.float32, norms=True)
    assert made.norms is not None
    caches, slots, rotation, norms = torch.zeros(2, 8, 1, 16), torch.arange(3), made.rotation, made.norms

    def refused(match: str, **changed: Any) -> None:
        given = {"qkv": made.qkv, "slots": slots, "key_cache": caches[0], "rotation": rotation, "norms": norms}
        with pytest.raises(ValueError, match=match):
            paged_qkv(**{"value_cache": caches[1], **given, **changed})

    refused(r"\(heads \+ 2 \* 1\) \* 16\] .* got \(3, 40\)", qkv=made.qkv[:, :40])
    refused(r"got \(3, 32\)", qkv=made.qkv[:, :32])
    refused("one dtype", qkv=made.qkv.bfloat16())
    refused("no gradient", qkv=made.qkv.clone().requires_grad_())
    refused(r"slots of shape \(3,\), got \(2,\)", slots=slots[:2])
    refused(r"positions of shape \(3,\)", rotation=Rotation(rotation.cos_sin, slots[:2]))
    refused(r"takes cos_sin in torch\.float32", rotation=Rotation(rotation.cos_sin.half(), slots))
    refused(r"key_weight of shape \(16,\)", norms=HeadNorms(norms.query, norms.key[:8], 1e-6))
    refused("contiguous caches", key_cache=torch.zeros(8, 1, 32)[..., ::2])


@dtypes
def test_silu_mul_is_silu_times_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.cat([torch.randn(9, 128) * 10, torch.tensor([-200.0, -90.0, 0.0, 200.0]).repeat(9, 32)], dim=1)
    gate_up = gate_up.to(dtype).roll(64, dims=1).requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    expected, ours = F.silu(gate) * up, silu_mul(gate_up)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    (right,) = torch.autograd.grad(expected.float().sum(), gate_up)
    (found,) = torch.autograd.grad(ours.float().sum(), gate_up)
    torch.testing.assert_close(found, right, atol=4 * tolerance, rtol=4 * tolerance)


def test_gathered_log_probs_are_those_of_the_whole_row() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 1000) * 30, torch.randint(0, 1000, (6, 4))
    logits[0, :990] = -torch.inf
    whole_rows = row_log_softmax(logits)
    torch.testing.assert_close(whole_rows.double(), logits.double().log_softmax(-1), atol=1e-4, rtol=1e-6)
    assert torch.equal(gather_log_probs(logits, ids), whole_rows.gather(1, ids))


def test_a_drawn_tokens_log_prob_is_that_of_the_whole_row() -> None:
    torch.manual_seed(0)
    logits, keys = torch.randn(4, 1000) * 5, torch.arange(4)
    temperatures, greedy = torch.tensor([1.0, 0.5, 1.0, 2.0]), torch.tensor([False, False, True, True])
    logits[0, 1:] = -torch.inf
    tokens, log_probs = draw_tokens(logits, temperatures, keys, greedy)
    rows = row_log_softmax(logits / temperatures[:, None])
    assert torch.equal(log_probs, rows.gather(1, tokens[:, None])[:, 0])
    assert int(tokens[0]) == 0
    assert torch.equal(tokens[2:], logits[2:].argmax(-1))
    logits[1, 17] = torch.nan
    assert draw_tokens(logits, temperatures, keys, greedy)[1].isnan().tolist() == [False, True, False, False]
    half = logits.bfloat16()
    for ours, widened in zip(*(draw_tokens(x, temperatures, keys, greedy) for x in (half, half.float())), strict=True):
        assert ours.dtype == widened.dtype
        assert torch.equal(ours.nan_to_num(7), widened.nan_to_num(7))


def test_operations_refuse_what_does_not_fit() -> None:
    x = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="weight of shape"):
        rms_norm(x, torch.zeros(32), 1e-6)
    with pytest.raises(ValueError, match="one dtype"):
        add_rms_norm(x, x.bfloat16(), torch.zeros(64), 1e-6)
    with pytest.raises(ValueError, match="gate_up of shape"):
        silu_mul(torch.zeros(3, 63))
    with pytest.raises(ValueError, match="in fp32"):
        row_log_softmax(x.bfloat16())
    with pytest.raises(ValueError, match=r"keys of shape \(3,\)"):
        draw_tokens(x, torch.ones(3), torch.zeros(2).long(), torch.zeros(3).bool())
    with pytest.raises(ValueError, match=r"temperatures in torch.float32, got torch.bfloat16"):
        draw_tokens(x.bfloat16(), torch.ones(3).bfloat16(), torch.zeros(3).long(), torch.zeros(3).bool())
    with pytest.raises(ValueError, match=r"ids of shape \[3, k\]"):
        gather_log_probs(x, torch.zeros(2, 1).long())
