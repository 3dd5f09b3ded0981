"""A real `diffusion-rl serve` as a child process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine_control.config import engine_environment
from engine_control.service_process import ServiceProcess, running

__all__ = ["ServiceProcess", "running_service"]


@contextmanager
def running_service(model: str, *, port: int, log: Path, arguments: Sequence[str] = ()) -> Iterator[ServiceProcess]:
    """A service that is stopped when the block ends: well, by an error, by Ctrl-C or by SIGTERM. Port 0: a free one is
    taken. `arguments` are further ones of `serve`."""

    def start() -> ServiceProcess:
        environment = engine_environment()
        return ServiceProcess(
            "diffusion_rl.cli", model, port=port, log=log, environment=environment, arguments=arguments
        )

    with running(start) as service:
        yield service
