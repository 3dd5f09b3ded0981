"""The service under load and in trouble: it answers, forgets nobody's memory, and comes back."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import Service, free_port, start_service

from diffusion_rl.client import decode_json
from engine_control.errors import EngineDiedError

REQUEST = {"prompt": "a red square", "width": 64, "height": 64, "num_inference_steps": 3, "seed": 5}
LONG = {**REQUEST, "num_inference_steps": 1000}
HEAVY = {
    **REQUEST,
    "width": 192,
    "height": 192,
    "num_inference_steps": 7,
    "num_outputs_per_prompt": 4,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "guidance_scale": 1.0,
    "output_type": "latent",
}


def post(service: Service, body: object, *, read: bool = True) -> http.client.HTTPConnection | int:
    """Posts with as little interpreter work as possible: the reply's length, or the connection if it isn't read."""
    connection = http.client.HTTPConnection(service.base_url.removeprefix("http://"), timeout=120)
    headers = {"content-type": "application/json", "accept": "application/json"}
    connection.request("POST", "/rollout/generate", json.dumps(body), headers)
    if not read:
        return connection
    reply = connection.getresponse()
    assert reply.status == 200
    buffer, total = memoryview(bytearray(2**20)), 0
    while count := reply.readinto(buffer):
        total += count
    connection.close()
    return total


def memory_of(process_id: int) -> int:
    with open(f"/proc/{process_id}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_health_answers_in_time_while_eight_full_trajectories_are_computed_and_sent(service: Service) -> None:
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda seed=seed: sizes.append(post(service, {**HEAVY, "seed": seed})))  # type: ignore[misc,arg-type]
        for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    waits = []
    while any(thread.is_alive() for thread in threads):
        began = time.perf_counter()
        assert service.http.get("/health").status_code == 200
        waits.append(time.perf_counter() - began)
        time.sleep(0.005)
    assert len(sizes) == 8
    assert min(sizes) > 15_000_000
    waits.sort()
    assert waits[int(len(waits) * 0.99)] < 0.2, waits[-5:]


@pytest.mark.parametrize("count", [1, 6])
def test_a_client_that_leaves_frees_its_samples_within_a_step(service: Service, count: int) -> None:
    before = service.stats()
    connections = [post(service, {**LONG, "seed": i, "num_outputs_per_prompt": 2}, read=False) for i in range(count)]
    service.wait_until(lambda: service.stats()["samples_running"] == 2 * count)
    for connection in connections:
        connection.close()  # type: ignore[union-attr]
    service.wait_until(lambda: service.stats()["requests_aborted"] == before["requests_aborted"] + count, timeout_s=5)
    stats = service.stats()
    assert (stats["samples_running"], stats["requests_in_engine"]) == (0, 0)
    assert service.stats()["steps"] == stats["steps"]  # nothing is computed for nobody
    assert service.generate(REQUEST).status_code == 200


def test_memory_stays_flat_over_many_large_replies_and_clients_that_leave(service: Service) -> None:
    body = {**HEAVY, "num_inference_steps": 3}

    def round_of_requests() -> None:
        for _ in range(2):
            post(service, body)
        connection = post(service, body, read=False)
        connection.sock.recv(100_000)  # type: ignore[union-attr]
        connection.close()  # type: ignore[union-attr]

    processes = (service.process.pid, service.engine_process_id())
    for _ in range(3):
        round_of_requests()
    before = [memory_of(process) for process in processes]
    for _ in range(3):
        round_of_requests()
    grown = [memory_of(process) - start for process, start in zip(processes, before, strict=True)]
    assert max(grown) < 24 * 2**20, grown  # nine replies of about 10 MB


def test_health_generate_runs_a_real_rollout(service: Service) -> None:
    before = service.stats()["samples_finished"]
    assert service.http.get("/health_generate").json() == {"status": "ok"}
    assert service.stats()["samples_finished"] == before + 1


def test_information_routes_say_what_is_served(service: Service) -> None:
    info = service.http.get("/server_info").json()
    assert info["served_model_name"] == "tiny-sd3"
    assert info["pipeline_class"] == "StableDiffusion3Pipeline"
    assert (info["server"]["rollout_wire"], info["limits"]["max_num_outputs_per_prompt"]) == ("msgpack", 16)
    (model,) = service.http.get("/v1/models").json()["data"]
    assert (model["id"], model["task_type"]) == ("tiny-sd3", "T2I")
    assert service.http.get("/model_info").json()["model_type"] == "diffusion"
    assert service.http.get("/liveness").json() == {"status": "ok"}
    schema = service.http.get("/openapi.json").json()
    body = schema["paths"]["/rollout/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "seeds", "rollout_sde_step_indices", "extra_sampling_params"} <= set(body["properties"])
    assert service.http.get("/docs").status_code == 200


def test_metrics_count_requests_and_steps_with_bounded_labels(service: Service) -> None:
    service.generate(REQUEST)
    service.generate({**REQUEST, "prompt": ""})
    for i in range(20):
        service.http.get(f"/invented-{i}")
    page = service.http.get("/metrics").text
    assert 'diffusion_rl_http_requests_total{route="/rollout/generate",status="400"}' in page
    assert 'diffusion_rl_http_requests_total{route="/rollout/generate",status="200"}' in page
    assert "invented" not in page
    for name in ("steps_total", "evaluations_total", "samples_finished_total", "samples_waiting", "batch_occupancy"):
        assert f"\ndiffusion_rl_engine_{name} " in page, name
    assert "\ndiffusion_rl_rollouts_in_flight 0.0" in page
    assert "\ndiffusion_rl_engine_up 1.0" in page
    assert 'diffusion_rl_http_request_seconds_bucket{le="0.1",route="/health' in page


def test_a_killed_engine_fails_its_requests_comes_back_and_computes_the_same_bits(service: Service) -> None:
    expected = decode_json(service.generate(REQUEST).content)[0]
    outcome: list[object] = []

    def roll_out() -> None:
        try:
            service.client().generate(**LONG)
        except EngineDiedError as error:
            outcome.append(error)

    thread = threading.Thread(target=roll_out)
    thread.start()
    service.wait_until(lambda: service.stats()["samples_running"] > 0)
    os.kill(service.engine_process_id(), signal.SIGKILL)
    thread.join(5)
    assert isinstance(outcome[0], EngineDiedError)
    assert outcome[0].code == "engine_died"
    health = service.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
    assert "SIGKILL" in health.json()["error"]
    refused = service.generate(REQUEST)
    assert (refused.status_code, refused.json()["code"]) == (503, "engine_unavailable")
    assert refused.headers["retry-after"] == "1"
    assert service.http.get("/health_generate").status_code == 503
    assert service.http.get("/liveness").status_code == 200
    service.wait_until(service.healthy)
    again = decode_json(service.generate(REQUEST).content)[0]
    assert torch.equal(again["generated_output"], expected["generated_output"])
    assert torch.equal(again["rollout_log_probs"], expected["rollout_log_probs"])
    assert "diffusion_rl_engine_restarts_total 1.0" in service.http.get("/metrics").text


def test_a_model_that_is_not_there_ends_the_service_with_the_engines_own_words(tmp_path: Path) -> None:
    started = start_service({"model_path": str(tmp_path / "nothing")}, {"port": free_port()}, tmp_path / "log.txt")
    assert started.process.wait(60) not in (0, -signal.SIGTERM)
    log = started.log.read_text()
    assert "the engine did not start" in log
    assert "nothing" in log.split("its last lines:")[1]
