"""sglang-router in front of two services. It isn't among the test requirements (30 MB): `pip install sglang-router`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Service, free_port, start_llm_service, stop_service

pytest.importorskip("sglang_router", reason="sglang-router is not installed")

BODY: dict[str, Any] = {
    "input_ids": [1, 2, 3],
    "return_logprob": True,
    "sampling_params": {"max_new_tokens": 8, "sampling_seed": 42, "stop": None, "no_stop_trim": True},
}


@pytest.fixture
def second(tiny_llm_folder: Path, tmp_path: Path) -> Iterator[Service]:
    started = start_llm_service(
        {"model_path": str(tiny_llm_folder)}, {"served_model_name": "tiny-llm"}, tmp_path / "log.txt"
    )
    started.wait_until(started.healthy)
    yield started
    if started.process.poll() is None:
        stop_service(started)


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware", "power_of_two"])
def test_a_router_finds_its_workers_and_goes_on_when_one_is_gone(
    llm_service: Service, second: Service, policy: str, tmp_path: Path
) -> None:
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--policy", policy]
    options += ["--worker-urls", llm_service.base_url, second.base_url]
    with (tmp_path / "router.txt").open("wb") as output:
        router = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _wait_until(lambda: [w["model_id"] for w in _workers(http)] == ["tiny-llm"] * 2)
            alone = llm_service.http.post("/generate", json=BODY).json()
            for _ in range(4):
                row = http.post("/generate", json=BODY).json()
                assert row["output_ids"] == alone["output_ids"]
                assert row["meta_info"]["output_token_logprobs"] == alone["meta_info"]["output_token_logprobs"]
            assert http.post("/generate", json={**BODY, "stream": True}).text.endswith("data: [DONE]\n\n")
            chat = {"model": "tiny-llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["finish_reason"] in (
                "length",
                "stop",
            )
            for path in ("/health", "/v1/models", "/get_model_info", "/get_loads"):
                assert http.get(path).status_code == 200, path
            assert http.post("/flush_cache").json()["workers_flushed"] == 2
            second.process.kill()
            second.process.wait()
            assert [http.post("/generate", json=BODY).status_code for _ in range(6)] == [200] * 6
    finally:
        router.terminate()
        router.wait(30)


def _workers(http: httpx.Client) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = http.get("/workers").json()["workers"]
    except httpx.TransportError:
        return []
    return [worker for worker in found if worker["is_healthy"]]


def _wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
