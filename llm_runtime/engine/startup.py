"""What every rank does before the first step: room for the KV cache, and a runner."""

from __future__ import annotations

import torch

from engine_control.errors import InvalidRequestError
from llm_runtime.config import LLMConfig
from llm_runtime.engine.kv_cache import KVCache
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.models.base import CausalLM

CPU_TOKENS = 65_536  # of the KV cache on a CPU, unless the configuration says


def pages_for(model: CausalLM, config: LLMConfig) -> int:
    """How many pages this rank's KV cache gets, or has room for; the first one is nobody's.

    Raises:
        InvalidRequestError: there is no room beside the weights.
    """
    device, page_size = next(model.parameters()).device, config.page_size
    tokens = config.max_total_tokens
    if tokens is None and device.type != "cuda":
        tokens = max(CPU_TOKENS, model.config.max_position_embeddings)
    if tokens is not None:
        return -(-tokens // page_size) + 1
    free, total = torch.cuda.mem_get_info(device)
    pages = int((free - total * (1 - config.mem_fraction_static)) // bytes_per_page(model, page_size))
    if pages < 2:
        raise InvalidRequestError(
            f"no room for a KV cache: {free} bytes are free beside the weights, of {total}",
            field="mem_fraction_static",
            value=config.mem_fraction_static,
            hint="Raise mem_fraction_static, or use more GPUs (tp_size).",
        )
    return pages


def bytes_per_page(model: CausalLM, page_size: int) -> int:
    """Of this rank's keys and values."""
    config = model.config
    return 2 * config.num_hidden_layers * page_size * model.local_kv_heads * config.head_dim * config.dtype.itemsize


def make_runner(model: CausalLM, config: LLMConfig, pages: int) -> ModelRunner:
    """The runner, with a KV cache of so many pages."""
    device = next(model.parameters()).device
    cache = KVCache(
        pages,
        config.page_size,
        layers=model.config.num_hidden_layers,
        kv_heads=model.local_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.config.dtype,
        device=device,
    )
    return ModelRunner(model, cache, device)
