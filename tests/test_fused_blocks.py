"""The fused block forwards are the blocks' own within rounding, row-invariant, and recomputed alike; or step aside."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import FusedJointAttnProcessor2_0
from tiny_models import flux_pipeline, qwen_image_pipeline, sd3_pipeline

from diffusion_rl.models.fused_blocks import JOINT_TRANSFORMER_BLOCKS, QWEN_IMAGE_BLOCKS
from diffusion_rl.models.fused_flux import FLUX_BLOCKS
from diffusion_rl.trainer import certified_family
from rl_kernels import AttentionPlan, exact_forward
from rl_kernels.mode import EXACT

FUSED = replace(EXACT, fused=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def sd3_inputs(samples: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(samples, 16, 8, 8).to(dtype),
        "timestep": torch.linspace(900, 100, samples),
        "encoder_hidden_states": torch.randn(samples, 13, 128).to(dtype),
        "pooled_projections": torch.randn(samples, 128).to(dtype),
    }


def qwen_inputs(samples: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(samples, 16, 64).to(dtype),
        "timestep": torch.linspace(0.9, 0.1, samples).to(dtype),
        "encoder_hidden_states": torch.randn(samples, 13, 64).to(dtype),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, 4, 4)]] * samples,
    }


def flux_inputs(samples: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(samples, 16, 64).to(dtype),
        "timestep": torch.linspace(0.9, 0.1, samples).to(dtype),
        "guidance": torch.full((samples,), 3.5),
        "pooled_projections": torch.randn(samples, 64).to(dtype),
        "encoder_hidden_states": torch.randn(samples, 13, 64).to(dtype),
        "txt_ids": torch.zeros(13, 3),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
    }


Case = tuple[Callable[..., Any], Callable[..., dict[str, Any]], dict[Any, Any]]
CASES: dict[str, Case] = {
    "sd3": (sd3_pipeline, sd3_inputs, JOINT_TRANSFORMER_BLOCKS),
    "sd3-dual": (partial(sd3_pipeline, dual_attention=True), sd3_inputs, JOINT_TRANSFORMER_BLOCKS),
    "qwen": (qwen_image_pipeline, qwen_inputs, QWEN_IMAGE_BLOCKS),
    "flux": (flux_pipeline, flux_inputs, FLUX_BLOCKS),
}
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def counted() -> list[type]:
    """The classes of the blocks whose fused forward ran, call by call."""
    return []


def counting(forwards: dict[Any, Any], ran: list[type]) -> dict[Any, Any]:
    def one(function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(type(module))
        return function(module, *args, **kwargs)

    return {cls: partial(one, function) for cls, function in forwards.items()}


def blocks_of(transformer: Any) -> list[Any]:
    return [*transformer.transformer_blocks, *getattr(transformer, "single_transformer_blocks", ())]


def without_head_norms(transformer: Any) -> Any:
    for block in blocks_of(transformer):
        for attn in (block.attn, getattr(block, "attn2", None)):
            if attn is not None:
                attn.norm_q = attn.norm_k = attn.norm_added_q = attn.norm_added_k = None
    return transformer


@cases
@pytest.mark.parametrize("head_norms", [True, False], ids=["head norms", "no head norms"])
def test_fused_forwards_are_the_blocks_own_within_rounding_and_so_are_their_gradients(
    name: str, head_norms: bool, counted: list[type]
) -> None:
    build, inputs, forwards = CASES[name]
    if name == "flux" and not head_norms:
        pytest.skip("its own forward can't do without them")
    transformer = copy.deepcopy(build().transformer)
    transformer = transformer if head_norms else without_head_norms(transformer)
    given, found = inputs(3), {}
    for choices in (EXACT, FUSED):
        with exact_forward(transformer, None, choices, counting(forwards, counted)):
            output = transformer(**given, return_dict=False)[0]
            output.square().mean().backward()
        grads = {n: p.grad for n, p in transformer.named_parameters() if p.grad is not None}
        found[choices.fused] = (output.detach(), grads)
        transformer.zero_grad()
    assert len(counted) == len(blocks_of(transformer))
    torch.testing.assert_close(found[True][0], found[False][0], atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[True][0], found[False][0])  # it did run on other operations
    assert found[True][1].keys() == found[False][1].keys()
    for parameter, grad in found[False][1].items():
        torch.testing.assert_close(found[True][1][parameter], grad, atol=1e-5, rtol=1e-4, msg=parameter)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_sample_under_fused_forwards_has_the_same_bits_alone_in_a_batch_and_beside_longer_prompts(
    name: str, dtype: torch.dtype
) -> None:
    build, inputs, forwards = CASES[name]
    transformer, given = build(dtype).transformer, inputs(5, dtype)
    choices = replace(certified_family(build(dtype)).choices, fused=True)  # what this CPU's library can do for a batch
    torch.manual_seed(0)
    lengths = (13, 4, 13, 1, 7)
    for row, length in enumerate(lengths):
        given["encoder_hidden_states"][row, length:] = 100.0
    plan = AttentionPlan(lengths, 13, 16, text_first=name in ("qwen", "flux"))
    with exact_forward(transformer, plan, choices, forwards):
        group = transformer(**given, return_dict=False)[0]
    for row, length in enumerate(lengths):
        shared = ("txt_ids", "img_ids")
        one = {k: v if v is None or k in shared else v[row : row + 1] for k, v in given.items()}
        one["encoder_hidden_states"] = one["encoder_hidden_states"][:, :length]
        if name == "flux":
            one["txt_ids"] = one["txt_ids"][:length]
        with exact_forward(transformer, None, choices, forwards):
            assert torch.equal(transformer(**one, return_dict=False)[0][0], group[row]), row


@cases
def test_what_gradient_checkpointing_recomputes_is_fused_too(name: str, counted: list[type]) -> None:
    build, inputs, forwards = CASES[name]
    transformer, given, found = copy.deepcopy(build().transformer), inputs(2), []
    for checkpointed in (False, True):
        if checkpointed:
            transformer.enable_gradient_checkpointing()
        counted.clear()
        with exact_forward(transformer, None, FUSED, counting(forwards, counted)):
            output = transformer(**given, return_dict=False)[0]
        after_forward = len(counted)
        other = threading.Thread(target=output.square().mean().backward)
        other.start()
        other.join()
        blocks = len(blocks_of(transformer))
        assert (after_forward, len(counted)) == (blocks, 2 * blocks if checkpointed else blocks)
        found.append({n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None})
        transformer.zero_grad()
        assert all("forward" not in vars(m) for m in transformer.modules())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


# --- what falls back ------------------------------------------------------------------------------------------------


def stock_and_fused(transformer: Any, forwards: dict[Any, Any], given: dict[str, Any]) -> tuple[Any, Any]:
    with torch.no_grad(), exact_forward(transformer, None, EXACT, forwards):
        stock = transformer(**given, return_dict=False)[0]
    with torch.no_grad(), exact_forward(transformer, None, FUSED, forwards):
        return stock, transformer(**given, return_dict=False)[0]


def with_a_hook(transformer: Any) -> None:
    for block in blocks_of(transformer):
        block.attn.register_forward_hook(lambda module, args, output: None)


def with_other_processors(transformer: Any) -> None:
    transformer.fuse_qkv_projections()
    assert all(type(b.attn.processor) is FusedJointAttnProcessor2_0 for b in transformer.transformer_blocks)


def with_a_forward_of_somebody_elses(transformer: Any) -> None:
    for block in transformer.transformer_blocks:
        block.forward = block.forward


@pytest.mark.parametrize(
    ("name", "change", "given"),
    [
        ("sd3", lambda t: t.enable_forward_chunking(1, dim=1), {}),
        ("sd3-dual", with_a_hook, {}),
        ("sd3", with_other_processors, {}),
        ("sd3", with_a_forward_of_somebody_elses, {}),
        ("sd3", lambda t: None, {"joint_attention_kwargs": {"unknown": 1}}),
        ("qwen", with_a_hook, {}),
        ("flux", with_a_hook, {}),
        ("flux", lambda t: t.set_attention_backend("native"), {}),
        ("flux", lambda t: t.fuse_qkv_projections(), {}),
        ("flux", lambda t: None, {"joint_attention_kwargs": {"unknown": 1}}),
        ("qwen", lambda t: t.set_attention_backend("native"), {}),
        ("qwen", lambda t: None, {"encoder_hidden_states_mask": torch.arange(13).expand(2, 13) < 9}),
    ],
)
def test_a_block_that_asks_for_anything_else_runs_its_own_forward(
    name: str, change: Callable[[Any], None], given: dict[str, Any]
) -> None:
    build, inputs, forwards = CASES[name]
    transformer = copy.deepcopy(build().transformer)
    inputs_of_both = inputs(2)
    plain, fused = stock_and_fused(transformer, forwards, inputs_of_both)
    assert not torch.equal(plain, fused)
    change(transformer)
    stock, fallen_back = stock_and_fused(transformer, forwards, {**inputs_of_both, **given})
    assert torch.equal(stock, fallen_back)


def test_modulation_by_token_and_autocast_fall_back_as_well() -> None:
    block = copy.deepcopy(qwen_image_pipeline().transformer.transformer_blocks[0])
    hidden, text, temb = torch.randn(2, 16, 128), torch.randn(2, 5, 128), torch.randn(2, 128)
    fused = QWEN_IMAGE_BLOCKS[type(block)]
    index = torch.zeros(1, 16, dtype=torch.int)
    block.zero_cond_t = True
    with torch.no_grad():
        for mine, theirs in zip(
            fused(block, hidden[:1], text[:1], None, temb, modulate_index=index),
            block(hidden[:1], text[:1], None, temb, modulate_index=index),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
        block.zero_cond_t = False
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for mine, theirs in zip(
                fused(block, hidden, text, None, temb), block(hidden, text, None, temb), strict=True
            ):
                assert torch.equal(mine, theirs)


class LowRank(torch.nn.Module):
    """A linear layer with an adapter around it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@cases
