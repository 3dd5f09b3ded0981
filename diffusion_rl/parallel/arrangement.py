"""How the forwards behind one prediction are laid out over time and ranks. No bit of it depends on the arrangement, but
for the number of ranks that share the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from diffusion_rl.parallel.cfg import PASSES, CfgParallel, GuidancePass, batched
from diffusion_rl.parallel.exchange import Collectives, Exchange
from diffusion_rl.parallel.layout import Layout
from diffusion_rl.parallel.sequence import SequenceParallel, SequenceSpec
from diffusion_rl.parallel.shards import shards_of
from diffusion_rl.parallel.tensor import TensorParallel
from engine_control.groups import RankGroup
from rl_kernels import AttentionPlan

Join = Callable[[str, int, int], RankGroup]


@dataclass
class Work:
    """What one rank has computed since the start: tokens, padding included, that went through its blocks."""

    tokens: int = 0


@dataclass(frozen=True)
class Arrangement:
    """guidance: which forwards compute the negative and the positive rows; sequence: who shares a forward's tokens;
    tensor: who shares the transformer's weights, which the transformer knows by itself."""

    guidance: GuidancePass = batched
    sequence: SequenceParallel | None = None
    tensor: TensorParallel | None = None
    work: Work = field(default_factory=Work)

    def sharding(self, plan: AttentionPlan) -> AbstractContextManager[None]:
        """For one forward of the transformer, inside exact mode."""
        shards = shards_of(plan, self.sharing)
        self.work.tokens += len(plan.text_lengths) * (shards.share("image") + shards.share("text"))
        return nullcontext() if self.sequence is None else self.sequence.sharding(shards)

    @property
    def splits_forward(self) -> bool:
        """Whether a forward is one of several ranks."""
        return self.sequence is not None or self.tensor is not None

    @property
    def sharing(self) -> int:
        """How many ranks share the tokens of a forward."""
        return 1 if self.sequence is None else self.sequence.exchange.group.size

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a forward: what it exchanges must not need the host."""
        return self.tensor is None and (self.sequence is None or self.sequence.exchange.capturable)

    @property
    def groups(self) -> list[RankGroup]:
        """The groups that this rank exchanges with."""
        found = [] if self.sequence is None else [self.sequence.exchange.group]
        if self.tensor is not None and self.tensor.group is not None:
            found.append(self.tensor.group)
        return found + ([self.guidance.group] if isinstance(self.guidance, CfgParallel) else [])

    @property
    def bytes_sent(self) -> int:
        return sum(group.traffic.bytes_sent for group in self.groups)

    def give_back(self) -> None:
        """As `Exchange.give_back`."""
        if self.sequence is not None:
            self.sequence.exchange.give_back()

    def check(self) -> None:
        """
        Raises:
            EngineDiedError: as `Exchange.check`.
        """
        if self.sequence is not None:
            self.sequence.exchange.check()

    def abort(self) -> None:
        """Ends exchanges in progress, from another thread, because a rank is gone."""
        if self.sequence is not None:
            self.sequence.exchange.abort()
        for group in self.groups:
            group.abort()


def arrange(
    rank: int,
    layout: Layout,
    transformers: Iterable[torch.nn.Module],
    spec: SequenceSpec,
    *,
    guidance: str,
    join: Join,
    exchange: Callable[[RankGroup], Exchange] = Collectives,
    tensor: TensorParallel | None = None,
) -> Arrangement:
    """The part of that rank. `join(name, place, size)` makes a group, when all its members have come to it, and
    `exchange` is how those who share tokens exchange them. `tensor` is what the transformers' weights were split by, if
    they were.

    With one rank nobody is waited for, and `guidance` names the pass.
    """
    place, sequence = layout.place(rank), None
    if tensor is not None:
        tensor.group = join(f"tensor-{place.half}-{place.share}", place.part, layout.tp_size)
    if layout.sp_degree > 1:
        group = join(f"sequence-{place.half}-{place.part}", place.share, layout.sp_degree)
        sequence = SequenceParallel(transformers, spec, exchange(group))
    if layout.cfg_degree > 1:
        group = join(f"guidance-{place.share}-{place.part}", place.half, layout.cfg_degree)
        return Arrangement(CfgParallel(group), sequence, tensor)
    return Arrangement(PASSES[guidance], sequence, tensor)
