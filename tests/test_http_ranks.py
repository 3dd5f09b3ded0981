"""A service of two ranks, as its users see it: the same bits, and what happens when a rank dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Service, free_port, start_service, stop_service
from equality import assert_same_bits

from diffusion_rl import RolloutPipeline
from diffusion_rl.config import EngineConfig
from engine_control.errors import EngineDiedError, RequestAbortedError

FIELDS: dict[str, Any] = {
    "prompt": "a red ball",
    "seed": 4,
    "num_outputs_per_prompt": 2,
    "num_inference_steps": 3,
    "height": 64,
    "width": 64,
    "rollout_return_dit_trajectory": True,
}
LONG = {**FIELDS, "num_inference_steps": 1000}


@pytest.fixture(scope="module")
def two_ranks(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    engine: dict[str, object] = {"model_path": str(tiny_sd3_folder), "parallel": {"sp_degree": 2}}
    started = start_service(engine, {"port": free_port()}, tmp_path_factory.mktemp("service") / "log.txt")
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


def test_two_ranks_over_http_have_the_bits_of_one_device_in_python(two_ranks: Service, tiny_sd3_folder: Path) -> None:
    expected = RolloutPipeline.from_config(EngineConfig(str(tiny_sd3_folder)))(**FIELDS)
    for wire in ("json", "msgpack", "safetensors"):
        for one, other in zip(expected, two_ranks.client(wire).generate(**FIELDS), strict=True):
            assert_same_bits(one, other)


def test_server_info_shows_every_rank_and_what_it_has_done(two_ranks: Service) -> None:
    two_ranks.client().generate(**FIELDS)
    parallel = two_ranks.http.get("/server_info").json()["parallel"]
    assert (parallel["sp_degree"], parallel["ring_degree"]) == (2, 1)
    tokens = [rank["tokens"] for rank in parallel["ranks"]]
    assert tokens[0] == tokens[1] > 0
    assert all(rank["bytes_sent"] > 0 for rank in parallel["ranks"])


@pytest.mark.parametrize("dead", ["the follower", "rank 0"])
def test_a_dead_rank_fails_waiting_requests_at_once_and_the_group_comes_back_with_the_same_bits(
    two_ranks: Service, dead: str
) -> None:
    before = two_ranks.client().generate(**FIELDS)
    outcome: list[object] = []

    def roll_out() -> None:
        try:
            two_ranks.client().generate(**LONG)
        except EngineDiedError as error:
            outcome.append(error)

    waiting = [threading.Thread(target=roll_out) for _ in range(3)]
    for thread in waiting:
        thread.start()
    two_ranks.wait_until(lambda: two_ranks.stats()["samples_running"] > 0)
    follower, rank_0 = _follower_of(two_ranks), two_ranks.engine_process_id()
    os.kill(follower if dead == "the follower" else rank_0, signal.SIGKILL)
    killed = time.monotonic()
    for thread in waiting:
        thread.join(5)
    assert time.monotonic() - killed < 5
    assert [type(error) for error in outcome] == [EngineDiedError] * 3
    assert two_ranks.http.get("/health").status_code == 503
    two_ranks.wait_until(two_ranks.healthy)
    for one, other in zip(before, two_ranks.client().generate(**FIELDS), strict=True):
        assert_same_bits(one, other)
    two_ranks.wait_until(lambda: not Path(f"/proc/{follower}").exists() and not Path(f"/proc/{rank_0}").exists())


def test_an_aborted_request_frees_its_samples_on_every_rank(two_ranks: Service) -> None:
    before = two_ranks.client().generate(**FIELDS)
    thread = threading.Thread(target=_roll_out_until_aborted, args=(two_ranks,))
    thread.start()
    two_ranks.wait_until(lambda: two_ranks.stats()["samples_running"] > 0)
    two_ranks.http.post("/abort_request", json={"rid": "leaves"})
    thread.join(5)
    assert two_ranks.stats()["samples_running"] == 0
    for one, other in zip(before, two_ranks.client().generate(**FIELDS), strict=True):
        assert_same_bits(one, other)


def test_a_second_server_on_the_same_port_says_so_before_it_loads_anything(two_ranks: Service, tmp_path: Path) -> None:
    port = int(two_ranks.base_url.rsplit(":", 1)[1])
    second = start_service({"model_path": "embedded"}, {"port": port}, tmp_path / "log.txt")
    assert second.process.wait(60) != 0
    log = second.log.read_text()
    assert f"can't listen on 127.0.0.1 port {port}: another program does" in log
    assert "Loading" not in log
    assert two_ranks.healthy()


def _follower_of(service: Service) -> int:
    process_id: int = service.http.get("/server_info").json()["parallel"]["ranks"][1]["process_id"]
    return process_id


def _roll_out_until_aborted(service: Service) -> None:
    with pytest.raises(RequestAbortedError):
        service.client().generate(**LONG, rid="leaves")
