"""Rank 0's view of the other ranks: they are started, told every batch and every command, and closed.

An engine without other ranks has `NoRanks`, so that it needs no special case. Only rank 0 has sequences, pages and a
prefix cache; a batch says in plain numbers which tokens go where.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from engine_control.config import engine_environment
from engine_control.errors import EngineDiedError, InvalidRequestError
from engine_control.followers import Followers
from engine_control.groups import RankGroup, Rendezvous
from engine_control.rank import Outcome
from llm_runtime.config import LLMConfig
from llm_runtime.engine.batches import ForwardBatch
from llm_runtime.models.base import OneRank, TensorParallel
from llm_runtime.models.loading import check_tensor_parallel

FOLLOWER = "llm_runtime.parallel.follower"
COLLECTIVE_TIMEOUT_S = 300.0

OnDeath = Callable[[EngineDiedError], None]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Meets the other ranks and loads its part of the model. The answer: how many pages its KV cache has room for."""

    rank: int
    config: Any
    device: str
    path: str
    timeout_s: float


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """Makes a KV cache of so many pages, and certifies with the other ranks. The answer: is it exact?"""

    pages: int


class Shared:
    """A `TensorParallel` over a group of ranks."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers all parts and adds them in the order of ranks. A ring adds in an order that depends on the place in
        the buffer, so on the batch."""
        first, *rest = self.group.all_gather(x).unbind(0)
        total = first.clone()
        for part in rest:
            total += part
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.all_gather(x).unbind(0), dim=-1)


class Ranks(Protocol):
    """What the engine of rank 0 asks of the others."""

    tensor_parallel: TensorParallel

    def announce(self, batch: ForwardBatch) -> None:
        """Tells every other rank what rank 0 computes next."""

    def everywhere(self, decision: object, own: Callable[[], Outcome]) -> list[Outcome]:
        """Has every other rank carry the decision out while this one computes `own`; the outcomes, rank 0's first."""

    def together(self) -> AbstractContextManager[None]:
        """Around work that every rank takes part in."""

    def agree_on_pages(self, own: int) -> int:
        """How many pages each rank's KV cache gets, `own` being what there is room for here."""

    def complete(self, *, exact: bool) -> None:
        """Waits until every rank is ready, and as exact as this one."""

    def close(self) -> None:
        """Ends the other ranks."""


class NoRanks:
    """One process computes everything."""

    def __init__(self) -> None:
        self.tensor_parallel: TensorParallel = OneRank()

    def announce(self, batch: ForwardBatch) -> None:
        pass

    def everywhere(self, decision: object, own: Callable[[], Outcome]) -> list[Outcome]:
        return [own()]

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree_on_pages(self, own: int) -> int:
        return own

    def complete(self, *, exact: bool) -> None:
        pass

    def close(self) -> None:
        pass


class OtherRanks:
    """Ranks 1 to n of an engine, each a process of this machine. Rank 0 is the process that made this."""

    def __init__(self, config: LLMConfig, *, on_death: OnDeath | None = None, follower: str = FOLLOWER) -> None:
        """Starts the processes, which begin to load the model at once, and meets them."""
        size = config.tp_size
        devices = [device_of(rank, config) for rank in range(size)]
        self._group: RankGroup | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="llm-runtime-ranks-")  # nobody else may enter it
        path = str(Path(self._directory.name) / "store")
        tell = on_death or (lambda error: self._abort())
        self._followers = Followers(follower, [engine_environment(size)] * (size - 1), on_death=tell)
        try:
            self._followers.tell_each(
                [Load(rank, config, devices[rank], path, COLLECTIVE_TIMEOUT_S) for rank in range(1, size)]
            )
            self._group = meet(path, 0, size, devices[0], COLLECTIVE_TIMEOUT_S)
        except Exception:
            self.close()
            raise
        self.tensor_parallel: TensorParallel = Shared(self._group)

    def announce(self, batch: ForwardBatch) -> None:
        self._followers.announce(batch.plain())

    def everywhere(self, decision: object, own: Callable[[], Outcome]) -> list[Outcome]:
        mine, answers = self._followers.everywhere(decision, own)
        return [mine, *(msgspec.convert(answer, Outcome) for answer in answers)]

    def together(self) -> AbstractContextManager[None]:
        return self._followers.together()

    def agree_on_pages(self, own: int) -> int:
        pages = min(own, *self._followers.answers())
        self._followers.tell_each([Prepare(pages)] * (self.tensor_parallel.size - 1))
        return pages

    def complete(self, *, exact: bool) -> None:
        """
        Raises:
            EngineDiedError: a rank ended, or found otherwise.
        """
        for rank, answer in enumerate(self._followers.answers(), start=1):
            if answer != exact:
                raise EngineDiedError(
                    f"rank {rank} is {'exact' if answer else 'not exact'}, and rank 0 is{'' if exact else ' not'}",
                    hint="All ranks of an engine need the same kind of device.",
                )
        self._directory.cleanup()  # they have exchanged tensors by now, so nobody needs the meeting place any more

    def close(self) -> None:
        try:
            self._abort()
        finally:
            self._followers.close()
            self._directory.cleanup()

    def _abort(self) -> None:
        """Lets rank 0 go from a collective in which it waits for the dead."""
        if self._group is not None:
            self._group.abort()


def meet(path: str, rank: int, size: int, device: str, timeout_s: float) -> RankGroup:
    """The group of all ranks, as one of them; returns when all have come."""
    return Rendezvous(path, size, timeout_s).join(
        "tensor-parallel", rank, size, torch.device(device), shared_device=False
    )


def device_of(rank: int, config: LLMConfig) -> str:
    """Which device a rank computes on: one GPU each, from the first on, or all on the CPU.

    Raises:
        InvalidRequestError: there are not enough GPUs.
    """
    named = config.device
    if named == "auto":
        named = "cuda" if torch.cuda.is_available() else "cpu"
    if not named.startswith("cuda"):
        return named
    if config.tp_size == 1:
        return named
    if config.tp_size > torch.cuda.device_count():
        raise InvalidRequestError(
            f"tp_size={config.tp_size} needs as many GPUs, and there are {torch.cuda.device_count()}",
            field="tp_size",
            value=config.tp_size,
            hint="Lower --tp-size, or use --device cpu.",
        )
    return f"cuda:{rank}"


def start_ranks(config: LLMConfig, *, on_death: OnDeath | None = None) -> Ranks:
    """The other ranks that `config` asks for, met and loading.

    Raises:
        InvalidRequestError: there can't be so many.
        EngineError: one could not start.
    """
    if config.tp_size < 1:
        raise InvalidRequestError("tp_size must be at least 1", field="tp_size", value=config.tp_size)
    if config.tp_size == 1:
        return NoRanks()
    check_tensor_parallel(config)
    return OtherRanks(config, on_death=on_death)
