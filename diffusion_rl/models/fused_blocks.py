"""Forwards of diffusers' transformer blocks on the fused kernels: the same blocks, with fewer passes over memory.

They call the block's own linear layers as modules, so an adapter or a hook on those works; what they compute themselves
are the adaptive norms, the gated residuals, what lies between the projections and the attention, and a feed-forward's
first layer with its activation where nobody has changed it. `F.scaled_dot_product_attention` is called once an
attention, on `[B, heads, tokens, D]`, in the family's order of a joint sequence. In half precision they round less
often than the blocks' own forwards: the results are within rounding of those, and are not equal to them.

A block or a call that asks for anything else than the stock computation gets the block's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.normalization import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    RMSNorm,
    SD35AdaLayerNormZeroX,
)
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
)
from torch import nn

from rl_kernels.copies import contiguous
from rl_kernels.fused import DTYPES
from rl_kernels.gated_residual import gated_residual, gated_residual_norm
from rl_kernels.gelu_linear import gelu_linear
from rl_kernels.joint_qkv import Stream, joint_qkv
from rl_kernels.modulated_norm import modulated_norm, modulated_norm_pair

HEAD_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
Pair = tuple[torch.Tensor, torch.Tensor]


def joint_transformer_block(
    module: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
    **others: Any,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A block of Stable Diffusion 3: `(text, image)`, text None after the last block. Image tokens come first."""
    if (
        others
        or joint_attention_kwargs
        or not _is_stock_joint_block(module, hidden_states, encoder_hidden_states, temb)
    ):
        return type(module).forward(
            module, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs, **others
        )
    image, text, attn = hidden_states, encoder_hidden_states, module.attn
    eps = module.norm1.norm.eps
    vectors = module.norm1.linear(module.norm1.silu(temb)).chunk(9 if module.use_dual_attention else 6, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = vectors[:6]
    if module.use_dual_attention:
        shift_2, scale_2, gate_2 = vectors[6:]
        normed, normed_2 = modulated_norm_pair(image, (scale, shift), (scale_2, shift_2), eps=eps)
    else:
        normed = modulated_norm(image, scale, shift, eps=eps)
    text_vectors = _text_vectors(module, temb)
    normed_text = modulated_norm(text, text_vectors[1], text_vectors[0], eps=module.norm1_context.norm.eps)

    image_out, text_out = attend(attn, image_stream(attn, normed), text_stream(attn, normed_text))
    image_out = output_projection(attn, image_out)
    if module.use_dual_attention:
        image = gated_residual(image, image_out, gate)
        image_out, _ = attend(module.attn2, image_stream(module.attn2, normed_2), None)
        image_out, gate = output_projection(module.attn2, image_out), gate_2
    image, normed = gated_residual_norm(image, image_out, gate, scale=mlp_scale, shift=mlp_shift, eps=module.norm2.eps)
    image = gated_residual(image, _feed_forward(module.ff, normed), mlp_gate)
    if module.context_pre_only:
        return None, image
    assert text_out is not None
    _, _, gate, mlp_shift, mlp_scale, mlp_gate = text_vectors
    text, normed_text = gated_residual_norm(
        text,
        attn.to_add_out(contiguous(text_out)),
        gate,
        scale=mlp_scale,
        shift=mlp_shift,
        eps=module.norm2_context.eps,
    )
    return gated_residual(text, _feed_forward(module.ff_context, normed_text), mlp_gate), image


def qwen_image_transformer_block(
    module: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_mask: torch.Tensor | None,
    temb: torch.Tensor,
    image_rotary_emb: Pair | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Any = None,
    **others: Any,
) -> Pair:
    """A block of Qwen-Image: `(text, image)`. Text tokens come first."""
    unusual = others or joint_attention_kwargs or modulate_index is not None or encoder_hidden_states_mask is not None
    if unusual or not _is_stock_qwen_block(module, hidden_states, encoder_hidden_states, temb):
        return type(module).forward(
            module,
            hidden_states,
            encoder_hidden_states,
            encoder_hidden_states_mask,
            temb,
            image_rotary_emb=image_rotary_emb,
            joint_attention_kwargs=joint_attention_kwargs,
            modulate_index=modulate_index,
            **others,
        )
    attn = module.attn
    image_rope, text_rope = image_rotary_emb or (None, None)
    image_vectors, text_vectors = module.img_mod(temb).chunk(6, dim=-1), module.txt_mod(temb).chunk(6, dim=-1)
    normed = modulated_norm(hidden_states, image_vectors[1], image_vectors[0], eps=module.img_norm1.eps)
    normed_text = modulated_norm(encoder_hidden_states, text_vectors[1], text_vectors[0], eps=module.txt_norm1.eps)
    text_out, image_out = attend(
        attn, text_stream(attn, normed_text, text_rope), image_stream(attn, normed, image_rope)
    )
    assert image_out is not None
    image_out, text_out = output_projection(attn, image_out), attn.to_add_out(contiguous(text_out))
    image = after_attention(hidden_states, image_out, image_vectors, module.img_norm2, module.img_mlp)
    text = after_attention(encoder_hidden_states, text_out, text_vectors, module.txt_norm2, module.txt_mlp)
    if image.dtype == torch.float16:  # the block's own guard against overflow
        return text.clip(-65504, 65504), image.clip(-65504, 65504)
    return text, image


JOINT_TRANSFORMER_BLOCKS: dict[type[nn.Module], Callable[..., Any]] = {JointTransformerBlock: joint_transformer_block}
QWEN_IMAGE_BLOCKS: dict[type[nn.Module], Callable[..., Any]] = {QwenImageTransformerBlock: qwen_image_transformer_block}


def _text_vectors(module: Any, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(shift, scale, gate, and the three of the feed-forward) of the text stream; (shift, scale) in a last block."""
    norm = module.norm1_context
    projected = norm.linear(norm.silu(temb))
    if module.context_pre_only:
        scale, shift = projected.chunk(2, dim=1)
        return shift, scale
    return projected.chunk(6, dim=1)


def after_attention(
    stream: torch.Tensor, attended: torch.Tensor, vectors: tuple[torch.Tensor, ...], norm: Any, mlp: Any
) -> torch.Tensor:
    """The stream with both of the block's gated additions: of the attention, and of the feed-forward."""
    _, _, gate, mlp_shift, mlp_scale, mlp_gate = vectors
    stream, normed = gated_residual_norm(stream, attended, gate, scale=mlp_scale, shift=mlp_shift, eps=norm.eps)
    return gated_residual(stream, _feed_forward(mlp, normed), mlp_gate)


def _feed_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A feed-forward; its first layer and GELU as one operation where neither has a part of its own to play."""
    first, *rest = module.net
    if not _is_plain_gelu(module, first):
        y: torch.Tensor = module(x)
        return y
    y = gelu_linear(x, first.proj.weight, first.proj.bias)
    for layer in rest:
        y = layer(y)
    return y


def _is_plain_gelu(module: Any, first: Any) -> bool:
    """Whether it is the stock layer, and nobody looks on."""
    if type(first) is not GELU or first.approximate != "tanh":
        return False
    return is_whole_linear(first.proj) and not hooked([module, first])


def is_whole_linear(layer: Any) -> bool:
    """Whether it is the stock layer with a bias, with weights of this rank alone, and nobody looks on."""
    if type(layer) is not nn.Linear or layer.bias is None:
        return False
    return type(layer.weight.data) is torch.Tensor and not hooked([layer])


def image_stream(attn: Any, x: torch.Tensor, rope: torch.Tensor | None = None) -> Stream:
    return Stream(attn.to_q(x), attn.to_k(x), attn.to_v(x), *_weights(attn.norm_q, attn.norm_k), rope)


def text_stream(attn: Any, x: torch.Tensor, rope: torch.Tensor | None = None) -> Stream:
    weights = _weights(attn.norm_added_q, attn.norm_added_k)
    return Stream(attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x), *weights, rope)


def _weights(norm_q: Any, norm_k: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if norm_q is None else (norm_q.weight, norm_k.weight)


def attend(attn: Any, first: Stream, second: Stream | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the joint attention says to each stream, `[B, T, heads * D]`."""
    eps = 1e-6 if attn.norm_q is None else attn.norm_q.eps
    query, key, value = joint_qkv(first, second, head_dim=attn.inner_dim // attn.heads, eps=eps)
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=False)
    merged = out.transpose(1, 2).flatten(2)
    if second is None:
        return merged, None
    tokens = first.query.shape[1]
    return merged[:, :tokens], merged[:, tokens:]


def output_projection(attn: Any, x: torch.Tensor) -> torch.Tensor:
    x = contiguous(x)  # outside exact mode a strided matrix would take another path of the library
    for layer in attn.to_out:  # the projection, and a dropout
        x = layer(x)
    return x


def _is_stock_joint_block(module: Any, *tensors: torch.Tensor) -> bool:
    attentions = [module.attn] if module.attn2 is None else [module.attn, module.attn2]
    image_norm = SD35AdaLayerNormZeroX if module.use_dual_attention else AdaLayerNormZero
    text_norm = AdaLayerNormContinuous if module.context_pre_only else AdaLayerNormZero
    norms = [module.norm1.norm, module.norm1_context.norm, module.norm2]
    if not module.context_pre_only:
        norms.append(module.norm2_context)
    return (
        module._chunk_size is None
        and type(module.norm1) is image_norm
        and type(module.norm1_context) is text_norm
        and all(getattr(n, "emb", None) is None for n in (module.norm1, module.norm1_context))
        and all(type(a.processor) is JointAttnProcessor2_0 for a in attentions)
        and is_plain([module.norm1, module.norm1_context], norms, attentions, tensors)
    )


def _is_stock_qwen_block(module: Any, *tensors: torch.Tensor) -> bool:
    processor = module.attn.processor
    norms = [module.img_norm1, module.img_norm2, module.txt_norm1, module.txt_norm2]
    return (
        not module.zero_cond_t
        and type(processor) is QwenDoubleStreamAttnProcessor2_0
        and getattr(processor, "_attention_backend", None) is None
        and getattr(processor, "_parallel_config", None) is None
        and is_plain([], norms, [module.attn], tensors)
    )


def is_plain(outer: list[Any], norms: list[Any], attentions: list[Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether nothing that a fused forward passes over has a part of its own to play.

    Those are modules that it doesn't call: their hooks would be skipped. And one dtype for all: it has no casts.
    """
    dtypes = {x.dtype for x in tensors}
    head_norms = [(a, [n for name in HEAD_NORMS if (n := getattr(a, name, None)) is not None]) for a in attentions]
    return (
        len(dtypes) == 1
        and dtypes <= set(DTYPES)
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and all(type(n) is nn.LayerNorm and n.weight is None for n in norms)
        and all(_has_stock_head_norms(a, found, tensors[0].dtype) for a, found in head_norms)
        and not hooked([*outer, *norms, *attentions, *(n for _, found in head_norms for n in found)])
    )


def _has_stock_head_norms(attn: Any, norms: list[Any], dtype: torch.dtype) -> bool:
    """No norm at all, or an RMS norm with a weight on each query and key, all with one eps."""
    if not norms:
        return True
    expected = 4 if attn.added_kv_proj_dim is not None else 2
    return len(norms) == expected and all(
        type(n) in (RMSNorm, nn.RMSNorm)
        and n.weight is not None
        and getattr(n, "bias", None) is None
        and n.eps == norms[0].eps
        and n.weight.dtype == dtype
        and n.weight.numel() == attn.inner_dim // attn.heads
        for n in norms
    )


def hooked(modules: Iterable[nn.Module]) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks or "forward" in vars(m)
        for m in modules
    )
