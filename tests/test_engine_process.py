"""The supervisor and the engine process: crashes, restarts, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from countdown_engine import CountdownEngine

from engine_control.errors import (
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestAbortedError,
)
from engine_control.process import EngineState, EngineSupervisor, RestartPolicy
from engine_control.step_loop import StepLoop
from engine_control.wire import PeerClosedError, receive_message
from engine_control.worker import EngineWorker

REPOSITORY = Path(__file__).parent.parent
QUICK = RestartPolicy(start_timeout_s=60, max_restarts=1, first_delay_s=0.01)


def supervised(
    scenario: Callable[[EngineSupervisor], Awaitable[None]], config: bytes = b"{}", policy: RestartPolicy = QUICK
) -> None:
    async def run() -> None:
        supervisor = EngineSupervisor("countdown_engine", config, environment=os.environ, policy=policy)
        supervisor.start()
        try:
            await scenario(supervisor)
        finally:
            await supervisor.stop()

    asyncio.run(run())


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_requests_aborts_and_calls_reach_the_engine_and_stopping_ends_its_process() -> None:
    processes = []

    async def scenario(supervisor: EngineSupervisor) -> None:
        with pytest.raises(EngineUnavailableError, match="starting"):
            await supervisor.submit("early", {"steps": 1})
        await supervisor.wait_ready()
        assert supervisor.description["config"] == '{"a": 1}'
        assert supervisor.description["kept"] > 100_000  # of torch: no collection walks them
        assert supervisor.description["collects"]
        tensor = torch.arange(300_000)
        result = await supervisor.submit("a", {"steps": 2, "tensor": tensor})
        assert result["step"] == 2
        assert torch.equal(result["echo"], tensor)
        with pytest.raises(InvalidRequestError) as caught:
            await supervisor.submit("b", {"steps": 0})
        assert (caught.value.field, caught.value.value) == ("steps", 0)
        with pytest.raises(InvalidRequestError, match="can't be sent"):
            await supervisor.submit("unsendable", {"steps": object()})
        slow = asyncio.create_task(supervisor.submit("slow", {"steps": 1000, "sleep_s": 0.005}))
        await asyncio.sleep(0.05)
        assert await supervisor.abort("slow") is True
        with pytest.raises(RequestAbortedError):
            await slow
        left = asyncio.create_task(supervisor.submit("left", {"steps": 1000, "sleep_s": 0.005}))
        await asyncio.sleep(0.05)
        assert (await supervisor.call("stats"))["requests"] == 1
        left.cancel()
        await asyncio.sleep(0.05)
        assert (await supervisor.call("stats"))["requests"] == 0
        twin = asyncio.create_task(supervisor.submit("twin", {"steps": 1000, "sleep_s": 0.005}))
        await asyncio.sleep(0.05)
        other = asyncio.create_task(supervisor.submit("twin", {"steps": 1000}))
        await asyncio.sleep(0)
        other.cancel()  # its refusal hasn't come, and it must not take the one with its id along
        await asyncio.sleep(0.05)
        assert (await supervisor.call("stats"))["requests"] == 1
        twin.cancel()
        shown = [item async for item in supervisor.stream("shown", {"steps": 2, "show": "this", "sleep_s": 0.01})]
        assert shown[0] == {"left": 1, "shown": "this"}
        only = [item async for item in supervisor.stream("unshown", {"steps": 2, "show": "nonsense", "sleep_s": 0.01})]
        assert [set(item) for item in only] == [{"step", "echo", "size"}]  # the result, from an engine that goes on
        processes.append(supervisor.process_id)
        assert supervisor.restarts == 0

    began = time.monotonic()
    supervised(scenario, config=b'{"a": 1}')
    assert is_gone(processes[0])
    assert time.monotonic() - began < 30


def test_of_what_could_not_be_sent_yet_only_the_newest_is_kept() -> None:
    ours, theirs = socket.socketpair()
    worker: EngineWorker[dict[str, object], dict[str, object]] = EngineWorker(
        ours, read_request=dict, write_result=dict
    )
    show = worker._listener(7)
    for left in (3, 2, 1):
        show({"left": left})
    worker._outbox.put(None)
    worker._send(StepLoop(CountdownEngine()))
    ours.close()
    assert receive_message(theirs) == {"type": "update", "id": 7, "result": {"left": 1}}
    with pytest.raises(PeerClosedError):
        receive_message(theirs)
    theirs.close()


def test_a_crash_fails_what_waits_and_after_too_many_the_supervisor_gives_up() -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        await supervisor.wait_ready()
        bystander = asyncio.create_task(supervisor.submit("bystander", {"steps": 1000, "sleep_s": 0.01}))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDiedError, match=r"(?s)SIGKILL.*the last words of this engine"):
            await supervisor.submit("fatal", {"steps": 2, "die": True})
        with pytest.raises(EngineDiedError):
            await bystander
        assert supervisor.state is EngineState.RESTARTING
        await supervisor.wait_ready()
        assert supervisor.restarts == 1
        assert (await supervisor.submit("again", {"steps": 1}))["step"] == 1  # finished: the count begins anew
        for _ in range(2):
            with pytest.raises(EngineDiedError):
                await supervisor.submit("fatal", {"steps": 2, "die": True})
            if supervisor.state is EngineState.RESTARTING and supervisor.restarts == 1:
                await supervisor.wait_ready()
        with pytest.raises(EngineUnavailableError, match="given up after 2 crashes in a row"):
            await supervisor.wait_ready()
        assert supervisor.state is EngineState.FAILED

    supervised(scenario)


def test_a_failed_start_is_reported_with_the_engines_last_lines() -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        with pytest.raises(EngineUnavailableError, match=r"(?s)did not start.*no model at /nowhere"):
            await supervisor.wait_ready()
        assert supervisor.state is EngineState.FAILED
        assert supervisor.restarts == 0

    supervised(scenario, config=b"broken")


def test_a_process_that_can_not_be_started_is_a_failure_and_not_an_endless_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def scenario(supervisor: EngineSupervisor) -> None:
        with pytest.raises(EngineUnavailableError, match="no engine process can be started"):
            await supervisor.wait_ready()

    supervised(scenario)


PARENT = """
import asyncio, os, sys
from engine_control.process import EngineSupervisor
async def main():
    supervisor = EngineSupervisor("countdown_engine", b"{}", environment=os.environ)
    supervisor.start()
    await supervisor.wait_ready()
    task = asyncio.create_task(supervisor.submit("long", {"steps": 100000, "sleep_s": 0.01}))
    sys.stdout.write(f"{supervisor.process_id}\\n")
    sys.stdout.flush()
    await task
asyncio.run(main())
"""


def test_the_engine_process_ends_by_itself_when_its_parent_is_killed() -> None:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        engine = int(output.readline())
    assert not is_gone(engine)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while not is_gone(engine):
        assert time.monotonic() < deadline
        time.sleep(0.05)
