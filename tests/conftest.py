"""One real service for the whole session: an HTTP process, and its engine process with the tiny SD3 pipeline.

Model libraries are imported in functions: the process that hands out tests to others needs none, and in the others
collections of garbage are off while tests, and with them the libraries, are imported.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from diffusion_rl.client import RolloutClient

REPOSITORY = Path(__file__).parent.parent
START_TIMEOUT_S = 120.0
# Files that take longest, in the order in which processes that share the tests begin them: none of them ends alone.
LONGEST = [
    *("refit_campaign", "parallel", "tensor_parallel", "flow_grpo", "grpo_arithmetic", "families", "benchmarks"),
    *("compile", "wan", "offload", "http_ranks", "z_image", "flux", "certify", "verify", "lora", "readme"),
    "http_limits",
]
LIMITS = {"max_num_outputs_per_prompt": 16, "max_num_inference_steps": 1000, "max_pixels": 512 * 512}
SERVE = """
import json, sys
from diffusion_rl.config import EngineConfig, ParallelConfig, ServerConfig
from diffusion_rl.params import Limits
from engine_control.config import ControlConfig
from engine_control.start import without_collections
with without_collections():
    from diffusion_rl.server.app import serve
engine, limits, server = json.loads(sys.argv[1])
parallel = ParallelConfig(**engine.pop("parallel", {}))
control = ControlConfig(**engine.pop("control", {}))
serve(EngineConfig(**engine, parallel=parallel, control=control, limits=Limits(**limits)), ServerConfig(**server))
"""
SERVE_LLM = """
import json, sys
from engine_control.config import ControlConfig
from engine_control.start import without_collections
from llm_runtime.config import LLMConfig, ServerConfig
with without_collections():
    from llm_runtime.server.app import serve
engine, server = json.loads(sys.argv[1])
serve(LLMConfig(**engine, control=ControlConfig(enable_memory_saver=True)), ServerConfig(**server))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order."""
    place = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@dataclass
class Service:
    """A running service, as its users see it."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.base_url, timeout=120)

    def client(self, wire: str = "safetensors") -> RolloutClient:
        from diffusion_rl.client import RolloutClient

        return RolloutClient(self.base_url, timeout=120, wire=wire)  # type: ignore[arg-type]

    def generate(self, body: object, **headers: str) -> httpx.Response:
        return self.http.post("/rollout/generate", json=body, headers={"accept": "application/json", **headers})

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = self.http.get("/server_info").json()["stats"]
        return stats

    def engine_process_id(self) -> int:
        return int(self.http.get("/server_info").json()["engine"]["process_id"])

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False


def pytest_configure(config: pytest.Config) -> None:
    """No test writes to the home folder, and engines (of other processes too) find what earlier ones have probed.

    Set before any test module is imported, for some copy the environment then.
    """
    folder = tempfile.TemporaryDirectory(prefix="diffusion-rl-verdicts-")
    config.add_cleanup(folder.cleanup)
    os.environ["DIFFUSION_RL_VERDICT_CACHE"] = folder.name
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on collections walk what tests make, not what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_models

    return tiny_models.save(tiny_models.sd3_pipeline(), tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="session")
def service(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Speaks msgpack to clients that name no encoding."""
    engine: dict[str, object] = {"model_path": str(tiny_sd3_folder)}
    server: dict[str, object] = {"port": free_port(), "rollout_wire": "msgpack", "served_model_name": "tiny-sd3"}
    log = tmp_path_factory.mktemp("service") / "log.txt"
    started = start_service(engine, server, log)
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


@pytest.fixture(scope="session")
def tiny_llm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_llms import make_tiny_llm

    return make_tiny_llm(tmp_path_factory.mktemp("models") / "llm")


@pytest.fixture(scope="session")
def llm_service(tiny_llm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Computes four sequences at a time."""
    log = tmp_path_factory.mktemp("llm-service") / "log.txt"
    engine: dict[str, object] = {"model_path": str(tiny_llm_folder), "max_running_requests": 4}
    started = start_llm_service(engine, {"served_model_name": "tiny-llm"}, log)
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


@pytest.fixture
def embedded_service(tmp_path: Path) -> Iterator[str]:
    """Address of a service of the embedded model, configured by nothing but its port."""
    started = start_service({}, {"port": free_port()}, tmp_path / "log.txt")
    started.wait_until(started.healthy)
    yield started.base_url
    stop_service(started)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_service(engine: dict[str, object], server: dict[str, object], log: Path) -> Service:
    """Starts a service in a process of its own, and doesn't wait for it."""
    return _start(SERVE, [engine, LIMITS, server], int(str(server["port"])), log)


def start_llm_service(engine: dict[str, object], server: dict[str, object], log: Path) -> Service:
    """As `start_service`, of a language model, on a port of its own."""
    port = free_port()
    return _start(SERVE_LLM, [engine, {**server, "port": port}], port, log)


def _start(script: str, arguments: list[object], port: int, log: Path) -> Service:
    roots = [str(REPOSITORY), str(REPOSITORY / "kernels")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        )
    return Service(f"http://127.0.0.1:{port}", process, log)


def stop_service(service: Service) -> None:
    service.http.close()
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(30)
