"""torch.compile at one fixed number of rows: a sample always runs through the same compiled graph, whatever its batch.

A compiled graph has other bits than the eager forward, and other bits at another number of rows. So a forward of fewer
rows is filled up with copies of its first, and one of more is cut into pieces. How many text tokens a row is padded to
is a function of its own text alone. Attention, which mixes tokens, stays what certification chose, on true tokens, as
one opaque operation of the graph.

Each graph is tried when it is made: no row's bits may depend on its place or on the other rows.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError
from torch.overrides import TorchFunctionMode

from diffusion_rl.models.runner import Runner, eager
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan
from rl_kernels.attention import attention
from rl_kernels.mode import Choices, exact_mode

logger = logging.getLogger(__name__)

TEXT = "encoder_hidden_states"  # the argument whose second axis is text tokens
TEXT_POSITIONS = "txt_ids"  # of all rows, a text token each
SHARED = (TEXT_POSITIONS, "img_ids")  # tensors that all rows have in common
SHORTEST_TEXT = 64  # tokens; where lengths differ, a row's text is padded to this or to a power of two above it
CANT_COMPILE = (TorchDynamoException, CppCompileError)

PlanShape = tuple[int, int, bool]  # padded text tokens, image tokens, text first
Graph = Callable[[torch.nn.Module, dict[str, Any], torch.Tensor, PlanShape, frozenset[Any]], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """The arguments of a forward of `CompiledForward.rows` rows, with each row's text length."""

    inputs: dict[str, Any]
    lengths: tuple[int, ...]
    plan_shape: PlanShape

    @property
    def plan(self) -> AttentionPlan:
        padded, image_tokens, text_first = self.plan_shape
        return AttentionPlan(self.lengths, padded, image_tokens, text_first)

    @property
    def key(self) -> tuple[object, ...]:
        """What decides which graph runs it."""
        shapes = [
            (name, tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else (name, repr(x))
            for name, x in sorted(self.inputs.items())
        ]
        return (self.plan_shape, *shapes)

    def at(self, rows: Sequence[int], padded: int | None = None) -> Piece:
        """Those rows, in memory of their own; their text padded, or cut, to that many tokens."""
        padded = self.plan_shape[0] if padded is None else padded
        inputs = {n: value if n in SHARED else _rows_of(value, rows) for n, value in self.inputs.items()}
        missing = (0, 0, 0, padded - self.plan_shape[0])
        for name in (TEXT, TEXT_POSITIONS):
            if name in inputs:
                inputs[name] = F.pad(inputs[name], missing).contiguous()
        return Piece(inputs, tuple(self.lengths[row] for row in rows), (padded, *self.plan_shape[1:]))


@dataclass
class CompiledForward:
    """A runner (`diffusion_rl.models.runner`) that computes `rows` rows at a time, each time by a compiled graph.

    One graph is compiled for each size of picture and each padded text length, when that first comes. A graph that
    can't be made, or fails its try, is named in `refused`: forwards of its shapes then run eagerly, always.

    choices: what certification found. differing_texts: texts have many lengths, and are padded to a few; else a graph
    is made for each length. tries: False takes every graph that can be made. other_bits: in how many elements graphs
    differed from the eager forward when they were tried.
    """

    rows: int
    choices: Choices
    differing_texts: bool = False
    tries: bool = True
    backend: str | Callable[..., Any] = "inductor"
    refused: list[str] = field(default_factory=list)
    other_bits: int = 0
    _graphs: dict[tuple[object, ...], Graph | None] = field(default_factory=dict)

    def __call__(self, transformer: torch.nn.Module, plan: AttentionPlan, inputs: dict[str, Any]) -> torch.Tensor:
        everything = Piece(inputs, plan.text_lengths, (plan.padded_text, plan.image_tokens, plan.text_first))
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(plan.text_lengths):
            groups.setdefault(self.padded(length), []).append(row)
        order: list[int] = []
        parts: list[torch.Tensor] = []
        for padded, rows in groups.items():
            for start in range(0, len(rows), self.rows):
                taken = rows[start : start + self.rows]
                filled = taken + taken[:1] * (self.rows - len(taken))
                parts.append(self._run(transformer, everything.at(filled, padded))[: len(taken)])
                order += taken
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        if order == sorted(order):
            return together
        return together.index_select(0, torch.tensor(order).argsort().to(together.device))

    def padded(self, length: int) -> int:
        """The text tokens of a row with that many true ones: never a matter of the rows beside it."""
        return max(SHORTEST_TEXT, 1 << (length - 1).bit_length()) if self.differing_texts else length

    @property
    def graphs(self) -> int:
        """How many there are."""
        return sum(graph is not None for graph in self._graphs.values())

    def clear(self) -> None:
        """Forgets every graph: the transformer's structure, or the way it is computed, is another one now."""
        self._graphs.clear()
        self.refused.clear()
        self.other_bits = 0

    def describe(self) -> dict[str, object]:
        """For `/server_info`."""
        exact = self.other_bits == 0 if self.tries else None
        return {"rows": self.rows, "graphs": self.graphs, "refused": list(self.refused), "replay_exact": exact}

    def _run(self, transformer: torch.nn.Module, piece: Piece) -> torch.Tensor:
        key = (transformer, *piece.key)
        if key not in self._graphs:
            self._graphs[key] = self._make(transformer, piece)
        graph = self._graphs[key]
        if graph is None:
            return eager_piece(transformer, piece, self.choices)
        return self._call(graph, transformer, piece)

    def _call(self, graph: Graph, transformer: torch.nn.Module, piece: Piece) -> torch.Tensor:
        lengths = torch.tensor(piece.lengths)
        with _only_mode(piece.plan, self.choices):
            return graph(transformer, piece.inputs, lengths, piece.plan_shape, self.choices.attention_per_sample)

    def _make(self, transformer: torch.nn.Module, piece: Piece) -> Graph | None:
        """The graph for pieces of that shape; None if it was refused, which is logged."""
        padded, image_tokens, _ = piece.plan_shape
        name = f"{self.rows} rows of {image_tokens} image and {padded} text tokens"
        graph, began = compiled_graph(self.backend), time.perf_counter()
        logger.info("compiling the transformer for %s", name)
        try:
            failed = self._try(graph, transformer, piece)
        except CANT_COMPILE as error:
            failed = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
        if failed is not None:
            self.refused.append(f"{name}: {failed}")
            logger.warning("not compiled, and computed eagerly: %s", self.refused[-1])
            return None
        logger.info("compiled in %.0f s", time.perf_counter() - began)
        return graph

    def _try(self, graph: Graph, transformer: torch.nn.Module, piece: Piece) -> str | None:
        """What changed the bits of a row: its place, or the other rows; None: nothing did. Compares with eager, too."""
        given = self._random(piece)
        whole = self._call(graph, transformer, given)  # compiles
        if not self.tries:
            return None
        if not whole.isfinite().all():
            return "velocities that are not finite"
        turns = [[(row + turn) % self.rows for row in range(self.rows)] for turn in range(1, self.rows)]
        for places in (*turns, [0] * self.rows, [self.rows - 1] * self.rows):
            if not torch.equal(self._call(graph, transformer, given.at(places)), whole[places]):
                return f"other bits with rows {places} in one forward"
        self.other_bits += int((eager_piece(transformer, given, self.choices) != whole).sum())
        return None

    def _random(self, piece: Piece) -> Piece:
        """Other rows of the same shapes, all different, from a generator of its own."""
        generator = torch.Generator().manual_seed(0)

        def numbers(name: str, value: Any) -> Any:
            if name in SHARED or not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if value.dim() == 1:  # timesteps, embedded guidance
                return torch.linspace(0.1, 0.9, len(value)).to(value) * value.abs().max()
            return torch.randn(value.shape, generator=generator).to(value)

        padded = piece.plan_shape[0]
        lengths = tuple(padded - row % 3 for row in range(self.rows)) if self.differing_texts else piece.lengths
        inputs = {name: numbers(name, value) for name, value in piece.inputs.items()}
        return Piece(inputs, lengths, piece.plan_shape)


def eager_piece(transformer: torch.nn.Module, piece: Piece, choices: Choices) -> torch.Tensor:
    """The eager forward of a piece, inside an exact mode with the piece's own plan."""
    with _only_mode(piece.plan, choices):
        return eager(transformer, piece.plan, piece.inputs)


@contextmanager
def _only_mode(plan: AttentionPlan, choices: Choices) -> Iterator[None]:
    """Exact mode, without the modes around it: for another stack of modes dynamo would compile another graph."""
    with ExitStack() as outer:
        for _ in torch.overrides._get_current_function_mode_stack():
            outer.enter_context(torch.overrides._pop_mode_temporarily())
        with exact_mode(plan, choices):
            yield


def refuse_inexact_replay(runner: Runner, transformer: torch.nn.Module | None) -> None:
    """Refuses to score, by an eager forward, what compiled graphs with other bits have rolled out.

    Without gradients the family's own transformer runs through those graphs again: that is exact, and not refused.

    Raises:
        InvalidRequestError: the forward would be eager, and its bits are known to be others.
    """
    if not isinstance(runner, CompiledForward) or not runner.other_bits:
        return
    if transformer is not None or torch.is_grad_enabled():
        raise InvalidRequestError(
            "the rollout ran through compiled graphs, whose bits are not those of a forward with gradients or of "
            "another transformer: ratios would not be 1 at equal weights",
            code="not_exact",
            field="enable_torch_compile",
            value=True,
            hint="Roll out without --enable-torch-compile. Under torch.no_grad() the same graphs score it.",
        )


def compiled_graph(backend: str | Callable[..., Any] = "inductor") -> Graph:
    """A compiled `_forward` that shares no cache, and so no limit on recompilation, with any other one.

    dynamo keeps its graphs with the code object. What it guards on may change (a parameter's requires_grad): then it
    compiles the same computation again. It raises an error rather than run anything eagerly.
    """
    own = types.FunctionType(_forward.__code__.replace(), _forward.__globals__)
    options = _options() if backend == "inductor" else None
    graph: Graph = torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=options)
    return graph


