"""What every rank does before the first step: room for the KV cache, and a runner."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine_control.errors import InvalidRequestError, NotExactError
from llm_runtime.config import LLMConfig
from llm_runtime.engine.certification import make_exact
from llm_runtime.engine.kv_cache import KVCache
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.engine.speculation import Drafter
from llm_runtime.models.base import CausalLM
from llm_runtime.models.loading import load_model

LARGEST_GRAPH = 512  # sequences; larger batches keep a GPU busy without
GPU_PREFILL_TOKENS = 16_384  # of a step; fewer leave a GPU waiting for the host, which launches every kernel
CPU_PREFILL_TOKENS = 4096
CPU_TOKENS = 65_536  # of the KV cache on a CPU, unless the configuration says


def load_draft(config: LLMConfig, model: CausalLM) -> CausalLM | None:
    """The draft model that guesses for `model`, if the configuration names one.

    Raises:
        InvalidRequestError: it can't be loaded, has other tokens than the model or a shorter context, or ranks would
            share the model.
    """
    path = config.speculative_draft_model_path
    if path is None:
        return None
    if config.tp_size > 1:
        raise InvalidRequestError(
            "a draft model guesses for a model on one device only",
            field="tp_size",
            value=config.tp_size,
            hint="Leave --speculative-draft-model-path, or --tp-size, away.",
        )
    device = str(next(model.parameters()).device)
    own = replace(config, model_path=path, device=device, context_length=None, speculative_draft_model_path=None)
    draft = load_model(own)
    if draft.config.vocab_size != model.config.vocab_size:
        raise InvalidRequestError(
            f"the draft model has {draft.config.vocab_size} tokens, and the model {model.config.vocab_size}",
            field="speculative_draft_model_path",
            value=path,
            hint="Use a draft model with the same tokenizer.",
        )
    longest = draft.config.max_position_embeddings
    needed = config.context_length or model.config.max_position_embeddings
    if longest < needed:
        raise InvalidRequestError(
            f"the draft model's context is {longest} tokens long, and the model's {needed}",
            field="speculative_draft_model_path",
            value=path,
            hint="Lower context_length, or use another draft model.",
        )
    return draft


def make_drafter(draft: CausalLM, target: ModelRunner, config: LLMConfig, *, exact: bool) -> Drafter:
    """The draft beside the target, with as many pages.

    Raises:
        NotExactError: the target isn't exact: then a guess could be right alone and wrong beside others.
    """
    if not exact:
        raise NotExactError(
            "a draft model needs exact mode, which this model isn't certified for here, or which is turned off",
            field="speculative_draft_model_path",
            value=config.speculative_draft_model_path,
            hint="See deterministic in /server_info, or leave the draft model away.",
        )
    runner = make_runner(draft, config, target.cache.num_pages)
    make_exact(
        runner, config.deterministic, graphs_up_to=graphs_up_to(config), rows=prefill_tokens(config, runner.device)
    )
    return Drafter(runner, config.speculative_num_steps)


def pages_for(model: CausalLM, config: LLMConfig, *, draft: CausalLM | None = None) -> int:
    """How many pages this rank's KV cache gets, or has room for; the first one is nobody's. A draft's pages count too.

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
    page = sum(bytes_per_page(m, page_size) for m in (model, draft) if m is not None)
    pages = int((free - total * (1 - config.mem_fraction_static)) // page)
    if pages < 2:
        raise InvalidRequestError(
            f"no room for a KV cache: {free} bytes are free beside the weights, of {total}",
            field="mem_fraction_static",
            value=config.mem_fraction_static,
            hint="Raise mem_fraction_static, or use more GPUs (tp_size).",
        )
    return pages


def prefill_tokens(config: LLMConfig, device: torch.device) -> int:
    """Prompt tokens that one step computes at most."""
    return config.max_prefill_tokens or (GPU_PREFILL_TOKENS if device.type == "cuda" else CPU_PREFILL_TOKENS)


def bytes_per_page(model: CausalLM, page_size: int) -> int:
    """Of this rank's keys and values."""
    config = model.config
    return 2 * config.num_hidden_layers * page_size * model.local_kv_heads * config.head_dim * config.dtype.itemsize


def graphs_up_to(config: LLMConfig) -> int:
    """How many sequences decode by a CUDA graph; 0: none."""
    return min(config.max_running_requests, LARGEST_GRAPH) if config.cuda_graphs else 0


def overlaps(runner: ModelRunner, config: LLMConfig) -> bool:
    """Whether decoding runs ahead of the host: of itself where a step is a graph, since only there the host waits for
    nothing else."""
    if config.overlap_schedule == "auto":
        return runner.graphs is not None
    return config.overlap_schedule == "on" and config.tp_size == 1 and config.speculative_draft_model_path is None


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
