"""The vocabulary at both ends: tokens to rows, and rows to logits. Ranks share its entries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llm_runtime.layers.linear import Multiplies
from llm_runtime.layers.placement import Piece, evenly
from llm_runtime.models.base import TensorParallel


class VocabularyEmbedding(Multiplies):
    """A row a token; this rank has those of its part of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, tensor_parallel: TensorParallel
    ) -> None:
        share = evenly("vocab_size", vocab_size, tensor_parallel)
        super().__init__(vocab_size // share.parts, hidden_size, dtype=dtype)
        self.shape = vocab_size, hidden_size
        self.share = share
        self.tensor_parallel = tensor_parallel

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[N]` int64 -> `[N, hidden_size]`, whole on each rank."""
        if self.share.parts == 1:
            return F.embedding(input_ids, self.weight)
        rows = self.weight.shape[0]
        local = input_ids - self.share.index * rows
        mine = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return self.tensor_parallel.all_reduce(torch.where(mine.unsqueeze(-1), found, 0))

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        yield f"{path}.weight", Piece(self, "weight", self.shape, 0, self.share, 0, self.weight.shape[0])


class VocabularyHead(VocabularyEmbedding):
    """Logits of every token."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[M, hidden_size]` -> `[M, vocab_size]` in the weight's dtype, whole on each rank."""
        logits = self.product(hidden_states, self.weight, None)
        return logits if self.share.parts == 1 else self.tensor_parallel.all_gather(logits)
