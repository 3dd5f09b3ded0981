"""Release and resume of memory, by tag, from rank 0's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_control.engine import ControlledEngine
from engine_control.errors import ConflictError, InvalidRequestError
from engine_control.rank import Outcome, RankCommand, first_error
from engine_control.state import ControlState

TAGS = ("weights", "kv_cache", "cuda_graph")


class Sleep:
    """The memory commands. Releasing what is released, and resuming what isn't, does nothing."""

    def __init__(
        self, engine: ControlledEngine[Any, Any], state: ControlState, *, enabled: bool, backup: bool = True
    ) -> None:
        """`backup` is what a release does that doesn't say: keep the weights in host memory, or lose them."""
        self._engine = engine
        self._state = state
        self._enabled = enabled
        self._backup = backup

    def release_memory_occupation(
        self, tags: Sequence[str] | None = None, *, backup: bool | None = None, wait: bool = False
    ) -> object:
        """Gives the memory of those tags (none named: of all) back. It is free when this returns. With a backup the
        weights come back as they are; without one they are undefined after the resume, until a complete update.

        Raises:
            ConflictError: a step could still need it: a session is open, or requests are in flight (with `wait` it is
                done when they have finished).
            InvalidRequestError: the memory saver is off, or there is no such tag.
        """
        wanted = self._wanted(tags)
        if not self._enabled:
            raise InvalidRequestError(
                "the memory saver is off", code="memory_saver_off", hint="Start with --enable-memory-saver."
            )
        if self._state.session is not None:
            raise ConflictError("a weight-update session is open", code="updating", hint="End or abort it first.")

        def release() -> dict[str, Any]:
            return self._release([t for t in wanted if t not in self._state.released], backup)

        if not self._state.may_step() or not self._engine.running_requests():
            return release()  # what is in flight, if anything, is frozen: it keeps its latents
        if wait:
            return self._state.when_drained(release)
        raise ConflictError(
            f"{len(self._engine.running_requests())} requests are in flight",
            code="busy",
            hint="Pause first, or send wait=true.",
        )

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Gets the memory of those tags back, and what was backed up.

        Raises:
            InsufficientMemoryError: it doesn't fit now. Nothing is held of the attempt; a retry may succeed.
        """
        wanted = [t for t in self._wanted(tags) if t in self._state.released]
        outcomes = self._ask("resume", tags=wanted) if wanted else []
        undefined = self._note_undefined(outcomes)
        failed = first_error(outcomes)
        if failed is not None:
            self._ask("release", tags=wanted, backup=True)  # on ranks that had room; the others are released as it is
            raise failed
        self._state.released -= frozenset(wanted)
        self._state.apply()
        message = "Memory resumed."
        if undefined:
            message += f" The weights of {', '.join(sorted(undefined))} are undefined until a complete update."
        return self._answer(message) | {"undefined": sorted(undefined)}

    def is_sleeping(self) -> bool:
        return bool(self._state.released)

    def _release(self, tags: list[str], backup: bool | None) -> dict[str, Any]:
        keep = self._backup if backup is None else backup
        outcomes = self._ask("release", tags=tags, backup=keep) if tags else []
        failed = first_error(outcomes)
        if failed is not None:
            self._note_undefined(self._ask("resume", tags=tags))
            self._state.apply()
            raise failed
        self._state.released |= frozenset(tags)
        self._state.apply()
        freed = sum(outcome.value["bytes_freed"] for outcome in outcomes)
        return self._answer(f"{freed} bytes freed.") | {"bytes_freed": freed}

    def _note_undefined(self, outcomes: Sequence[Outcome]) -> frozenset[str]:
        """The modules whose weights came back empty on some rank; they stay broken until they are sent."""
        undefined = frozenset(n.split(".")[0] for o in outcomes if o.error is None for n in o.value["undefined"])
        self._state.broken |= undefined
        return undefined

    def _answer(self, message: str) -> dict[str, Any]:
        released = sorted(self._state.released)
        return {"success": True, "sleeping": bool(released), "message": message, "tags": released}

    def _wanted(self, tags: Sequence[str] | None) -> list[str]:
        for tag in tags or ():
            if tag not in TAGS:
                raise InvalidRequestError(
                    f"unknown memory tag {tag!r}",
                    code="unknown_tag",
                    field="tags",
                    value=tag,
                    hint=f"Known: {', '.join(TAGS)}; none means all.",
                )
        return list(dict.fromkeys(tags or TAGS))

    def _ask(self, name: str, **arguments: Any) -> list[Outcome]:
        return self._engine.everywhere(RankCommand(name, arguments))
