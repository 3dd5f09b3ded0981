"""How the forwards behind one prediction are laid out over time and ranks. No bit of it depends on the arrangement."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from diffusion_rl.parallel.cfg import PASSES, CfgParallel, GuidancePass, batched
from diffusion_rl.parallel.groups import RankGroup
from diffusion_rl.parallel.layout import Layout
from diffusion_rl.parallel.sequence import SequenceParallel, SequenceSpec, shards_of
from rl_kernels import AttentionPlan

Join = Callable[[str, int, int], RankGroup]


@dataclass
class Work:
    """What one rank has computed since the start: tokens, padding included, that went through its blocks."""

    tokens: int = 0


@dataclass(frozen=True)
class Arrangement:
    """guidance: which forwards compute the negative and the positive rows; sequence: who shares a forward's tokens."""

    guidance: GuidancePass = batched
    sequence: SequenceParallel | None = None
    work: Work = field(default_factory=Work)

    def sharding(self, plan: AttentionPlan) -> AbstractContextManager[None]:
        """For one forward of the transformer, inside exact mode."""
        shards = shards_of(plan, 1 if self.sequence is None else self.sequence.group.size)
        self.work.tokens += len(plan.text_lengths) * (shards.share("image") + shards.share("text"))
        return nullcontext() if self.sequence is None else self.sequence.sharding(shards)

    @property
    def groups(self) -> list[RankGroup]:
        """The groups that this rank exchanges with."""
        sequence = [] if self.sequence is None else [self.sequence.group]
        return sequence + ([self.guidance.group] if isinstance(self.guidance, CfgParallel) else [])

    @property
    def bytes_sent(self) -> int:
        return sum(group.traffic.bytes_sent for group in self.groups)

    def abort(self) -> None:
        """Ends collectives in progress, from another thread, because a rank is gone."""
        for group in self.groups:
            group.abort()


def arrange(
    rank: int, layout: Layout, transformer: torch.nn.Module, spec: SequenceSpec, *, guidance: str, join: Join
) -> Arrangement:
    """The part of that rank. `join(name, place, size)` makes a group, when all its members have come to it.

    With one rank nobody is waited for, and `guidance` names the pass.
    """
    half, place = divmod(rank, layout.sp_degree)
    sequence = None
    if layout.sp_degree > 1:
        sequence = SequenceParallel(transformer, spec, join(f"sequence-{half}", place, layout.sp_degree))
    if layout.cfg_degree > 1:
        return Arrangement(CfgParallel(join(f"guidance-{place}", half, layout.cfg_degree)), sequence)
    return Arrangement(PASSES[guidance], sequence)
