"""An app with the control routes over an engine that only writes down which commands it got: to test the routes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import uvicorn
from conftest import free_port
from fastapi import FastAPI

from engine_control.errors import EngineError
from engine_control.server.sglang import sglang_router
from engine_control.server.vllm import vllm_router

DONE = {"success": True, "message": "Success"}


class RecordingEngine:
    """Answers each command as the control layer would; `fails` and `answers` say otherwise, by the command's name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.completed: list[str] = []
        self.fails: dict[str, EngineError] = {}
        self.answers: dict[str, Any] = {}
        self.delay_s = 0.0
        self.released: list[str] = []
        self.paused = False
        self.state: dict[str, Any] = {"state": "ready", "generation": "ok", "reason": None}

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        self.calls.append((name, dict(arguments)))
        await asyncio.sleep(self.delay_s)
        self.completed.append(name)
        if name in self.fails:
            raise self.fails[name]
        if name in self.answers:
            return self.answers[name]
        return self._answer(name, arguments)

    async def control_state(self, wait_s: float) -> Mapping[str, Any] | None:
        return self.state

    def _answer(self, name: str, arguments: Mapping[str, Any]) -> Any:
        match name:
            case "pause_generation" | "continue_generation":
                self.paused = name == "pause_generation"
                return {"status": "ok", "message": "Generation paused successfully."}
            case "release_memory_occupation":
                self.released = arguments.get("tags") or ["kv_cache", "weights"]
                return {"success": True, "sleeping": True, "message": "", "bytes_freed": 7, "tags": self.released}
            case "resume_memory_occupation":
                self.released = [tag for tag in self.released if tag not in (arguments.get("tags") or self.released)]
                return {"success": True, "sleeping": bool(self.released), "message": "", "tags": self.released}
        simple = {
            "is_paused": self.paused,
            "is_sleeping": bool(self.released),
            "world_size": 2,
            "abort_requests": {"aborted": 3},
            "weight_info": {"weight_version": "7", "weight_update_count": 1, "history": []},
            "control_state": {**self.state, "released": self.released},
            "get_weights_by_name": [[1.0, 2.0]],
            "get_weights_checksum": {"transformer": "ab"},
            "weights_checker": {**DONE, "checksums": {"transformer.w": "cd"}},
            "update_weight_version": {**DONE, "new_version": arguments.get("new_version")},
        }
        return simple.get(name, DONE)


@contextlib.contextmanager
def serving(engine: RecordingEngine, kind: Literal["diffusion", "llm"]) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    app = FastAPI()
    app.include_router(sglang_router(engine, engine=kind))
    app.include_router(vllm_router(engine))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
