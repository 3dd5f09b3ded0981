"""The engine of a training loop, in a process of its own.

`LoopEngine` is the loop's end. A shape of random weights (`full_size`) on one rank or several, with its control layer;
what it is asked is answered in order.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from benchmarks import measure
from benchmarks.full_size import load
from diffusion_rl.config import EngineConfig
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.params import params_from_mapping
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.startup import start_ranks
from diffusion_rl.sample import RolloutSample
from diffusion_rl.server.rows import sample_from_plain
from engine_control.child import connection_from_descriptor, start_child
from engine_control.config import engine_environment
from engine_control.step_loop import StepLoop
from engine_control.wire import PeerClosedError, receive_message, send_message

FOLLOWER = "benchmarks.full_size_follower"
WAIT_S = 600.0


class LoopEngine:
    """A started engine; it ends with `close`."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts its processes and waits for none; `answer` does."""
        environment = engine_environment(layout_of(config.parallel).ranks)
        self._process, self._connection = start_child("benchmarks.loop_engine", environment)
        self._connection.settimeout(WAIT_S)
        send_message(self._connection, asdict(config))

    def answer(self) -> Any:
        """What it says to what it was told, or after its start of its exactness.

        Raises:
            RuntimeError: it could not do it, or is gone.
        """
        try:
            found = receive_message(self._connection)
        except PeerClosedError as error:
            raise RuntimeError(f"the engine ended with exit code {self._process.wait()}") from error
        if "error" in found:
            raise RuntimeError(f"the engine: {found['error']}")
        return found["value"]

    def tell_call(self, name: str, **arguments: Any) -> None:
        """Has it run a command of its control layer."""
        send_message(self._connection, {"call": name, "arguments": arguments})

    def call(self, name: str, **arguments: Any) -> Any:
        self.tell_call(name, **arguments)
        return self.answer()

    def roll_out(self, requests: Sequence[Mapping[str, Any]]) -> tuple[list[list[RolloutSample]], float]:
        """The requests' samples, all of them in flight together, and the seconds that the engine had them."""
        send_message(self._connection, {"requests": requests})
        found = self.answer()
        return [[sample_from_plain(plain) for plain in group] for group in found["groups"]], found["seconds"]

    def close(self) -> None:
        """Afterwards its processes are gone."""
        self._connection.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    connection = connection_from_descriptor(int(sys.argv[1]))
    config = msgspec.convert(receive_message(connection), EngineConfig)
    try:
        family, exactness, ranks = start_ranks(config, load=load, follower=FOLLOWER)
        engine = RolloutEngine(family, config, exactness=exactness, ranks=ranks)
    except Exception as error:
        send_message(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    loop = StepLoop(engine)
    engine.controlled_by(loop)
    send_message(connection, {"value": engine.exactness.describe()})
    try:
        while True:
            asked = receive_message(connection)
            try:
                reply = {"value": _done(loop, asked)}
            except Exception as error:  # the benchmark says what has failed
                reply = {"error": f"{type(error).__name__}: {error}"}
            send_message(connection, reply)
    except PeerClosedError:
        engine.close()


def _done(loop: StepLoop[Any, Any], asked: Mapping[str, Any]) -> Any:
    if "call" in asked:
        answer = loop.call(asked["call"], asked["arguments"])
        loop.run_until_idle()
        return answer.result()
    began = measure.now()
    requests = enumerate(asked["requests"])
    waiting = [loop.submit(f"request-{index}", params_from_mapping(fields)) for index, fields in requests]
    loop.run_until_idle()
    return {"groups": [one.result() for one in waiting], "seconds": measure.now() - began}
