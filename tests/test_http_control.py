"""The control layer through real services of one and of two ranks: every transport, and trainers in their own order."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import tiny_models
import torch
from conftest import Service, free_port, start_service, stop_service

from diffusion_rl.client import RolloutClient
from diffusion_rl.sample import RolloutSample
from engine_control.checksum import module_sha256, tensor_sha256
from engine_control.errors import EngineError, InvalidRequestError
from engine_control.refit.backends.distributed import WeightSender
from engine_control.refit.backends.ipc import IpcSender
from engine_control.refit.backends.tensor import serialize_named_tensors

FIELDS: dict[str, Any] = {"seed": 3, "num_inference_steps": 3, "num_outputs_per_prompt": 2, "height": 64, "width": 64}
LONG: dict[str, Any] = {**FIELDS, "num_inference_steps": 100, "rollout_debug_mode": False}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def service(request: pytest.FixtureRequest, tiny_sd3_folder: Path, tmp_path_factory: Any) -> Iterator[Service]:
    engine: dict[str, object] = {
        "model_path": str(tiny_sd3_folder),
        "control": {"enable_memory_saver": True, "implicit_weight_sessions": True},
        "parallel": {"sp_degree": request.param},
    }
    started = start_service(engine, {"port": free_port()}, tmp_path_factory.mktemp("control") / "log.txt")
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


@pytest.fixture
def client(service: Service) -> Iterator[RolloutClient]:
    with service.client() as client:
        yield client
        client.continue_generation()
        client.resume_memory_occupation()
        client.refit(base(), weight_version="default")


def base() -> Weights:
    return dict(tiny_models.sd3_pipeline().transformer.state_dict())


def trained(scale: float = 1.02) -> Weights:
    return {name: tensor * scale for name, tensor in base().items()}


def equal(one: list[RolloutSample], other: list[RolloutSample]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.generated_output, b.generated_output) for a, b in pairs)  # type: ignore[arg-type]


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def by_client(client: RolloutClient, weights: Weights, tmp_path: Path) -> None:
    client.refit(weights, bucket_bytes=1 << 20)


def by_disk(client: RolloutClient, weights: Weights, tmp_path: Path) -> None:
    pipeline = tiny_models.sd3_pipeline()
    transformer = type(pipeline.transformer).from_config(pipeline.transformer.config)
    transformer.load_state_dict(weights)
    transformer.save_pretrained(tmp_path / "new", max_shard_size="2MB")
    client.update_weights_from_disk(str(tmp_path / "new"), target_modules=["transformer"])
    shutil.rmtree(tmp_path / "new")


def by_ipc(client: RolloutClient, weights: Weights, tmp_path: Path) -> None:
    client.begin_weight_update(target_modules=["transformer"])
    with IpcSender(half_bytes=1 << 20) as sender:
        for info in sender.batches(weights.items(), module="transformer"):
            client.update_weights_from_ipc(**info)
        client.end_weight_update()


def by_group(client: RolloutClient, weights: Weights, tmp_path: Path) -> None:
    ranks = client.world_size()
    sender = WeightSender("127.0.0.1", world_size=1 + ranks, backend="gloo", timeout_s=60)
    joined = in_thread(lambda: client.init_weights_update_group(**sender.init_info(rank_offset=1)))
    sender.join()
    joined.result()
    client.begin_weight_update(target_modules=["transformer"])
    for load_format, named in ((None, list(weights.items())[::2]), ("flattened_bucket", list(weights.items())[1::2])):
        told = sender.announce(named, load_format=load_format)
        with RolloutClient(str(client._client.base_url), timeout=60) as other:
            received = in_thread(lambda other=other, told=told: other.update_weights_from_distributed(**told))
            sender.send(named, load_format=load_format)
            received.result()
    client.end_weight_update()
    client.destroy_weights_update_group()
    sender.close()


def by_bucket(client: RolloutClient, weights: Weights, tmp_path: Path) -> None:
    client.begin_weight_update(target_modules=["transformer"])
    ranks = range(client.world_size())
    payloads = [serialize_named_tensors(weights.items(), load_format="flattened_bucket") for _ in ranks]
    texts = [str(payload) for payload in payloads]
    client.update_weights_from_serialized(texts, load_format="flattened_bucket", target_modules=["transformer"])
    client.end_weight_update()


WAYS = {"client": by_client, "disk": by_disk, "ipc": by_ipc, "group": by_group, "bucket": by_bucket}


@pytest.mark.parametrize("way", WAYS)
def test_every_transport_brings_the_same_bits(
    service: Service, client: RolloutClient, tmp_path: Path, way: str
) -> None:
    new = trained(1 + 0.01 * list(WAYS).index(way))
    before = client.generate("a red circle", **FIELDS)
    WAYS[way](client, new, tmp_path)
    assert client.get_weights_checksum(["transformer"]) == {"transformer": module_sha256(new)}
    after = client.generate("a red circle", **FIELDS)
    assert equal(before, after) == (way == "client")  # its scale is 1
    client.refit(new, weight_version="again")
    again = client.generate("a red circle", **FIELDS)
    assert equal(again, after)
    assert again[0].weight_versions == ("again",) * 3


def test_a_swap_between_two_steps_of_a_running_request_is_seen_in_its_versions(client: RolloutClient) -> None:
    running = in_thread(lambda: client.generate("a red circle", **LONG))
    with RolloutClient(str(client._client.base_url), timeout=60) as controller:
        until(lambda: controller.server_info()["stats"]["samples_running"] > 0)
        controller.refit(trained(), weight_version="v2", staged=True)
        versions = running.result()[0].weight_versions
        assert set(versions) == {"default", "v2"}
        assert list(versions) == sorted(versions)


def test_a_request_waits_for_the_end_of_a_pause_and_of_an_update(service: Service, client: RolloutClient) -> None:
    with RolloutClient(service.base_url, timeout=60) as controller:
        expected = client.generate("a red circle", **FIELDS)
        controller.pause_generation("retract")
        assert service.http.get("/ready").status_code == 503
        assert service.http.get("/health").status_code == 200
        waiting = in_thread(lambda: client.generate("a red circle", **FIELDS))
        until(lambda: controller.server_info()["stats"]["samples_waiting"] > 0)
        controller.begin_weight_update(target_modules=["transformer"])
        controller.continue_generation()
        time.sleep(0.05)
        assert not waiting.done()
        controller.update_weights_from_tensor(base(), target_modules=["transformer"])
        controller.end_weight_update(weight_version="v3")
        assert equal(waiting.result(), expected)
        assert waiting.result()[0].weight_versions == ("v3",) * 3


def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_asleep_it_says_so_and_awake_it_has_the_same_bits(service: Service, client: RolloutClient) -> None:
    client.refit(trained())
    expected = client.generate("a red circle", **FIELDS)
    assert client.release_memory_occupation()["bytes_freed"] > 4_000_000
    with pytest.raises(EngineError) as refused:
        client.generate("a red circle", **FIELDS)
    assert (refused.value.status, refused.value.code) == (503, "engine_asleep")
    assert service.http.get("/health").status_code == 200
    client.resume_memory_occupation()
    assert equal(client.generate("a red circle", **FIELDS), expected)


def post(service: Service, path: str, body: object = None, **query: object) -> httpx.Response:
    return service.http.post(path, json={} if body is None else body, params=query)


def test_a_client_in_the_order_of_miles_diffusion_trainer(service: Service, client: RolloutClient) -> None:
    """Resume, one flattened bucket a dtype without a session, checksum, release; field by field as it sends them."""
    new = trained()
    payload = [serialize_named_tensors(new.items(), load_format="flattened_bucket") for _ in range(client.world_size())]
    assert post(service, "/release_memory_occupation").json()["sleeping"] is True
    resumed = post(service, "/resume_memory_occupation")
    assert (resumed.status_code, resumed.json()["success"], resumed.json()["sleeping"]) == (200, True, False)
    body = {
        "serialized_named_tensors": [str(p) for p in payload],
        "load_format": "flattened_bucket",
        "target_modules": ["transformer"],
        "weight_version": "3",
    }
    updated = post(service, "/update_weights_from_tensor", body)
    assert updated.status_code == 200, updated.text
    assert updated.json()["success"] is True
    sums = post(service, "/get_weights_checksum", {"module_names": ["transformer", "nothing"]}).json()
    assert sums == {"transformer": module_sha256(new), "nothing": "not_found"}
    names = list(new)[:3]
    checked = {
        "target_module": "transformer",
        "expected_named_tensors_sha256": {n: tensor_sha256(new[n]) for n in names},
    }
    assert post(service, "/update_weights_from_tensor_checker", checked).status_code == 200
    checked["expected_named_tensors_sha256"][names[0]] = "0" * 64  # type: ignore[index]
    assert post(service, "/update_weights_from_tensor_checker", checked).status_code == 400
    assert client.generate("a red circle", **FIELDS)[0].weight_versions == ("3",) * 3


def test_a_client_in_the_order_of_slime_with_a_disk_checkpoint(
    service: Service, client: RolloutClient, tmp_path: Path
) -> None:
    """Release, resume weights, pause, flush until 200, update from disk, continue, resume the rest."""
    new = trained()
    pipeline = tiny_models.sd3_pipeline()
    transformer = type(pipeline.transformer).from_config(pipeline.transformer.config)
    transformer.load_state_dict(new)
    transformer.save_pretrained(tmp_path / "weight_v000007")
    assert post(service, "/abort_request", {"rid": "", "abort_all": True}).status_code == 200
    assert service.http.get("/flush_cache").status_code == 200
    assert post(service, "/release_memory_occupation").status_code == 200
    assert post(service, "/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert post(service, "/pause_generation").json()["status"] == "ok"
    assert service.http.get("/flush_cache").status_code == 200
    body = {"model_path": str(tmp_path / "weight_v000007"), "weight_version": "7", "target_modules": ["transformer"]}
    updated = post(service, "/update_weights_from_disk", body).json()
    assert updated["success"] is True
    assert service.http.get("/get_weight_version").json()["weight_version"] == "7"
    assert post(service, "/continue_generation").json()["status"] == "ok"
    assert post(service, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}).status_code == 200
    assert client.generate("a red circle", **FIELDS)[0].weight_versions == ("7",) * 3


def test_a_client_in_the_order_of_skyrl(service: Service, client: RolloutClient) -> None:
    """World size, init, pause keep, start, update by broadcast, finish, resume; then sleep level 2 and wake by tag."""
    new, ranks = trained(), service.http.get("/get_world_size").json()["world_size"]
    assert ranks == client.world_size()
    sender = WeightSender("127.0.0.1", world_size=1 + ranks, backend="gloo", timeout_s=60)
    joined = in_thread(
        lambda: post(service, "/init_weight_transfer_engine", {"init_info": sender.init_info(rank_offset=1)})
    )
    sender.join()
    assert joined.result().status_code == 200, joined.result().text
    assert post(service, "/pause", mode="keep", clear_cache="false").json() == {"status": "paused"}
    assert service.http.get("/is_paused").json() == {"is_paused": True}
    assert post(service, "/start_weight_update").status_code == 200
    told = sender.announce(new.items())
    info = {"names": told["names"], "dtype_names": told["dtypes"], "shapes": told["shapes"]}
    with httpx.Client(base_url=service.base_url, timeout=60) as http:
        received = in_thread(lambda: http.post("/update_weights", json={"update_info": info}))
        sender.send(new.items())
        assert received.result().status_code == 200, received.result().text
    assert post(service, "/finish_weight_update", {"weight_version": "9"}).status_code == 200
    assert post(service, "/resume").json() == {"status": "resumed"}
    assert service.http.get("/weight_info").json()["weight_version"] == "9"
    assert client.get_weights_checksum(["transformer"]) == {"transformer": module_sha256(new)}
    assert post(service, "/sleep", level=2).json()["status"] == "sleeping"
    assert service.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert post(service, "/wake_up", tags="weights").status_code == 200
    client.refit(new, weight_version="10")
    assert post(service, "/wake_up").json()["status"] == "awake"
    assert client.generate("a red circle", **FIELDS)[0].weight_versions == ("10",) * 3
    assert post(service, "/shutdown_weight_transfer_engine").status_code == 200
    sender.close()


def test_wrong_inputs_are_answered_by_name_and_change_nothing(service: Service, client: RolloutClient) -> None:
    sums = client.get_weights_checksum()
    for path, body, named in (
        ("/update_weights_from_disk", {"model_path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["!!!"]}, "base64"),
        ("/update_weights_from_distributed", {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]]}, "group"),
        ("/begin_weight_update", {"target_modules": ["unet"]}, "unet"),
        ("/begin_weight_update", {"selector": "draft"}, "draft"),
        ("/release_memory_occupation", {"tags": ["weight"]}, "weight"),
        ("/pause_generation", {"mode": "later"}, "later"),
        ("/end_weight_update", {}, "begin_weight_update"),
    ):
        reply = post(service, path, body)
        assert reply.status_code == 400, (path, reply.text)
        assert named in reply.text, (path, reply.text)
    assert client.get_weights_checksum() == sums
    with pytest.raises(InvalidRequestError):
        client.refit({"nothing": torch.zeros(1)})
    assert client.get_weights_checksum() == sums
    assert service.http.get("/ready").status_code == 200


def test_an_adapter_is_loaded_by_name_replaced_chosen_by_a_request_and_forgotten(
    service: Service, client: RolloutClient, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k"]}
    names = [n.removesuffix(".weight") for n in base() if n.endswith(("attn.to_q.weight", "attn.to_k.weight"))]
    torch.manual_seed(0)
    factors = {}
    for name in names:
        outputs, inputs = base()[f"{name}.weight"].shape
        factors[f"base_model.model.{name}.lora_A.weight"] = 0.1 * torch.randn(4, inputs)
        factors[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4)
    plain = client.generate("a red circle", **FIELDS)
    loaded = client.load_lora_adapter_from_tensors("policy", config, factors, lora_version="1")
    assert loaded["success"] is True
    assert "policy" in client.list_lora_adapters()
    adapted = client.generate("a red circle", lora_name="policy", **FIELDS)
    assert not equal(adapted, plain)
    assert adapted[0].weight_versions == ("default+policy@1",) * 3
    assert equal(client.generate("a red circle", **FIELDS), plain)
    safetensors.torch.save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    client.load_lora_adapter("copy", str(tmp_path))
    assert equal(client.generate("a red circle", lora_name="copy", **FIELDS), adapted)
    refused = post(service, "/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
    assert refused.status_code == 400
    assert refused.json()["error_message"]
    assert "/nowhere" in refused.text
    for name in ("policy", "copy"):
        client.unload_lora_adapter(name)
    with pytest.raises(EngineError, match="policy"):
        client.generate("a red circle", lora_name="policy", **FIELDS)
