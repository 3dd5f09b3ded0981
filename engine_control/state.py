"""Where an engine stands: paused, open for new weights, asleep, inconsistent; and what that lets it do.

This object alone decides whether the engine steps, admits and takes requests. The commands of `pause`, `refit` and
`sleep` change it, between two steps, in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine_control.engine import ControlledEngine
from engine_control.errors import (
    ConflictError,
    EngineAsleepError,
    EngineError,
    EnginePausedError,
    EngineUnavailableError,
    InconsistentWeightsError,
)
from engine_control.step_loop import Pending

SUCCESS = {"success": True, "message": "Success"}
"""What a command answers that has no more to say."""


class PauseMode(StrEnum):
    """What a pause does with requests in flight: abort them, let them finish, put them back into the queue, or freeze
    them where they stand."""

    ABORT = "abort"
    WAIT = "wait"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True)
class CommitOptions:
    """What else is done when new weights are committed.

    empty_cache: torch's allocator gives back what it keeps. recapture: CUDA graphs are captured anew. keep_pause:
    generation stays paused until it is continued, in place if nothing else had paused it. token_step: the trainer's
    step, kept in the history.
    """

    empty_cache: bool = False
    recapture: bool = False
    keep_pause: bool = False
    token_step: int | None = None

    def __or__(self, other: CommitOptions) -> CommitOptions:
        """Both together; of two steps the other's."""
        return CommitOptions(
            self.empty_cache or other.empty_cache,
            self.recapture or other.recapture,
            self.keep_pause or other.keep_pause,
            self.token_step if other.token_step is None else other.token_step,
        )


@dataclass
class OpenSession:
    """The weight-update session that is open.

    owner: the id that its controller chose; None if it chose none.
    spoiled: why an update of it was refused. Some weights were to come and didn't, so it can only be undone.
    """

    id: str
    owner: str | None
    modules: tuple[str, ...]
    staged: bool
    can_undo: bool
    last_call: float
    manifest: Mapping[str, Any] | None = None
    weight_version: str | None = None
    flush: bool = False
    after: CommitOptions = CommitOptions()
    spoiled: str | None = None


@dataclass
class ControlState:
    """pause: how generation is paused, if it is. refuse_new: new requests get 503 meanwhile, instead of waiting.
    released: memory tags that are given back. broken: modules whose weights are undefined until a complete update.
    inconsistent: what went wrong, if the weights are neither the old nor the new ones. draining: commands that wait
    until nothing is in flight."""

    engine: ControlledEngine[Any, Any]
    refuse_during_update: bool = False
    pause: PauseMode | None = None
    refuse_new: bool = False
    session: OpenSession | None = None
    released: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    inconsistent: str | None = None
    draining: int = 0
    needed_tags: frozenset[str] = field(default_factory=frozenset)

    def may_step(self) -> bool:
        """As `step_loop.Gate`."""
        frozen = self.pause in (PauseMode.RETRACT, PauseMode.IN_PLACE)
        updating = self.session is not None and not self.session.staged
        return not (frozen or updating or self.asleep or self.broken)

    def refusal(self) -> EngineError | None:
        """As `step_loop.Gate`."""
        if self.inconsistent is not None:
            return InconsistentWeightsError(
                f"the weights are neither the old ones nor the new ones: {self.inconsistent}",
                hint="Send a complete update.",
            )
        if self.asleep:
            return EngineAsleepError(
                f"the engine is asleep: {', '.join(sorted(self.released))} released",
                hint="Call resume_memory_occupation (or /wake_up), then send the request again.",
            )
        if self.broken:
            return EngineAsleepError(
                f"the weights of {', '.join(sorted(self.broken))} are undefined since their memory was given back",
                hint="Send a complete update of them, then send the request again.",
            )
        if self.pause is not None and self.refuse_new:
            return EnginePausedError(
                "Generation is paused. Please retry after it resumes.", hint="It goes on at /resume."
            )
        if self.session is not None and not self.session.staged and self.refuse_during_update:
            return EngineUnavailableError("the weights are being updated", code="updating", hint="Retry in a moment.")
        return None

    @property
    def asleep(self) -> bool:
        """Whether something that a step needs is released."""
        return bool(self.released & self.needed_tags)

    @property
    def frozen(self) -> bool:
        """Whether what is in flight stands still, so that it can be worked under between two steps."""
        return self.pause is not None and not self.may_step()

    @property
    def name(self) -> str:
        if self.inconsistent is not None:
            return "inconsistent"
        if self.asleep or self.broken:
            return "asleep"
        if self.session is not None:
            return "updating"
        return "ready" if self.pause is None else "paused"

    def describe(self) -> dict[str, Any]:
        """For `/health`, `/ready` and whoever asks."""
        refusal, session = self.refusal(), self.session
        waits = self.pause is not None or not self.may_step()
        return {
            "state": self.name,
            "generation": "refused" if refusal is not None else "waits" if waits else "ok",
            "reason": None if refusal is None else refusal.message,
            "weight_version": self.engine.weight_version,
            "paused": None if self.pause is None else self.pause.value,
            "session": None
            if session is None
            else {"session_id": session.id, "modules": list(session.modules), "staged": session.staged},
            "released": sorted(self.released),
        }

    def apply(self) -> None:
        """Tells the engine whether it may begin waiting requests. Called after every change."""
        held = self.pause is not None or self.draining > 0 or (self.session is not None and not self.session.staged)
        self.engine.hold_admission(held or not self.may_step())

    def when_drained(self, then: Callable[[], object]) -> object:
        """What `then` returns, once nothing is in flight; until then no waiting request begins.

        Raises:
            ConflictError: something is in flight that is frozen, so that would never be.
        """
        if not self.engine.running_requests():
            return then()
        if not self.may_step():
            raise ConflictError(
                f"requests are in flight, and the engine is {self.name}",
                code="busy",
                hint="Continue generation, or abort them.",
            )
        self.draining += 1
        self.apply()

        def finish() -> object:
            self.draining -= 1
            self.apply()
            return then()

        return Pending(ready=lambda: not self.engine.running_requests(), finish=finish)

    def refuse_asleep(self) -> None:
        """Raises `ConflictError` while the weights' memory is released."""
        if "weights" in self.released:
            raise ConflictError(
                "the weights' memory is released", code="asleep", hint="Call resume_memory_occupation first."
            )

    def mend(self, modules: Iterable[str]) -> None:
        """Those modules are whole again."""
        self.broken -= frozenset(modules)
        if not self.broken:
            self.inconsistent = None
