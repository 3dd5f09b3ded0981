"""The loop that both engines run, with a real engine that counts down."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from countdown_engine import CountdownEngine

from engine_control.errors import (
    EngineFaultError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestAbortedError,
)
from engine_control.step_loop import StepLoop


def make_loop() -> tuple[CountdownEngine, StepLoop[dict[str, object], dict[str, object]]]:
    engine = CountdownEngine()
    return engine, StepLoop(engine)


def test_requests_share_steps_and_finish_when_they_are_done() -> None:
    engine, loop = make_loop()
    answers = [loop.submit(name, {"steps": steps}) for name, steps in (("a", 3), ("b", 1), ("c", 2))]
    loop.run_until_idle()
    assert [answer.result()["step"] for answer in answers] == [3, 1, 2]
    assert engine.steps == 3


def test_a_command_runs_between_two_steps_in_the_order_of_posting() -> None:
    engine, loop = make_loop()
    loop.register("note", lambda arguments: (engine.steps, arguments["tag"]))
    first = loop.call("note", {"tag": "before"})
    request = loop.submit("a", {"steps": 2})
    request.add_done_callback(lambda done: notes.append(loop.call("note", {"tag": "after"})))
    notes: list[object] = []
    loop.run_until_idle()
    assert first.result() == (0, "before")
    assert notes[0].result() == (2, "after")  # type: ignore[attr-defined]
    assert loop_answer(loop, "stats") == {"steps": 2.0, "requests": 0.0}


def loop_answer(loop: StepLoop[dict[str, object], dict[str, object]], name: str) -> object:
    answer = loop.call(name)
    loop.run_until_idle()
    return answer.result()


def test_an_aborted_request_is_in_no_further_step() -> None:
    engine, loop = make_loop()
    kept, dropped = loop.submit("kept", {"steps": 2}), loop.submit("dropped", {"steps": 5})
    loop.submit("trigger", {"steps": 1}).add_done_callback(lambda done: loop.abort("dropped"))
    loop.run_until_idle()
    assert engine.stepped == [("kept", "dropped", "trigger"), ("kept",)]
    assert kept.result()["step"] == 2
    with pytest.raises(RequestAbortedError):
        dropped.result()
    unknown = loop.abort("never there")
    loop.run_until_idle()
    assert unknown.result() is False


def test_a_refused_request_changes_nothing_for_the_others() -> None:
    _, loop = make_loop()
    good, bad = loop.submit("good", {"steps": 1}), loop.submit("bad", {"steps": 0})
    broken = loop.submit("broken", {})
    loop.run_until_idle()
    assert good.result()["step"] == 1
    with pytest.raises(InvalidRequestError, match="at least 1"):
        bad.result()
    with pytest.raises(EngineFaultError, match="KeyError"):
        broken.result()


def test_an_id_in_use_is_refused_and_may_be_used_again_later() -> None:
    _, loop = make_loop()
    first, second = loop.submit("same", {"steps": 1}), loop.submit("same", {"steps": 1})
    loop.run_until_idle()
    assert first.result()["step"] == 1
    with pytest.raises(InvalidRequestError) as caught:
        second.result()
    assert caught.value.code == "duplicate_request_id"
    third = loop.submit("same", {"steps": 1})
    loop.run_until_idle()
    assert third.result()["step"] == 2


def test_a_fault_in_a_step_fails_what_is_in_the_engine_and_the_loop_goes_on() -> None:
    _, loop = make_loop()
    failed = [loop.submit("a", {"steps": 9}), loop.submit("b", {"steps": 1, "fault": True})]
    loop.run_until_idle()
    for answer in failed:
        with pytest.raises(EngineFaultError, match="ZeroDivisionError: a fault in the model"):
            answer.result()
    after = loop.submit("c", {"steps": 1})
    loop.run_until_idle()
    assert after.result()["step"] == 2


def test_an_error_of_the_device_answers_everybody_and_ends_the_loop() -> None:
    _, loop = make_loop()
    answer = loop.submit("a", {"steps": 1, "fault": "device"})
    with pytest.raises(torch.AcceleratorError):
        loop.run()
    with pytest.raises(EngineFaultError, match="illegal memory access"):
        answer.result(0)


def test_an_unknown_command_and_a_failing_one_answer_with_errors() -> None:
    _, loop = make_loop()
    loop.register("fail", lambda arguments: 1 / 0)
    unknown, failing = loop.call("nonsense"), loop.call("fail")
    loop.run_until_idle()
    with pytest.raises(InvalidRequestError, match="nonsense"):
        unknown.result()
    with pytest.raises(EngineFaultError, match="ZeroDivisionError"):
        failing.result()


def test_an_idle_loop_sleeps_and_a_stopped_one_answers_everybody() -> None:
    _, loop = make_loop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.submit("warm", {"steps": 1}).result(5)
    began = time.thread_time(), time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began[1] < 0.1
    slow = loop.submit("slow", {"steps": 1000, "sleep_s": 0.01})
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(EngineUnavailableError):
        slow.result(0)


def test_an_error_that_crosses_a_process_keeps_its_class_whatever_its_code() -> None:
    from engine_control.errors import RefitRefusedError, from_message

    error = from_message(RefitRefusedError("no", code="unknown_weight", field="w").to_message())
    assert type(error) is RefitRefusedError
    assert (error.code, error.field) == ("unknown_weight", "w")
