"""Tensor parallelism: ranks share a transformer's weights. Each computes some heads of an attention and some of the
hidden features of a feed-forward, from whole inputs; the second layer of each adds the ranks' parts up.

The parts are exchanged as they are and added in the order of the ranks, in fp32, with one rounding at the end: elements
don't see each other, so a sample's bits don't depend on its batch, and all ranks hold the same sum. They are not the
bits of another number of ranks, for which a sum is rounded at other places.

A weight that is split is a DTensor (`tensor_styles` makes it); forwards run on its local part, so that exact mode and
certification see the operations that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F

from engine_control.errors import InvalidRequestError
from engine_control.groups import RankGroup


@dataclass(frozen=True)
class TensorPlan:
    """How a transformer's weights are split: patterns (fnmatch) of its modules' names. What no pattern names is whole
    on every rank.

    columns: linear layers of which a rank has some outputs, in rank order; rows: those that take such outputs, of which
        a rank has the weights of its inputs; attentions: modules whose heads are those outputs, and whose own other
        parameters work on single heads; norms: RMS norms over all of such outputs, of which a rank has the weights of
        its own; joined: for those of `rows` that take several layers' outputs side by side, the names of these layers,
        from their common parent on.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    attentions: tuple[str, ...]
    norms: tuple[str, ...] = ()
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check(self, transformer: torch.nn.Module, size: int) -> None:
        """
        Raises:
            InvalidRequestError: a width can't be dealt out evenly; the message has the numbers.
        """
        for name, module in transformer.named_modules():
            counts: dict[str, Any] = {}
            if matches(name, self.columns):
                counts["outputs"] = getattr(module, "out_features", None)
            if matches(name, self.rows):
                counts["inputs"] = getattr(module, "in_features", None)
            if matches(name, self.attentions):
                counts["attention heads"] = getattr(module, "heads", None)
            for what, count in counts.items():
                if not isinstance(count, int) or count % size:
                    raise InvalidRequestError(
                        f"{count} {what} of {name} can't be shared by {size} ranks",
                        field="tp_size",
                        value=size,
                        hint="Use a size that divides it, or share tokens instead (--sp-degree).",
                    )

    def sections(self, transformer: torch.nn.Module, name: str) -> tuple[int, ...]:
        """How many inputs of row layer `name` come from each layer, each to be dealt out to the ranks by itself."""
        layers = next((layers for pattern, layers in self.joined.items() if fnmatchcase(name, pattern)), None)
        if layers is None:
            return (int(transformer.get_submodule(name).in_features),)  # type: ignore[arg-type]
        parent = transformer.get_submodule(name.rpartition(".")[0])
        return tuple(int(parent.get_submodule(layer).out_features) for layer in layers)  # type: ignore[arg-type]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class TensorParallel:
    """One rank's part in the sums of a transformer that is split over `size` ranks.

    Until it has joined a group, a sum is this rank's part alone: enough to see which operations run, and whether their
    rows see each other.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group: RankGroup | None = None

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts, added in rank order in fp32 (fp64 for such parts). Every rank calls it at the same time."""
        wide = torch.promote_types(part.dtype, torch.float32)
        first, *rest = [part] if self.group is None else self.group.all_gather(part).unbind(0)
        total = first.to(wide)
        for other in rest:
            total = total + other
        return total

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' parts side by side along `dim`. Every rank calls it at the same time."""
        parts = [part] if self.group is None else self.group.all_gather(part).unbind(0)
        return torch.cat(list(parts), dim=dim)


class _Summed(torch.autograd.Function):
    """`TensorParallel.sum`. Each rank's part has the whole gradient of the sum, which every rank holds."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: TensorParallel) -> torch.Tensor:
        ctx.dtype = part.dtype
        return ranks.sum(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


class _Shared(torch.autograd.Function):
    """A tensor that every rank holds, and that each uses for its own part: its gradient is the sum of all of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorParallel) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.sum(grad).to(grad.dtype), None


class ColumnLinear(torch.nn.Linear):
    """A linear layer of which this rank has some outputs: weight `[N, K]`, bias `[N]` are DTensors, split along N."""

    ranks: TensorParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            x = _Shared.apply(x, self.ranks)
        return F.linear(x, _local(self.weight), None if self.bias is None else _local(self.bias))


class RowLinear(torch.nn.Linear):
    """A linear layer of which this rank has the weights of some inputs: weight `[N, K]` is a DTensor, split along K.
    The bias is whole, and so is the output, on every rank.

    sections: sizes, K in all, of parts of the inputs that are dealt out each by itself. With more than one, K stands in
    the DTensor in another order than in the checkpoint: rank 0's share of each section, then rank 1's.
    """

    ranks: TensorParallel
    sections: tuple[int, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(x, _local(self.weight))
        graded = torch.is_grad_enabled() and part.requires_grad
        total: torch.Tensor = _Summed.apply(part, self.ranks) if graded else self.ranks.sum(part)
        if self.bias is not None:
            total = total + _local(self.bias)
        return total.to(part.dtype)


class SplitRMSNorm(torch.nn.RMSNorm):
    """An RMS norm over a width of which this rank has a part: weight `[D]` is a DTensor. The mean square is that of the
    whole width; one rounding at the end."""

    ranks: TensorParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().mean(-1, keepdim=True)
        graded = torch.is_grad_enabled() and squares.requires_grad
        total: torch.Tensor = (
            _Shared.apply(_Summed.apply(squares, self.ranks), self.ranks) if graded else self.ranks.sum(squares)
        )
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(total / self.ranks.size + eps)
        return (normed * _local(self.weight)).to(x.dtype)


def _local(weight: Any) -> torch.Tensor:
    local: torch.Tensor = weight.to_local()
    return local


def sum_gradient(ranks: TensorParallel) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook for a whole parameter that each rank applies to its own part: afterwards the gradient is that of all."""
    return lambda grad: ranks.sum(grad).to(grad.dtype)


def refuse_other_degree(ranks: TensorParallel | None, transformer: torch.nn.Module | None) -> None:
    """Refuses to score by another number of ranks than `ranks` what these have rolled out. None stands for their own
    transformer.

    Raises:
        InvalidRequestError: the transformer is split over another number; its bits would be others.
    """
    if ranks is None or transformer is None:
        return
    degree = next((m.ranks.size for m in transformer.modules() if isinstance(m, RowLinear)), 1)
    if degree != ranks.size:
        raise InvalidRequestError(
            f"the rollout's weights are split over {ranks.size} ranks and this transformer's over {degree}: ratios "
            "would not be 1 at equal weights",
            code="not_exact",
            field="tp_size",
            value=ranks.size,
            hint="Split it alike (ModelFamily.split_weights), on as many ranks of the trainer.",
        )


def refuse_shared_weights(ranks: TensorParallel | None, transformer: object) -> None:
    """Refuses a replay by an engine's rank 0 alone with its own transformer, of which it holds a part.

    Raises:
        InvalidRequestError: `ranks` share the weights, and no other transformer is given.
    """
    if ranks is not None and transformer is None:
        raise InvalidRequestError(
            f"rank 0 can't replay alone what {ranks.size} ranks compute together",
            code="sharded",
            field="tp_size",
            value=ranks.size,
            hint="Replay on as many ranks of a trainer (replay_step, with weights split alike), or roll out without "
            "--tp-size.",
        )
