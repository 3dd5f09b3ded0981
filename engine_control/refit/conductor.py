"""A refit from rank 0's side: one session at a time, applied, verified, and committed or undone on every rank."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine_control.engine import ControlledEngine
from engine_control.errors import (
    ConflictError,
    EngineError,
    EngineFaultError,
    InvalidRequestError,
    WeightSessionError,
)
from engine_control.rank import Outcome, RankCommand, first_error, values_of
from engine_control.refit.manifest import read_manifest
from engine_control.refit.target import RefitTarget
from engine_control.state import SUCCESS, CommitOptions, ControlState, OpenSession, PauseMode
from engine_control.step_loop import Pending, StepLoop

logger = logging.getLogger(__name__)

HISTORY = 1000


@dataclass(frozen=True)
class WeightUpdate:
    """A committed refit. `digest` is over all tensors that came; `number` counts from 1 since the engine's start."""

    number: int
    weight_version: str
    modules: tuple[str, ...]
    tensors: int
    digest: str
    token_step: int | None = None


class RefitConductor:
    """The weight commands. Each is one command of the loop, and leaves the engine as it was if it raises."""

    def __init__(
        self,
        engine: ControlledEngine[Any, Any],
        target: RefitTarget,
        state: ControlState,
        loop: StepLoop[Any, Any],
        *,
        implicit_sessions: bool = False,
        session_timeout_s: float = 600.0,
    ) -> None:
        self._engine = engine
        self._target = target
        self._state = state
        self._loop = loop
        self._implicit = implicit_sessions
        self._timeout_s = session_timeout_s
        self.history: deque[WeightUpdate] = deque(maxlen=HISTORY)
        self.count = 0

    def begin_weight_update(
        self,
        selector: str = "all",
        *,
        target_modules: Sequence[str] | None = None,
        partial: bool = False,
        staged: bool = False,
        in_place: bool = False,
        session_id: str | None = None,
        manifest: Mapping[str, Any] | None = None,
        abort_all_requests: bool = False,
    ) -> object:
        """Opens the session. In place, no step runs until its end; staged, steps go on until the new weights are
        swapped in. What is in flight finishes first, unless it is paused, `in_place` or `staged` is asked for, or
        `abort_all_requests` ends it. `manifest` says what will have come, for those who don't send it with the end.

        Raises:
            WeightSessionError: a session is open already.
            ConflictError: another controller's is; or the weights' memory is released.
        """
        self._refuse_second(session_id)
        self._state.refuse_asleep()
        read_manifest(manifest)
        modules = self._modules(selector, target_modules)
        if abort_all_requests:
            self._loop.abort_requests(self._engine.request_ids())

        def open_now() -> dict[str, Any]:
            self._refuse_second(session_id)
            self._state.refuse_asleep()
            answer = self._begin(modules, partial=partial, staged=staged, session_id=session_id)
            self._owned(session_id).manifest = manifest
            return answer

        at_once = in_place or staged or self._state.frozen
        return open_now() if at_once else self._state.when_drained(open_now)

    def update_weights(
        self,
        transport: str,
        info: Mapping[str, Any],
        *,
        session_id: str | None = None,
        selector: str = "all",
        target_modules: Sequence[str] | None = None,
        partial: bool | None = None,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        is_async: bool = False,
        keep_pause: bool = False,
        torch_empty_cache: bool = False,
        recapture_cuda_graph: bool = False,
        token_step: int | None = None,
    ) -> object:
        """Applies one call's tensors within the open session. Without one, disk updates (and with implicit sessions
        every update) are a session of their own: complete for disk, by default partial for the others.

        A call that is a session of its own waits for what is in flight, unless it `is_async`: then it comes between two
        steps. The other options are those of `state.CommitOptions`.

        With `weight_update_mode` `lora_merge` in `info` the tensors are pairs of factors (`refit.lora`), merged onto
        the base of each layer that they name. A session of nothing else is complete; other layers stay as they are.

        Raises:
            WeightSessionError: there is no session, and this transport needs one.
            RefitRefusedError: a tensor can't be taken; nothing of this call was applied.
        """
        call = {"transport": transport, "info": dict(info)}
        after = CommitOptions(torch_empty_cache, recapture_cuda_graph, keep_pause, token_step)
        if self._state.session is None:
            if transport != "disk" and not self._implicit:
                raise WeightSessionError(
                    f"update_weights_from_{transport} must run between begin_weight_update() and end_weight_update()",
                    hint="Or start with --implicit-weight-sessions: each call is then a session of its own.",
                )
            begun = self.begin_weight_update(
                selector,
                target_modules=target_modules,
                partial=transport != "disk" if partial is None else partial,
                in_place=is_async,
                abort_all_requests=abort_all_requests,
            )

            def rest(_: object) -> object:
                self._owned(None).after = after
                return self._whole("update", call, weight_version=weight_version, flush=flush_cache)

            return _then(begun, rest)
        answer = self._within(session_id, "update", call, weight_version=weight_version, flush=flush_cache)
        self._owned(session_id).after |= after
        return answer

    def unmerge_lora(
        self,
        target_modules: Sequence[str] | None = None,
        *,
        session_id: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> object:
        """Puts back, bit for bit, the base of every weight that a `lora_merge` has changed (in those modules, or in
        all). Within the open session, or without one as a session of its own. `tensors` says how many there were."""
        self._state.refuse_asleep()
        merged = values_of(self._ask("merged_weights"))[0]
        modules = [m for m in merged if target_modules is None or m in target_modules]
        if not modules:
            return {**SUCCESS, "message": "Nothing was merged.", "tensors": 0, "bytes": 0}
        call = {"modules": modules}
        if self._state.session is not None:
            return self._within(session_id, "unmerge", call, weight_version=weight_version, flush=flush_cache)
        begun = self.begin_weight_update(target_modules=modules, partial=True, abort_all_requests=abort_all_requests)
        return _then(begun, lambda _: self._whole("unmerge", call, weight_version=weight_version, flush=flush_cache))

    def end_weight_update(
        self,
        *,
        session_id: str | None = None,
        weight_version: str | None = None,
        manifest: Mapping[str, Any] | None = None,
        flush_cache: bool = True,
    ) -> dict[str, Any]:
        """Verifies what came, on every rank, and commits it. If anything is wrong, all is undone and the
        session closed."""
        session = self._owned(session_id)
        if session.spoiled is not None:
            self._abort("one of its updates was refused")
            raise _spoiled(session)
        if weight_version is not None:
            session.weight_version = weight_version
        return self._end(session.manifest if manifest is None else manifest, flush=flush_cache or session.flush)

    def abort_weight_update(self, *, session_id: str | None = None) -> dict[str, Any]:
        """Undoes what came and closes the session. The weights are what they were before."""
        self._owned(session_id)
        self._abort("it was aborted")
        return {"success": True, "message": "The weight update was undone."}

    def init_weight_transfer(self, transport: str, info: Mapping[str, Any]) -> dict[str, Any]:
        """Has every rank open a channel of that transport."""
        values_of(self._ask("init_transport", transport=transport, info=dict(info)))
        return {"success": True, "message": "Weight transfer initialized"}

    def shutdown_weight_transfer(self, transport: str, info: Mapping[str, Any]) -> dict[str, Any]:
        """Has every rank close it."""
        if self._state.session is not None:
            raise ConflictError("a weight-update session is open", hint="End or abort it first.")
        values_of(self._ask("shutdown_transport", transport=transport, info=dict(info)))
        return {"success": True, "message": "Weight transfer shut down"}

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool = False) -> dict[str, Any]:
        """Renames the weights as they are. Unlike SGLang's, it aborts nothing unless it is asked to."""
        if abort_all_requests:
            self._loop.abort_requests(self._engine.request_ids())
        self._engine.weight_version = new_version
        return {"success": True, "message": f"Weight version updated to {new_version}", "new_version": new_version}

    def weight_modules(self) -> dict[str, Any]:
        """The modules that can be refitted, and those that a session is about that names none."""
        return {"modules": list(self._target.modules()), "main": list(self._target.default_modules("all"))}

    def weight_info(self) -> dict[str, Any]:
        """The version, how many updates were committed since the start, and the last of them."""
        return {
            "weight_version": self._engine.weight_version,
            "weight_update_count": self.count,
            "history": [asdict(update) for update in self.history],
        }

    def _begin(self, modules: Sequence[str], *, partial: bool, staged: bool, session_id: str | None) -> dict[str, Any]:
        state = self._state
        lost = state.broken & frozenset(modules)
        arguments = {"modules": list(modules), "partial": partial and not lost, "staged": staged, "undo": not lost}
        outcomes = self._ask("begin", **arguments)
        if first_error(outcomes) is not None:
            self._ask("undo")
            values_of(outcomes)
        state.session = OpenSession(
            id=session_id or uuid.uuid4().hex,
            owner=session_id,
            modules=tuple(modules),
            staged=staged,
            can_undo=not lost,
            last_call=time.monotonic(),
        )
        state.apply()
        self._watch(state.session)
        what = "The weights there were released, so only a complete update can be committed." if lost else "Success"
        return {
            "success": True,
            "message": what,
            "session_id": state.session.id,
            "undo": "none" if lost else outcomes[0].value,
            "must_be_complete": bool(lost) or not partial,
        }

    def _within(
        self, session_id: str | None, command: str, call: Mapping[str, Any], *, weight_version: str | None, flush: bool
    ) -> dict[str, Any]:
        """One call of the open session."""
        session = self._owned(session_id)
        if session.spoiled is not None:
            raise _spoiled(session)
        received = self._update(command, call)
        session.weight_version = weight_version or session.weight_version
        session.flush |= flush
        return {**SUCCESS, **received}

    def _update(self, command: str, call: Mapping[str, Any]) -> dict[str, Any]:
        outcomes = self._ask(command, **call)
        error = first_error(outcomes)
        if error is not None:
            self._ask("undo_last_call")
            session = self._state.session
            if session is not None:
                session.spoiled = error.message
            raise error
        return dict(outcomes[0].value)

    def _whole(
        self, command: str, call: Mapping[str, Any], *, weight_version: str | None, flush: bool
    ) -> dict[str, Any]:
        """One call that is a session of its own, which has just begun."""
        session = self._owned(None)
        session.weight_version = weight_version
        try:
            received = self._update(command, call)
        except EngineError:
            self._abort("its only call was refused")
            raise
        return {**self._end(None, flush=flush), **received}

    def _end(self, manifest: Mapping[str, Any] | None, *, flush: bool) -> dict[str, Any]:
        outcomes = self._ask("verify", manifest=None if manifest is None else dict(manifest))
        if first_error(outcomes) is not None:
            self._abort("it could not be verified")
            values_of(outcomes)
        verified: dict[str, Any] = outcomes[0].value
        if any(outcome.value != verified for outcome in outcomes):
            self._abort("the ranks received different weights")
            raise EngineFaultError(
                "the ranks received different weights; the update was undone",
                code="ranks_disagree",
                hint="Send it again.",
            )
        self._commit(flush=flush)
        return self._committed(verified)

    def _commit(self, *, flush: bool) -> None:
        session = self._state.session
        assert session is not None
        after = session.after
        outcomes = self._ask("commit", flush=flush, empty_cache=after.empty_cache, recapture=after.recapture)
        if first_error(outcomes) is None:
            return
        everywhere = all(outcome.error is not None for outcome in outcomes)
        undone = everywhere and first_error(self._ask("undo")) is None
        self._close(None if undone else "a commit failed on some ranks, or could not be undone")
        values_of(outcomes)

    def _committed(self, verified: Mapping[str, Any]) -> dict[str, Any]:
        session = self._state.session
        assert session is not None
        if session.weight_version is not None:
            self._engine.weight_version = session.weight_version
        touched = tuple(verified["touched"])
        self._state.mend(touched)
        self.count += 1
        version = self._engine.weight_version
        after = session.after
        self.history.append(
            WeightUpdate(self.count, version, touched, verified["tensors"], verified["digest"], after.token_step)
        )
        paused = len(self._engine.request_ids()) if self._state.pause is not None else 0
        if after.keep_pause and self._state.pause is None:
            self._state.pause = PauseMode.IN_PLACE
        self._close(None)
        return {**SUCCESS, "weight_version": version, "digest": verified["digest"], "num_paused_requests": paused}

    def _abort(self, reason: str) -> None:
        """Undoes the open session on every rank, and closes it."""
        session = self._state.session
        assert session is not None
        failed = first_error(self._ask("undo"))
        if failed is not None:
            self._close(f"an update could not be undone: {failed.message}")
        elif not session.can_undo:
            self._close(f"an update after a release without backup failed ({reason})")
        else:
            self._close(None)

    def _close(self, inconsistent: str | None) -> None:
        session, self._state.session = self._state.session, None
        if inconsistent is not None and session is not None:
            logger.error("the weights are inconsistent: %s", inconsistent)
            self._state.inconsistent = inconsistent
            self._state.broken |= frozenset(session.modules)
        self._state.apply()

    def _watch(self, session: OpenSession) -> None:
        """A session whose controller is silent for too long is undone."""

        def expire() -> None:
            logger.error("weight-update session %s was silent for %g s; it is undone", session.id, self._timeout_s)
            self._abort("its controller went silent")

        self._loop.watch(
            Pending(
                ready=lambda: self._state.session is not session,
                finish=lambda: None,
                deadline=lambda: session.last_call + self._timeout_s,
                expired=expire,
            )
        )

    def _refuse_second(self, session_id: str | None) -> None:
        session = self._state.session
        if session is None:
            return
        if session.owner is not None and session.owner != session_id:
            raise _foreign(session)
        raise WeightSessionError("a weight-update session is already open; call end_weight_update() first")

    def _owned(self, session_id: str | None) -> OpenSession:
        session = self._state.session
        if session is None:
            raise WeightSessionError("no weight-update session is open; call begin_weight_update() first")
        if session.owner != session_id and (session.owner is not None or session_id != session.id):
            raise _foreign(session)
        session.last_call = time.monotonic()
        return session

    def _modules(self, selector: str, target_modules: Sequence[str] | None) -> list[str]:
        if selector not in ("target", "draft", "all"):
            raise InvalidRequestError(
                f"unknown selector {selector!r}", field="selector", value=selector, hint="Known: target, draft, all."
            )
        return list(target_modules) if target_modules else list(self._target.default_modules(selector))

    def _ask(self, name: str, /, **arguments: Any) -> list[Outcome]:
        return self._engine.everywhere(RankCommand(name, arguments))


def _spoiled(session: OpenSession) -> WeightSessionError:
    return WeightSessionError(
        f"an update of this session was refused ({session.spoiled}), so it can't be committed",
        code="session_spoiled",
        hint="Begin again and send all weights.",
    )


def _foreign(session: OpenSession) -> ConflictError:
    return ConflictError(
        f"the weight-update session that is open belongs to {session.owner or session.id!r}",
        code="foreign_session",
        field="session_id",
        value=session.owner or session.id,
        hint="Wait until it has ended, or send its session_id.",
    )


def _then(value: object, following: Callable[[object], object]) -> object:
    """What `following` makes of the value, now or when it is there."""
    if not isinstance(value, Pending):
        return following(value)
    pending = value
    return Pending(pending.ready, lambda: following(pending.finish()), pending.deadline, pending.expired)
