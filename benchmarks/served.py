"""A real service as a child process, for the benchmarks that measure through HTTP, and what /proc says of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diffusion_rl.cli.service_process import running_service
from diffusion_rl.client import RolloutClient


@dataclass(frozen=True)
class Served:
    """A service that takes requests: its address, and the ids of its HTTP process and its engine process."""

    url: str
    http_process: int
    engine_process: int


@contextmanager
def served(model: str, arguments: Sequence[str] = ()) -> Iterator[Served]:
    """Serves `model` until the block ends; `arguments` are further ones of `serve`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(model, port=0, log=Path(folder) / "service.log", arguments=arguments) as service,
    ):
        service.wait_ready()
        with RolloutClient(service.url) as client:
            engine = int(client.server_info()["engine"]["process_id"])
        yield Served(service.url, service.process_id, engine)


def resident_bytes(process: int, field: str = "VmRSS") -> int:
    """`VmRSS`, the memory that a process holds, or `VmHWM`, the most it ever held (since `reset_peak`)."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{process}/status has no {field}")


def reset_peak(process: int) -> None:
    """Afterwards `VmHWM` is what the process holds now."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def cpu_seconds(process: int) -> float:
    """CPU time of the process's living threads so far, in the scheduler's nanoseconds."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