def test_adapters_around_the_linear_layers_take_part(name: str) -> None:
    build, inputs, forwards = CASES[name]
    transformer, given = copy.deepcopy(build().transformer), inputs(2)
    before, _ = stock_and_fused(transformer, forwards, given)
    for block in blocks_of(transformer):
        for layer in ("to_q", "to_v", "add_k_proj"):
            if hasattr(block.attn, layer):
                setattr(block.attn, layer, LowRank(getattr(block.attn, layer)))
        if hasattr(block, "proj_mlp"):
            block.proj_mlp, block.proj_out = LowRank(block.proj_mlp), LowRank(block.proj_out)
        else:
            block.attn.to_out[0] = LowRank(block.attn.to_out[0])
    stock, fused = stock_and_fused(transformer, forwards, given)
    torch.testing.assert_close(fused, stock, atol=1e-5, rtol=1e-5)
    assert (stock - before).abs().max() > 1e-3


def test_a_replaced_forward_keeps_hooks_is_one_threads_own_and_ends_even_after_an_error(counted: list[type]) -> None:
    transformer, given = copy.deepcopy(sd3_pipeline().transformer), sd3_inputs(2)
    hooked: list[int] = []
    transformer.transformer_blocks[0].register_forward_hook(lambda *_: hooked.append(1))
    forwards = counting(JOINT_TRANSFORMER_BLOCKS, counted)
    with torch.no_grad(), exact_forward(transformer, None, FUSED, forwards):
        transformer(**given)
        assert (len(counted), len(hooked)) == (2, 1)
        other = threading.Thread(target=lambda: transformer(**given))
        other.start()
        other.join()
        assert (len(counted), len(hooked)) == (2, 2)
        with exact_forward(transformer, None, FUSED, forwards):
            transformer(**given)
        transformer(**given)
        assert len(counted) == 6
    with pytest.raises(RuntimeError), exact_forward(transformer, None, FUSED, forwards):
        transformer(**{**given, "encoder_hidden_states": torch.randn(2, 13, 3)})
    assert all("forward" not in vars(m) for m in transformer.modules())
    transformer(**given)
    assert len(counted) == 6
    with exact_forward(transformer, None, EXACT, forwards):
        transformer(**given)
    assert len(counted) == 6
