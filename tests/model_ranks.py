"""A tiny language model without an engine: one sequence at a time, on one rank or on several that are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from llm_runtime.config import LLMConfig
from llm_runtime.models.base import CausalLM
from llm_runtime.models.loading import load_model
from rl_kernels.paged_qkv import HeadNorms, Rotation, paged_qkv

TOKENS = torch.tensor([7, 100, 258, 3, 319, 0, 42, 42, 9, 256, 111])


def heads_of(
    model: CausalLM, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `[N, heads, D]` of rows, in their order."""
    key, value = qkv.new_empty(2, len(qkv), model.local_kv_heads, model.config.head_dim)
    query = paged_qkv(qkv, key, value, torch.arange(len(qkv)), rotation=rotation, norms=norms)
    return query, key, value


class DenseAttention:
    """One sequence from its first token on, whole."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def __call__(self, layer: int, qkv: torch.Tensor, *, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        heads = heads_of(self.model, qkv, rotation, norms)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in heads)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


class GlooRank:
    """A rank that is a thread of this process."""

    def __init__(self, store: HashStore, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=60))

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gathered(x), dim=-1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._gathered(x)
        for other in others:
            first = first + other
        return first


def on_ranks(size: int, work: Callable[[GlooRank], Any]) -> list[Any]:
    """What each rank's `work` returns."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(GlooRank(store, "ranks", rank, size)), range(size)))


@torch.no_grad()
def logits(model: CausalLM) -> torch.Tensor:
    return model.compute_logits(model(TOKENS, torch.arange(len(TOKENS)), DenseAttention(model))).float()


def load(folder: Path, **config: Any) -> CausalLM:
    return load_model(LLMConfig(model_path=str(folder), device="cpu", **config))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
