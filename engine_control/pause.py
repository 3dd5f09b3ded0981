"""Pause, continue, abort and flush, in SGLang's words. vLLM's `keep` is `in_place`, or `retract` where it clears
caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine_control.engine import ControlledEngine
from engine_control.errors import ConflictError, InvalidRequestError, from_message
from engine_control.rank import RankCommand
from engine_control.state import ControlState, PauseMode
from engine_control.step_loop import Pending, StepLoop


class Pause:
    """The commands that say what happens to requests. Each is a no-op where things already are as it says."""

    def __init__(self, engine: ControlledEngine[Any, Any], state: ControlState, loop: StepLoop[Any, Any]) -> None:
        self._engine = engine
        self._state = state
        self._loop = loop

    def pause_generation(self, mode: str = "abort", *, refuse_new: bool = False, clear_cache: bool = False) -> object:
        """Pauses. `abort` ends what is in the engine; `wait` answers when all that has begun is finished; `retract`
        puts it back into the queue; `in_place` freezes it. New requests wait, or are refused. A second pause replaces
        the first.

        Raises:
            InvalidRequestError: there is no such mode.
            ConflictError: `wait` could wait for ever, because what is in flight is frozen.
        """
        if mode not in list(PauseMode):
            raise InvalidRequestError(
                f"unknown pause mode {mode!r}", field="mode", value=mode, hint=f"Known: {', '.join(PauseMode)}."
            )
        before = self._state.pause, self._state.refuse_new

        def done() -> dict[str, Any]:
            if clear_cache:
                self._flush()
            return {"status": "ok", "message": "Generation paused successfully."}

        self._set(PauseMode(mode), refuse_new)
        if mode == PauseMode.ABORT:
            self._loop.abort_requests(self._engine.request_ids())
        elif mode == PauseMode.RETRACT:
            self._engine.retract_requests()
        elif mode == PauseMode.WAIT:
            try:
                return self._state.when_drained(done)
            except ConflictError:
                self._set(*before)
                raise
        return done()

    def continue_generation(self, *, torch_empty_cache: bool = True) -> dict[str, Any]:
        """Goes on. What was frozen or put back goes on to the bits that it would have had."""
        self._set(None, False)
        return {"status": "ok", "message": "Generation continued successfully."}

    def is_paused(self) -> bool:
        return self._state.pause is not None

    def abort_requests(
        self, rids: Sequence[str] | None = None, *, rid_prefix: str | None = None, abort_all: bool = False
    ) -> dict[str, Any]:
        """Aborts by id, by the beginning of the id, or all. Unknown ids are none of the engine's business."""
        known = self._engine.request_ids()
        wanted = set(rids or ())
        chosen = [
            request_id
            for request_id in known
            if abort_all or request_id in wanted or (rid_prefix and request_id.startswith(rid_prefix))
        ]
        return {"aborted": self._loop.abort_requests(chosen)}

    def flush_cache(self, *, timeout: float = 0.0) -> object:
        """Drops what is cached across requests.

        Raises:
            ConflictError: it is needed by requests in flight, and still was after `timeout` seconds.
        """
        if not self._engine.flush_needs_idle() or not self._engine.running_requests():
            return self._flush()
        busy = ConflictError(
            f"{len(self._engine.running_requests())} requests are running",
            code="busy",
            hint="Retract or finish them, or send a longer timeout.",
        )
        if timeout <= 0:
            raise busy
        deadline = time.monotonic() + timeout

        def late() -> object:
            raise busy

        return Pending(lambda: not self._engine.running_requests(), self._flush, lambda: deadline, late)

    def _flush(self) -> dict[str, Any]:
        for outcome in self._engine.everywhere(RankCommand("flush_caches", {"modules": None})):
            if outcome.error is not None:
                raise from_message(outcome.error)
        return {"success": True, "message": "Cache flushed."}

    def _set(self, mode: PauseMode | None, refuse_new: bool) -> None:
        self._state.pause, self._state.refuse_new = mode, refuse_new
        self._state.apply()
