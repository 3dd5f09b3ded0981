"""One forward over a flat batch of tokens, and the logits of the rows that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec
import torch

from llm_runtime.engine.kv_cache import KVCache
from llm_runtime.layers.linear import choose_products
from llm_runtime.models.base import CausalLM
from rl_kernels.mode import LIBRARY, Choices
from rl_kernels.paged_attention import PagedPlan, paged_attention, store_kv
from rl_kernels.settings import exact_library_settings

LOGIT_ROWS = 512  # whose logits exist at the same time: 300 MB of a vocabulary of 150,000


class ForwardBatch(msgspec.Struct, tag="forward", frozen=True):
    """The tokens of a step, side by side, as plain data that every rank is told.

    input_ids, positions, slots: `[N]`; a token's keys and values go to its slot. page_tables, query_lengths,
    context_lengths: of each sequence: its pages, its tokens here, and all up to the last of these. draw_rows: the rows
    after which a token is drawn; score_rows: those whose logits tell the log-prob of a prompt's token.
    """

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    page_tables: list[list[int]]
    query_lengths: list[int]
    context_lengths: list[int]
    draw_rows: list[int]
    score_rows: list[int]


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence, side by side, from position `start` on; its pages; after how many of the last ones a
    token is drawn."""

    tokens: list[int]
    start: int
    pages: list[int]
    draws: int = 0


class PagedKV:
    """The `Attention` that a forward is lent: it keeps keys and values in the cache, and attends over pages."""

    def __init__(self, cache: KVCache, plan: PagedPlan, slots: torch.Tensor, scale: float) -> None:
        self._layers = cache.layers()
        self._plan = plan
        self._slots = slots
        self._scale = scale

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._layers[layer]
        store_kv(key, value, keys, values, self._slots)
        return paged_attention(query, keys, values, self._plan, scale=self._scale)


class ModelRunner:
    """Runs one rank's model."""

    def __init__(self, model: CausalLM, cache: KVCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.choices = LIBRARY

    @property
    def choices(self) -> Choices:
        """Which implementations compute; to set them has the model run them."""
        return self._choices

    @choices.setter
    def choices(self, choices: Choices) -> None:
        self._choices = choices
        choose_products(self.model, choices)

    def exact(self) -> AbstractContextManager[None]:
        """Around all that is computed."""
        return exact_library_settings() if self._choices.exact else nullcontext()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of the rows to draw after and of those to score, each `[rows, hidden_size]`. Afterwards the
        tokens' keys and values are in the cache."""
        self.cache.define()
        input_ids, positions, slots = self._on_device(batch.input_ids, batch.positions, batch.slots)
        plan = PagedPlan.of(
            batch.page_tables,
            batch.query_lengths,
            batch.context_lengths,
            page_size=self.cache.page_size,
            device=self.device,
        )
        scale = self.model.config.head_dim**-0.5
        with self.exact(), torch.autocast(self.device.type, enabled=False):
            hidden = self.model(input_ids, positions, PagedKV(self.cache, plan, slots, scale))
            draw_rows, score_rows = self._on_device(batch.draw_rows, batch.score_rows)
            return hidden[draw_rows], hidden[score_rows]

    def compute(self, batch: ForwardBatch) -> None:
        """What a rank does of a batch whose logits only rank 0 wants: all of it, in rank 0's order."""
        drawing, scored = self.forward(batch)
        for hidden in (scored, drawing):
            for _ in self.logits(hidden):
                pass

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """The logits of hidden states, `[<= LOGIT_ROWS, vocab_size]` (fp32) at a time."""
        for rows in hidden.split(LOGIT_ROWS) if len(hidden) else ():
            with self.exact(), torch.autocast(self.device.type, enabled=False):
                yield self.model.compute_logits(rows)

    def _on_device(self, *values: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(v, dtype=torch.int64, device=self.device) for v in values]


def batch_of(spans: Items[Span], *, page_size: int, scored: Items[int] = ()) -> ForwardBatch:
    """The spans side by side; `scored` are rows of them all whose logits tell a prompt's log-probs."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[list[int]] = []
    draw_rows: list[int] = []
    for span in spans:
        pages, end = span.pages, span.start + len(span.tokens)
        if span.draws:
            last = len(input_ids) + len(span.tokens)
            draw_rows += range(last - span.draws, last)
        input_ids += span.tokens
        positions += range(span.start, end)
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(span.start, end)]
        tables.append(pages[: -(-end // page_size)])
    lengths = [len(span.tokens) for span in spans]
    contexts = [span.start + len(span.tokens) for span in spans]
    return ForwardBatch(input_ids, positions, slots, tables, lengths, contexts, draw_rows, list(scored))
