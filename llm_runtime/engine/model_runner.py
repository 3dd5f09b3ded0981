"""One forward over a flat batch of tokens, and the logits of the rows that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from llm_runtime.engine.batches import ForwardBatch
from llm_runtime.engine.decode_steps import DecodeSteps
from llm_runtime.engine.graphs import DecodeGraphs, ForwardInputs
from llm_runtime.engine.kv_cache import KVCache
from llm_runtime.layers.linear import choose_products
from llm_runtime.layers.moe import group_experts
from llm_runtime.models.base import CausalLM
from rl_kernels.fused import runs_on_triton
from rl_kernels.graph_pool import GraphPool
from rl_kernels.mode import LIBRARY, Choices
from rl_kernels.paged_attention import PagedPlan, paged_attention
from rl_kernels.paged_qkv import HeadNorms, Rotation, paged_qkv
from rl_kernels.settings import exact_library_settings

LOGIT_ROWS = 512  # whose logits exist at the same time: 300 MB of a vocabulary of 150,000


class PagedKV:
    """The `Attention` that a forward is lent: it keeps keys and values in the cache, and attends over pages."""

    def __init__(
        self, cache: KVCache, plan: PagedPlan, slots: torch.Tensor, *, scale: float, uniform_blocks: bool
    ) -> None:
        self._layers = cache.layers()
        self._plan = plan
        self._slots = slots
        self._scale = scale
        self._uniform = uniform_blocks

    def __call__(self, layer: int, qkv: torch.Tensor, *, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        keys, values = self._layers[layer]
        query = paged_qkv(qkv, keys, values, self._slots, rotation=rotation, norms=norms)
        return paged_attention(query, keys, values, self._plan, scale=self._scale, uniform=self._uniform)


class ModelRunner:
    """Runs one rank's model."""

    def __init__(self, model: CausalLM, cache: KVCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.choices = LIBRARY
        self.graphs: DecodeGraphs | None = None
        self.steps = DecodeSteps(self, None)
        self._pool: GraphPool | None = None

    @property
    def choices(self) -> Choices:
        """Which implementations compute; to set them has the model run them."""
        return self._choices

    @choices.setter
    def choices(self, choices: Choices) -> None:
        self._choices = choices
        choose_products(self.model, choices)
        group_experts(self.model, choices)

    @property
    def reads_on_device(self) -> bool:
        """Whether attention reads a plan's tensors where they are, so that a graph can hold it; torch's operations
        need the host's numbers."""
        return runs_on_triton(self.cache.storage, self.cache.storage.shape[-1])

    def use_graphs(self, max_batch_size: int) -> None:
        """Has batches of single tokens, up to so many, be captured and replayed from now on; 0: none."""
        self._pool = GraphPool(self.device) if max_batch_size else None
        self.steps, self.graphs = DecodeSteps(self, self._pool), None
        if self._pool is not None:
            self.graphs = DecodeGraphs(
                self.hidden_states,
                page_size=self.cache.page_size,
                max_batch_size=max_batch_size,
                device=self.device,
                pool=self._pool,
            )

    def drop_graphs(self) -> None:
        """What they read may lie elsewhere from now on: they are captured anew when they are needed."""
        self.steps.clear()
        if self.graphs is not None:
            self.graphs.clear()
        if self._pool is not None:
            self._pool.clear()

    def exact(self) -> AbstractContextManager[None]:
        """Around all that is computed."""
        return exact_library_settings() if self._choices.exact else nullcontext()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of the rows to draw after and of those to score, each `[rows, hidden_size]`. Afterwards the
        tokens' keys and values are in the cache."""
        self.cache.define()
        if self.graphs is not None and self.graphs.takes(batch):
            with self.exact(), torch.autocast(self.device.type, enabled=False):
                hidden = self.graphs.replay(batch)
            return hidden, hidden[:0]
        input_ids, positions, slots = self._on_device(batch.input_ids, batch.positions, batch.slots)
        plan = PagedPlan.of(
            batch.page_tables,
            batch.query_lengths,
            batch.context_lengths,
            page_size=self.cache.page_size,
            device=self.device,
        )
        with self.exact(), torch.autocast(self.device.type, enabled=False):
            hidden = self.hidden_states(ForwardInputs(input_ids, positions, slots, plan))
            draw_rows, score_rows = self._on_device(batch.draw_rows, batch.score_rows)
            return hidden[draw_rows], hidden[score_rows]

    def hidden_states(self, inputs: ForwardInputs) -> torch.Tensor:
        """The hidden states `[N, hidden_size]` of all rows, computed as the caller has set the libraries."""
        scale, uniform = self.model.config.head_dim**-0.5, self.choices.uniform_blocks
        attention = PagedKV(self.cache, inputs.plan, inputs.slots, scale=scale, uniform_blocks=uniform)
        return self.model(inputs.input_ids, inputs.positions, attention)  # type: ignore[no-any-return]

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
                yield self.model.compute_logits(rows).float()

    def _on_device(self, *values: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(v, dtype=torch.int64, device=self.device) for v in values]
