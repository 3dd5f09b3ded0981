"""Rank 0's view of the other ranks: they are started, told every decision, asked whether they agree, and closed.

An engine without other ranks has `NoRanks`, so that it needs no special case.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from diffusion_rl.config import EngineConfig
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.parallel.layout import Layout, device_of
from engine_control.config import engine_environment
from engine_control.errors import EngineDiedError, EngineError
from engine_control.followers import Followers
from engine_control.groups import Rendezvous
from engine_control.rank import Outcome

FOLLOWER = "diffusion_rl.rollout.follower"

OnDeath = Callable[[EngineDiedError], None]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Loads the model. The answer says what was loaded."""

    rank: int
    config: Any
    device: str


class Meet(msgspec.Struct, tag="meet", frozen=True):
    """Takes over what rank 0 chose, joins the other ranks, and certifies with them. The answer: is it exact?"""

    path: str
    ranks: int
    timeout_s: float
    exact: bool
    choices: dict[str, Any]


class Report(msgspec.Struct, frozen=True):
    """What a rank says when samples are finished: a digest of each, and what it has done since the start."""

    digests: list[str]
    tokens: int
    bytes_sent: int


class RanksDisagreeError(EngineDiedError):
    """Two ranks hold different bits of what must be equal. Nothing of it is handed out, and the engine ends."""

    default_code = "ranks_disagree"


class Ranks(Protocol):
    """What the engine of rank 0 asks of the others."""

    arrangement: Arrangement

    def announce(self, decision: object) -> None:
        """Tells every other rank what rank 0 does next."""

    def agree(self, decision: object, digests: Sequence[Callable[[], str]]) -> None:
        """Has every other rank carry the decision out and report. `digests` compute rank 0's, where anybody asks.

        Raises:
            RanksDisagreeError: a rank has another digest.
        """

    def everywhere(self, decision: object, own: Callable[[], Outcome]) -> list[Outcome]:
        """Has every other rank carry the decision out while this one computes `own`; the outcomes, rank 0's first."""

    def together(self) -> AbstractContextManager[None]:
        """Around work that every rank takes part in."""

    def describe(self) -> list[dict[str, object]]:
        """One entry a rank, for `/server_info`."""

    def close(self) -> None:
        """Ends the other ranks."""


@dataclass
class NoRanks:
    """One process computes everything."""

    arrangement: Arrangement

    def announce(self, decision: object) -> None:
        pass

    def agree(self, decision: object, digests: Sequence[Callable[[], str]]) -> None:
        pass

    def everywhere(self, decision: object, own: Callable[[], Outcome]) -> list[Outcome]:
        return [own()]

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self) -> list[dict[str, object]]:
        return []

    def close(self) -> None:
        pass


class OtherRanks:
    """Ranks 1 to n of an engine, each a process of this machine. Rank 0 is the process that made this."""

    def __init__(
        self, config: EngineConfig, layout: Layout, device: str, *, on_death: OnDeath | None, follower: str
    ) -> None:
        """Starts the processes, which begin to load the model at once."""
        self.arrangement = Arrangement()
        self._directory = tempfile.TemporaryDirectory(prefix="diffusion-rl-ranks-")  # nobody else may enter it
        share = config.parallel.share_device
        self._devices = [device_of(rank, device, layout, share_device=share) for rank in range(layout.ranks)]
        environment = engine_environment(layout.ranks)
        tell = on_death or (lambda error: self._abort())
        self._followers = Followers(follower, [environment] * (layout.ranks - 1), on_death=tell)
        self._reports: list[Report | None] = [None] * layout.ranks
        self._timeout_s = config.parallel.collective_timeout_s
        try:
            self._followers.tell_each([Load(rank, config, self._devices[rank]) for rank in range(1, layout.ranks)])
        except EngineError:
            self.close()
            raise

    def meeting(self, own: object, *, exact: bool, choices: dict[str, Any]) -> Rendezvous:
        """Where the ranks meet. Returns once every other rank has loaded what rank 0 has (`own` describes it), and is
        on its way there with rank 0's choices.

        Raises:
            EngineDiedError: one could not.
            RanksDisagreeError: one has something else.
        """
        self._compare(own)
        place = Rendezvous(str(Path(self._directory.name) / "store"), len(self._devices), self._timeout_s)
        meet = Meet(place.path, place.ranks, place.timeout_s, exact, choices)
        self._followers.tell_each([meet] * (place.ranks - 1))
        return place

    def complete(self, *, exact: bool) -> None:
        """Waits until every other rank is ready, and as exact as rank 0. Raises like `meeting`."""
        self._compare(exact)
        if exact:  # they have exchanged tensors by now, so nobody needs the meeting place any more
            self._directory.cleanup()

    def announce(self, decision: object) -> None:
        self._followers.announce(decision)

    def agree(self, decision: object, digests: Sequence[Callable[[], str]]) -> None:
        self._followers.check()
        own, told = self._followers.everywhere(
            decision, lambda: own_report([digest() for digest in digests], self.arrangement)
        )
        answers = [msgspec.convert(answer, Report) for answer in told]
        self._reports = [own, *answers]
        for rank, report in enumerate(answers, start=1):
            if report.digests != own.digests:
                raise self._followers.end(
                    RanksDisagreeError(
                        f"rank {rank} holds other latents than rank 0",
                        hint="A fault of the hardware or of this program; the engine must be started anew.",
                    )
                )

    def everywhere(self, decision: object, own: Callable[[], Outcome]) -> list[Outcome]:
        mine, answers = self._followers.everywhere(decision, own)
        return [mine, *(msgspec.convert(answer, Outcome) for answer in answers)]

    def together(self) -> AbstractContextManager[None]:
        return self._followers.together()

    def describe(self) -> list[dict[str, object]]:
        reports = zip(self._devices, [None, *self._followers.process_ids], self._reports, strict=True)
        return [
            {
                "device": device,
                "process_id": process_id,
                "tokens": 0 if report is None else report.tokens,
                "bytes_sent": 0 if report is None else report.bytes_sent,
            }
            for device, process_id, report in reports
        ]

    def _compare(self, own: object) -> None:
        for rank, answer in enumerate(self._followers.answers(), start=1):
            if answer != own:
                raise RanksDisagreeError(
                    f"rank {rank} found {answer!r}, rank 0 {own!r}",
                    field="device",
                    value=self._devices[rank],
                    hint="All ranks of an engine need the same kind of device.",
                )

    def close(self) -> None:
        try:
            self.arrangement.abort()  # or NCCL's groups end with the interpreter, which has hung over it
        finally:
            self._followers.close()
            self._directory.cleanup()

    def _abort(self) -> None:
        """Lets rank 0 go from a collective in which it waits for the dead."""
        self.arrangement.abort()


def own_report(digests: Sequence[str], arrangement: Arrangement) -> Report:
    """What this rank has to say when samples are finished.

    Raises:
        EngineDiedError: another one left an exchange.
    """
    arrangement.check()
    return Report(list(digests), arrangement.work.tokens, arrangement.bytes_sent)
