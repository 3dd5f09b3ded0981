"""Kernels of models with experts: the twins' choices and orders, products near the twins', and bits that don't depend
on who shares an expert.

On a GPU they run in bf16, fp16 and fp32; without one in Triton's interpreter, in fp32, in a process of its own, and
they are compiled for a GPU, which needs none. Without Triton only what is refused is tried.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import Context
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_for_hopper
from interpreter import passed_in_interpreter

import rl_kernels.certify_grouped as certify
from llm_runtime.layers.moe import ExpertParts, SparseMLP, group_experts
from llm_runtime.models.base import ModelConfig, OneRank
from rl_kernels import reference
from rl_kernels.certify_grouped import ExpertShape, certify_grouped
from rl_kernels.fused import interpreted_kernels, triton_is_installed
from rl_kernels.grouped_linear import FP8, TILES, ExpertMatrices, gated_grouped_linear, grouped_linear
from rl_kernels.linear import fixed_tiles
from rl_kernels.mode import Choices
from rl_kernels.routing import Places, add_experts, choose_experts
from rl_kernels.silu_mul import silu_mul
from rl_kernels.verdict_cache import forget

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNABLE = triton_is_installed() and (INTERPRETED or torch.cuda.is_available())
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
# experts, each, rows, hidden, inner
SMALL = [(16, 3, 70, 48, 32), (6, 2, 1, 64, 80)]
SIZES = SMALL if INTERPRETED else [*SMALL, (128, 8, 300, 2048, 768), (60, 4, 200, 2048, 1408)]

runs = pytest.mark.skipif(not RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(INTERPRETED or not RUNNABLE, reason="needs a GPU")
compiles = pytest.mark.skipif(INTERPRETED or not triton_is_installed(), reason="needs Triton, not its interpreter")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = pytest.mark.parametrize("size", SIZES, ids=str)
stored = pytest.mark.parametrize("quantised", [False, True], ids=["whole", "bytes"])

Size = tuple[int, int, int, int, int]


@pytest.fixture(autouse=True)
def _on_triton() -> Iterator[None]:
    torch.manual_seed(0)
    with interpreted_kernels() if INTERPRETED else nullcontext():
        yield


def matrices(experts: int, n: int, k: int, dtype: torch.dtype, *, quantised: bool = False) -> ExpertMatrices:
    weight = torch.randn(experts, n, k) * k**-0.5
    if not quantised:
        return ExpertMatrices(weight.to(DEVICE, dtype))
    scales = torch.exp2(torch.randint(-9, -6, (experts, n)).float())
    return ExpertMatrices((weight / scales.unsqueeze(-1)).clamp(-448, 448).to(FP8).to(DEVICE), scales.to(DEVICE))


def routed(size: Size) -> Places:
    """To experts of which some have no row, and one has every row."""
    experts, each, rows, *_ = size
    scores = torch.randn(rows, experts)
    scores[:, 1] += 9
    scores[:, 4] -= 9
    return Places.of(choose_experts(scores.to(DEVICE), each, normalised=True)[0], experts)


@runs
@dtypes
@sizes
@pytest.mark.parametrize("normalised", [True, False])
def test_choices_orders_and_sums_are_the_twins(size: Size, dtype: torch.dtype, normalised: bool) -> None:
    experts, each, rows, hidden, _ = size
    scores = torch.randint(-3, 4, (rows, experts)).to(dtype)  # with many equals
    scores[-1, 3] = torch.nan
    found = choose_experts(scores.to(DEVICE), each, normalised=normalised)
    right = Context().run(choose_experts, scores, each, normalised=normalised)
    assert torch.equal(found[0].cpu(), right[0])
    torch.testing.assert_close(found[1].cpu(), right[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)

    places, sorted_ = Places.of(found[0], experts), Context().run(Places.of, right[0], experts)
    assert torch.equal(places.order.cpu(), sorted_.order)
    assert torch.equal(places.counts.cpu(), sorted_.counts)

    computed, weights = torch.randn(rows * each, hidden).to(dtype), torch.rand(rows, each).to(dtype)
    summed = add_experts(computed.to(DEVICE), weights.to(DEVICE))
    assert torch.equal(summed.cpu(), Context().run(add_experts, computed, weights))  # products and sums alone


@runs
@dtypes
@sizes
@stored
def test_products_are_the_twins(size: Size, dtype: torch.dtype, quantised: bool) -> None:
    experts, _, rows, hidden, inner = size
    places = routed(size)
    gate_up = matrices(experts, 2 * inner, hidden, dtype, quantised=quantised)
    down = matrices(experts, hidden, inner, dtype, quantised=quantised)
    x = torch.randn(rows, hidden).to(DEVICE, dtype)
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    activated = gated_grouped_linear(x, gate_up, places)
    torch.testing.assert_close(activated, reference.gated_grouped_linear(x, gate_up, places), **near)
    computed = grouped_linear(activated, down, places)
    torch.testing.assert_close(computed, reference.grouped_linear(activated, down, places), **near)
    if not INTERPRETED:  # where another place in a tile is another sum
        plain = grouped_linear(x[places.order.long() // places.each], gate_up, places)[places.order.long()]
        assert torch.equal(silu_mul(plain), activated)


@runs
@dtypes
@pytest.mark.parametrize("size", SIZES[1:], ids=str)
@stored
def test_it_is_certified_that_a_rows_bits_are_its_own(size: Size, dtype: torch.dtype, quantised: bool) -> None:
    experts, each, _, hidden, inner = size
    shape = ExpertShape(experts, each, hidden, inner, dtype, quantised)
    found = certify_grouped(shape, torch.device(DEVICE))
    assert found.implementation == "triton", found.failed_at


@runs
@pytest.mark.parametrize(
    ("slip", "said"),
    [
        (lambda x: 1.1, "it is not the product by each expert"),
        (lambda x: 1 + 1e-8 * len(x), "row 0 alone"),
        (lambda x: 1 + 1e-6 * x[:1], "rows in another order"),
    ],
    ids=["wrong", "number of rows", "neighbour"],
)
def test_what_depends_on_other_rows_is_refused(slip: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "gated_grouped_linear", lambda x, *others: gated_grouped_linear(x * slip(x), *others))
    if said == "rows in another order":
        monkeypatch.setattr(certify, "_slices", lambda count: iter([("its first rows", slice(0, 7))]))
    forget()
    found = certify_grouped(ExpertShape(4, 2, 32, 16, torch.float32), torch.device(DEVICE))
    forget()
    assert (found.implementation, found.failed_at) == ("torch", f"triton: {said}")


def mlp(dtype: torch.dtype, *, quantised: bool) -> SparseMLP:
    """A layer of 16 experts with random weights, written as a refit writes them."""
    sizes = dict.fromkeys(("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    rest = {"head_dim": 16, "intermediate_size": 1, "max_position_embeddings": 1, "rms_norm_eps": 1e-6}
    names = {"architecture": "Qwen3MoeForCausalLM", "tie_word_embeddings": False, "rope_theta": 1e4}
    config = ModelConfig(**names, **sizes, **rest, hidden_size=48, dtype=dtype, quantised=quantised)  # type: ignore[arg-type]
    parts = ExpertParts(frozenset({0}), experts=16, experts_per_token=3, inner=32, normalised=True)
    with torch.device(DEVICE):
        layer = SparseMLP(config, parts, tensor_parallel=OneRank())
    layer.gate.weight.copy_(torch.randn(layer.gate.weight.shape))
    layer.gate.product = fixed_tiles
    for part in (layer.experts.gate_up_proj, layer.experts.down_proj):
        made = matrices(1, *part.weight.shape, dtype, quantised=quantised)
        part.weight.copy_(made.weight[0])
        if part.scale is not None and made.scales is not None:
            part.scale.copy_(made.scales[0])
    return layer


@runs
@dtypes
@stored
def test_a_layer_computes_the_same_by_one_product_as_by_many(dtype: torch.dtype, quantised: bool) -> None:
    with torch.no_grad():
        layer, x = mlp(dtype, quantised=quantised), torch.randn(40, 48).to(DEVICE, dtype)
        many = layer(x)
        assert not layer.experts.grouped
        group_experts(layer, Choices(grouped_experts=True))
        assert layer.experts.grouped
        one = layer(x)
        torch.testing.assert_close(one, many, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])
        for first, end in ((0, 1), (7, 8), (39, 40), (3, 20)):
            assert torch.equal(layer(x[first:end]), one[first:end])
        pieces = dict(layer.experts.down_proj.pieces("mlp.experts.down_proj"))
        stored_at = pieces["mlp.experts.5.down_proj.weight"]
        stored_at.owner.weight[stored_at.start : stored_at.start + stored_at.length] = 0
        chosen, weights = choose_experts(layer.gate(x), 3, normalised=True)
        changed, weight = (layer(x) != one).any(-1), (weights * (chosen == 5)).sum(-1)
        assert (weight > 0.1).any()
        assert changed[weight > 0.1].all()
        assert not changed[weight == 0].any()


@on_gpu
@dtypes
def test_a_captured_layer_serves_other_rows_with_other_experts(dtype: torch.dtype) -> None:
    with torch.no_grad():
        layer, x = mlp(dtype, quantised=False), torch.randn(3, 40, 48).to(DEVICE, dtype)
        group_experts(layer, Choices(grouped_experts=True))
        wanted = [layer(rows) for rows in x]
        rows = x[0].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(rows)
        for given, right in zip(x, wanted, strict=True):
            rows.copy_(given)
            graph.replay()
            assert torch.equal(found, right)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, m, p: grouped_linear(x, m, p), r"x of shape \(6, 16\), got \(3, 16\)"),
        (lambda x, m, p: gated_grouped_linear(x, ExpertMatrices(m.weight[:, :7].contiguous()), p), "got 7"),
        (lambda x, m, p: gated_grouped_linear(x, ExpertMatrices(m.weight[:3]), p), r"counts of shape \(3,\)"),
        (lambda x, m, p: gated_grouped_linear(x.half(), m, p), "one dtype"),
        (lambda x, m, p: gated_grouped_linear(x, ExpertMatrices(m.weight, torch.ones(4, 8)), p), "bytes in"),
        (lambda x, m, p: gated_grouped_linear(x.requires_grad_(), m, p), "has no gradient"),
        (lambda x, m, p: choose_experts(x, 17, normalised=True), "1 to E experts"),
        (lambda x, m, p: Places.of(x, 4), "int32 experts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Any, said: str) -> None:
    places = Places.of(torch.tensor([[0, 1], [1, 3], [0, 3]], dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=said):
        call(torch.randn(3, 16), ExpertMatrices(torch.randn(4, 8, 16)), places)


@compiles
def test_all_of_this_holds_in_the_interpreter() -> None:
    assert passed_in_interpreter(__file__) >= 8 * len(SMALL) + 6


# --- compiled without a GPU -----------------------------------------------------------------------------------------

SHARED = 99 << 10  # bytes that a program may have on every GPU that multiplies bf16
KINDS = {"order": "*i32", "counts": "*i32", "experts": "*i32", "scales": "*fp32"}


def compiled(file: str, name: str, kinds: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """A kernel compiled for a Hopper GPU."""
    known = {**KINDS, **kinds}
    return compiled_for_hopper(file, name, lambda argument: known.get(argument, kinds["x"]), constants, **options)


@compiles
@pytest.mark.parametrize(("gated", "n", "k"), [(True, 1536, 2048), (False, 2048, 768)])
@pytest.mark.parametrize("kind", ["bf16", "fp8e4nv", "fp32"])
def test_a_product_compiles_to_tensor_core_instructions_without_spills(kind: str, gated: bool, n: int, k: int) -> None:
    """At the sizes of Qwen3-30B-A3B."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    tile = TILES[dtype]
    sizes = {"EACH": 8, "N": n, "K": k, "EXPERTS": 128, "BLOCK_EXPERTS": 128}
    sizes |= {"GATED": gated, "QUANTISED": kind == "fp8e4nv"}
    sizes |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    kinds = {"x": "*fp32" if kind == "fp32" else "*bf16", "weight": f"*{kind}"}
    found = compiled("grouped_linear", "grouped_linear", kinds, sizes, num_warps=tile.warps, num_stages=tile.stages)
    assert found.metadata.shared <= SHARED
    assert ".local" not in found.asm["ptx"]
    if kind != "fp32":
        assert set(re.findall(r"wgmma\.mma_async\S*", found.asm["ptx"])) == {
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
        }
    assert all(".v4.b32" in a for a in re.findall(r"st\.global\S*", found.asm["ptx"]))


@compiles
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_stands_around_products_compiles_without_fused_multiply_adds(dtype: str) -> None:
    for name, warps, sizes in (
        ("choose_experts", 1, {"EXPERTS": 128, "EACH": 8, "NORMALISED": True, "BLOCK": 128}),
        ("sort_places", 2, {"BLOCK": 1024}),
        ("add_experts", 2, {"EACH": 8, "WIDTH": 2048, "BLOCK": 1024}),
    ):
        found = compiled("routing", name, {"x": f"*{dtype}"}, sizes, num_warps=warps)
        if name == "add_experts":
            assert not re.search(r"\bfma\.", found.asm["ptx"])
        assert ".local" not in found.asm["ptx"], name