def _options() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Where this torch has that switch, kernels aren't chosen by measured time: another process would choose others."""
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else {}


def _forward(
    transformer: torch.nn.Module,
    inputs: dict[str, Any],
    lengths: torch.Tensor,
    plan_shape: PlanShape,
    per_sample: frozenset[Any],
) -> torch.Tensor:
    with _Traceable(lengths, plan_shape, per_sample):
        velocity: torch.Tensor = transformer(**inputs, return_dict=False)[0]
    return velocity


class _Traceable(TorchFunctionMode):
    """Inside exact mode, which dynamo traces through: makes attention one operation that isn't looked into."""

    def __init__(self, lengths: torch.Tensor, plan_shape: PlanShape, per_sample: frozenset[Any]) -> None:
        super().__init__()
        self.lengths = lengths
        self.plan_shape = plan_shape
        self.per_sample = per_sample

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func is torch.Tensor.unflatten:  # dynamo can't trace it inside a mode
            return _unflatten(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p or is_causal or enable_gqa:
            raise NotImplementedError("compiled attention has no mask, no dropout and no groups of heads")
        per_sample = (query.shape[1], query.shape[-1], query.dtype) in self.per_sample
        return planned_attention(query, key, value, self.lengths, *self.plan_shape, per_sample, scale).transpose(1, 2)


@torch.library.custom_op("diffusion_rl::planned_attention", mutates_args=())
def planned_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    padded_text: int,
    image_tokens: int,
    text_first: bool,
    per_sample: bool,
    scale: float | None,
) -> torch.Tensor:
    """`rl_kernels.attention.attention` as `[B, tokens, heads, D]`, by a plan whose lengths no graph depends on: they
    come as a tensor `[B]`, on the CPU."""
    plan = AttentionPlan(tuple(lengths.tolist()), padded_text, image_tokens, text_first)
    with torch._C.DisableTorchFunction():  # or the exact mode around the graph would plan each call once more
        out = attention(query, key, value, plan=plan, scale=scale, per_sample=per_sample)
    return out.transpose(1, 2).contiguous()


@planned_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, tokens, _width = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


def _unflatten(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    dim = dim % x.dim()
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _rows_of(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.index_select(0, torch.tensor(rows).to(value.device))
    return [value[row] for row in rows] if isinstance(value, list) else value
