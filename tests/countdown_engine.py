"""A real engine of the step loop's contract without a model: a request counts down, one a step. `main`
serves it, as an engine process does."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import torch

from engine_control.child import connection_from_descriptor
from engine_control.engine import Finished, Progress
from engine_control.errors import EngineError, InvalidRequestError
from engine_control.step_loop import StepLoop
from engine_control.worker import EngineWorker


class CountdownEngine:
    """A request is `{"steps": n, ...}`; its result tells the number of the step that finished it. `fault` makes its
    next step raise, `die` kill the process, `sleep_s` take that long; `show` is shown after each, with how many
    are left, `nonsense` being nothing that can be sent. With `partial` an abort tells how many were left;
    if that is `broken`, it fails to."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, object]] = {}
        self.steps = 0
        self.stepped: list[tuple[str, ...]] = []

    def add_request(self, request_id: str, request: dict[str, object]) -> None:
        if not isinstance(request["steps"], int) or request["steps"] < 1:
            raise InvalidRequestError("must be at least 1", field="steps", value=request["steps"])
        self.requests[request_id] = dict(request)

    def abort_request(self, request_id: str) -> bool:
        return self.requests.pop(request_id, None) is not None

    def partial_result(self, request_id: str) -> dict[str, object] | None:
        request = self.requests.get(request_id)
        if request is None or not request.get("partial"):
            return None
        if request["partial"] == "broken":
            raise ZeroDivisionError("a fault in the model")
        return {"step": None, "left": request["steps"]}

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Finished[dict[str, object]] | Progress[dict[str, object]]]:
        self.steps += 1
        self.stepped.append(tuple(self.requests))
        finished: list[Finished[dict[str, object]] | Progress[dict[str, object]]] = []
        for request_id, request in list(self.requests.items()):
            if request.get("fault") == "device":
                raise torch.AcceleratorError("an illegal memory access was encountered")
            if request.get("fault"):
                raise ZeroDivisionError("a fault in the model")
            if request.get("die"):
                sys.stderr.write("the last words of this engine\n")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(request.get("sleep_s", 0.0)))  # type: ignore[arg-type]
            request["steps"] -= 1  # type: ignore[operator]
            if request["steps"] == 0:
                del self.requests[request_id]
                result = {"step": self.steps, "echo": request.get("tensor"), "size": torch.ones(self.steps)}
                finished.append(Finished(request_id, result=result))
            elif "show" in request:
                shown = object() if request["show"] == "nonsense" else request["show"]
                finished.append(Progress(request_id, {"left": request["steps"], "shown": shown}))
        return finished

    def fail_unfinished(self, error: EngineError) -> list[Finished[dict[str, object]]]:
        failed = [Finished[dict[str, object]](request_id, error=error) for request_id in self.requests]
        self.requests.clear()
        return failed

    def stats(self) -> dict[str, float]:
        return {"steps": float(self.steps), "requests": float(len(self.requests))}


def main() -> None:
    connection = connection_from_descriptor(int(sys.argv[1]))
    config = sys.stdin.read()
    if config == "broken":
        raise FileNotFoundError("no model at /nowhere")
    engine = CountdownEngine()
    worker: EngineWorker[dict[str, object], dict[str, object]] = EngineWorker(
        connection, read_request=dict, write_result=dict
    )
    worker.run(
        lambda: (StepLoop(engine), {"config": config, "kept": gc.get_freeze_count(), "collects": gc.isenabled()})
    )
