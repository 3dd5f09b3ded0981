"""The real service as a child process: started on a free port, waited for, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

from engine_control.errors import EngineUnavailableError

START_TIMEOUT_S = 180.0
STOP_GRACE_S = 20.0
POLL_S = 0.1
LOG_LINES = 15


class ServiceProcess:
    """A `serve` of our own. `url` is where it listens; `log` holds what it said."""

    def __init__(
        self,
        program: str,
        model: str,
        *,
        port: int,
        log: Path,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
    ) -> None:
        """Starts the module `program` with `serve` and returns at once. Port 0: a free one is taken. `environment` is
        all that it gets, and where this process finds its modules; `arguments` are further ones of `serve`."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.command = [sys.executable, "-m", program, "serve", model, "--port", str(self.port), *arguments]
        # The child must run the very code that this process runs, however it was found.
        whole = {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=whole
            )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Returns once `/health` answers 200.

        Raises:
            EngineUnavailableError: the service ended, or wasn't ready in time; with its last lines.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise self._failure(f"the service ended with exit code {self._process.returncode}")
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # it doesn't listen yet
                time.sleep(POLL_S)
        raise self._failure(f"the service was not ready after {START_TIMEOUT_S:g} s")

    def stop(self) -> None:
        """Afterwards the process is gone: by SIGTERM, which takes its engine along, or after a grace by SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failure(self, what: str) -> EngineUnavailableError:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return EngineUnavailableError(
            "\n".join([f"{what}; its last lines:", *lines]), hint=f"Read all it said in {self.log}."
        )


@contextmanager
def running(start: Callable[[], ServiceProcess]) -> Iterator[ServiceProcess]:
    """The service that `start` starts, stopped when the block ends: well, by an error, by Ctrl-C or by SIGTERM."""
    previous = signal.getsignal(signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signal.signal(signal.SIGTERM, _leave)
    try:
        service = start()
        try:
            yield service
        finally:
            service.stop()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that `finally` blocks run
