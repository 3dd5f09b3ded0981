"""Forwards of FLUX's blocks on the fused kernels; what `fused_blocks` says of them holds here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import nn

from diffusion_rl.models.fused_blocks import (
    Pair,
    after_attention,
    attend,
    hooked,
    image_stream,
    is_plain,
    is_whole_linear,
    output_projection,
    text_stream,
)
from rl_kernels.copies import contiguous, joined, of_autograd
from rl_kernels.gated_residual import gated_residual
from rl_kernels.gelu_linear import gelu_linear
from rl_kernels.modulated_norm import modulated_norm


def flux_transformer_block(
    module: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Pair | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    **others: Any,
) -> Pair:
    """A block of two streams: `(text, image)`. Text tokens come first, in the tables of `image_rotary_emb` too."""
    tensors = (hidden_states, encoder_hidden_states, temb)
    if others or joint_attention_kwargs or not _is_stock_block(module, image_rotary_emb, *tensors):
        return type(module).forward(  # type: ignore[no-any-return]
            module, *tensors, image_rotary_emb, joint_attention_kwargs, **others
        )
    attn, rope, tokens = module.attn, _turns(image_rotary_emb), encoder_hidden_states.shape[1]
    image_vectors = module.norm1.linear(module.norm1.silu(temb)).chunk(6, dim=1)
    text_vectors = module.norm1_context.linear(module.norm1_context.silu(temb)).chunk(6, dim=1)
    normed = modulated_norm(hidden_states, image_vectors[1], image_vectors[0], eps=module.norm1.norm.eps)
    normed_text = modulated_norm(
        encoder_hidden_states, text_vectors[1], text_vectors[0], eps=module.norm1_context.norm.eps
    )
    text_rope, image_rope = (None, None) if rope is None else (rope[:tokens], rope[tokens:])
    text_out, image_out = attend(
        attn, text_stream(attn, normed_text, text_rope), image_stream(attn, normed, image_rope)
    )
    assert image_out is not None
    image_out, text_out = output_projection(attn, image_out), attn.to_add_out(contiguous(text_out))
    image = after_attention(hidden_states, image_out, image_vectors, module.norm2, module.ff)
    text = after_attention(encoder_hidden_states, text_out, text_vectors, module.norm2_context, module.ff_context)
    return (text.clip(-65504, 65504) if text.dtype == torch.float16 else text), image


def flux_single_transformer_block(
    module: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Pair | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    **others: Any,
) -> Pair:
    """A block of one stream, text and image: `(text, image)`, views of it."""
    tensors = (hidden_states, encoder_hidden_states, temb)
    if others or joint_attention_kwargs or not _is_stock_single_block(module, image_rotary_emb, *tensors):
        return type(module).forward(  # type: ignore[no-any-return]
            module, *tensors, image_rotary_emb, joint_attention_kwargs, **others
        )
    tokens = encoder_hidden_states.shape[1]
    stream = _one_stream(encoder_hidden_states, hidden_states)
    shift, scale, gate = module.norm.linear(module.norm.silu(temb)).chunk(3, dim=1)
    normed = modulated_norm(stream, scale, shift, eps=module.norm.norm.eps)
    attended, _ = attend(module.attn, image_stream(module.attn, normed, _turns(image_rotary_emb)), None)
    if is_whole_linear(module.proj_mlp) and not hooked([module.act_mlp]):
        inner = gelu_linear(normed, module.proj_mlp.weight, module.proj_mlp.bias)
    else:
        inner = module.act_mlp(module.proj_mlp(normed))
    stream = gated_residual(stream, module.proj_out(joined([attended, inner], dim=2)), gate)
    if stream.dtype == torch.float16:  # the block's own guard against overflow
        stream = stream.clip(-65504, 65504)
    return stream[:, :tokens], stream[:, tokens:]


FLUX_BLOCKS: dict[type[nn.Module], Callable[..., Any]] = {
    FluxTransformerBlock: flux_transformer_block,
    FluxSingleTransformerBlock: flux_single_transformer_block,
}


def _turns(tables: Pair | None) -> torch.Tensor | None:
    """FLUX's cosines and sines `[tokens, D]`, each twice, side by side, as complex numbers `[tokens, D / 2]`."""
    return None if tables is None else torch.complex(tables[0][:, ::2], tables[1][:, ::2])


def _one_stream(text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Text and image behind each other; no copy where they lie so, as the block before leaves them."""
    batch, tokens, width = text.shape
    together = tokens + image.shape[1]
    strides = (together * width, width, 1)
    adjacent = (
        text.untyped_storage().data_ptr() == image.untyped_storage().data_ptr()
        and text.stride() == image.stride() == strides
        and image.storage_offset() == text.storage_offset() + tokens * width
    )
    if adjacent and not of_autograd(text, image):
        return text.as_strided((batch, together, width), strides)
    return joined([text, image], dim=1)


def _is_stock_block(module: Any, tables: Any, *tensors: torch.Tensor) -> bool:
    outer = [module.norm1, module.norm1_context]
    return (
        all(type(norm) is AdaLayerNormZero and norm.emb is None for norm in outer)
        and _is_stock_attention(module.attn, tables)
        and is_plain(outer, [*(n.norm for n in outer), module.norm2, module.norm2_context], [module.attn], tensors)
    )


def _is_stock_single_block(module: Any, tables: Any, *tensors: torch.Tensor) -> bool:
    return (
        type(module.norm) is AdaLayerNormZeroSingle
        and type(module.act_mlp) is nn.GELU
        and module.act_mlp.approximate == "tanh"
        and _is_stock_attention(module.attn, tables)
        and is_plain([module.norm], [module.norm.norm], [module.attn], tensors)
    )


def _is_stock_attention(attn: Any, tables: Any) -> bool:
    processor = attn.processor
    return (
        type(processor) is FluxAttnProcessor
        and processor._attention_backend is None
        and processor._parallel_config is None
        and not attn.fused_projections
        and (tables is None or all(table.dim() == 2 for table in tables))
    )
