"""The control routes and their client: which command a request becomes, and how its result or error looks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest
import torch
from control_stub_engine import RecordingEngine, serving

from diffusion_rl.config import EngineConfig, ServerConfig
from diffusion_rl.server.app import create_app
from engine_control.client import ControlClient
from engine_control.errors import (
    ConflictError,
    EnginePausedError,
    InconsistentWeightsError,
    PayloadTooLargeError,
    RefitRefusedError,
    WeightSessionError,
)
from engine_control.server.bodies import MAX_BRACKETS, WEIGHT_PATHS
from engine_control.server.port import KnownState
from engine_control.server.sglang_fields import MAX_BASE64_BYTES

Call = tuple[str, dict[str, Any]]
GROUP = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
NAMES = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
INFO = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
PACKED = {**INFO, "dtypes": ["bfloat16"], "group_name": "weight_update_group"}
TENSOR_INFO = {
    "serialized_named_tensors": ["QUJD"],
    "load_format": "flattened_bucket",
    "payload_gpu_uuids": None,
    "weight_update_mode": None,
    "lora_alpha": None,
    "lora_rank": None,
    "target_modules": None,
}
DISTRIBUTED_INFO = {
    **NAMES,
    "group_name": "slime-pp_0",
    "load_format": None,
    "weight_update_mode": None,
    "lora_alpha": None,
    "lora_rank": None,
    "target_modules": None,
}


class Running:
    """A language-model and a diffusion app, over one engine."""

    engine: ClassVar[RecordingEngine] = RecordingEngine()
    llm: httpx.Client
    diffusion: httpx.Client


@pytest.fixture(scope="module")
def started() -> Iterator[Running]:
    running = Running()
    with (
        serving(running.engine, "llm") as llm,
        serving(running.engine, "diffusion") as diffusion,
        httpx.Client(base_url=llm, timeout=20) as running.llm,
        httpx.Client(base_url=diffusion, timeout=20) as running.diffusion,
    ):
        yield running


@pytest.fixture
def running(started: Running) -> Running:
    started.engine.forget()
    return started


def tensor_call(**fields: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": ["QUJD"], "load_format": "flattened_bucket", "flush_cache": False, **fields}


def pause(mode: str, *, refuse_new: bool = False, **more: Any) -> Call:
    return "pause_generation", {"mode": mode, "refuse_new": refuse_new, **more}


SESSIONS: dict[str, list[tuple[str, str, Any, list[Call]]]] = {
    "miles": [
        ("POST", "/pause_generation", {"mode": "retract"}, [pause("retract")]),
        ("GET", "/flush_cache", None, [("flush_cache", {})]),
        ("POST", "/begin_weight_update", {"selector": "all"}, [("begin_weight_update", {"selector": "all"})]),
        (
            "POST",
            "/update_weights_from_tensor",
            tensor_call(selector="all", weight_version="7"),
            [
                (
                    "update_weights",
                    {
                        "transport": "tensor",
                        "info": TENSOR_INFO,
                        "flush_cache": False,
                        "selector": "all",
                        "weight_version": "7",
                    },
                )
            ],
        ),
        (
            "POST",
            "/update_weight_version",
            {"new_version": "7", "abort_all_requests": False},
            [("update_weight_version", {"new_version": "7", "abort_all_requests": False})],
        ),
        ("POST", "/end_weight_update", {}, [("end_weight_update", {})]),
        ("POST", "/continue_generation", {}, [("continue_generation", {})]),
        ("POST", "/weights_checker", {"action": "snapshot"}, [("weights_checker", {"action": "snapshot"})]),
        ("GET", "/get_weight_version", None, [("weight_info", {})]),
    ],
    "slime": [
        ("POST", "/abort_request", {"abort_all": True}, [("abort_requests", {"abort_all": True})]),
        ("POST", "/release_memory_occupation", {}, [("release_memory_occupation", {})]),
        (
            "POST",
            "/resume_memory_occupation",
            {"tags": ["weights"]},
            [("resume_memory_occupation", {"tags": ["weights"]})],
        ),
        ("POST", "/pause_generation", {}, [pause("abort")]),
        (
            "POST",
            "/init_weights_update_group",
            {**GROUP, "master_port": "29500", "group_name": "slime-pp_0", "backend": "nccl", "rid": "x"},
            [
                (
                    "init_weight_transfer",
                    {"transport": "distributed", "info": {**GROUP, "group_name": "slime-pp_0", "backend": "nccl"}},
                )
            ],
        ),
        (
            "POST",
            "/update_weights_from_distributed",
            {**NAMES, "group_name": "slime-pp_0", "flush_cache": False, "weight_version": 8, "load_format": None},
            [
                (
                    "update_weights",
                    {
                        "transport": "distributed",
                        "info": DISTRIBUTED_INFO,
                        "flush_cache": False,
                        "weight_version": "8",
                    },
                )
            ],
        ),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/w/8", "weight_version": "8", "token_step": 0},
            [
                (
                    "update_weights",
                    {
                        "transport": "disk",
                        "info": {"model_path": "/w/8", "load_format": None, "target_modules": None},
                        "weight_version": "8",
                        "token_step": 0,
                    },
                )
            ],
        ),
        (
            "POST",
            "/destroy_weights_update_group",
            {},
            [("shutdown_weight_transfer", {"transport": "distributed", "info": {"group_name": "weight_update_group"}})],
        ),
    ],
    "SkyRL": [
        ("GET", "/get_world_size?include_dp=true", None, [("world_size", {})]),
        (
            "POST",
            "/init_weight_transfer_engine",
            {"init_info": GROUP},
            [
                (
                    "init_weight_transfer",
                    {"transport": "distributed", "info": {**GROUP, "group_name": "weight_update_group"}},
                )
            ],
        ),
        ("POST", "/pause?mode=keep&clear_cache=False", None, [pause("in_place", clear_cache=False)]),
        (
            "POST",
            "/collective_rpc",
            {"method": "skyrl_start_weight_update"},
            [("begin_weight_update", {}), ("world_size", {})],
        ),
        (
            "POST",
            "/collective_rpc",
            {
                "method": "update_weights_nccl",
                "kwargs": {"update_info": '{"names":["w"],"dtype_names":["bfloat16"],"shapes":[[2,3]]}'},
            },
            [
                ("update_weights", {"transport": "distributed", "info": PACKED, "flush_cache": False}),
                ("world_size", {}),
            ],
        ),
        (
            "POST",
            "/collective_rpc",
            {"method": "skyrl_finish_weight_update"},
            [("end_weight_update", {"flush_cache": False}), ("world_size", {})],
        ),
        ("POST", "/resume", None, [("continue_generation", {})]),
        (
            "POST",
            "/sleep?level=2",
            None,
            [
                ("is_paused", {}),
                pause("abort", clear_cache=True),
                ("release_memory_occupation", {"backup": False}),
            ],
        ),
        (
            "POST",
            "/wake_up?tags=weights",
            None,
            [("control_state", {}), ("resume_memory_occupation", {"tags": ["weights"]})],
        ),
        (
            "POST",
            "/wake_up?tags=kv_cache&tags=scheduling",
            None,
            [
                ("control_state", {}),
                ("resume_memory_occupation", {"tags": ["kv_cache"]}),
                ("continue_generation", {}),
            ],
        ),
        ("POST", "/wake_up", None, [("control_state", {}), ("continue_generation", {})]),
        ("POST", "/reset_prefix_cache", {"reset_running_requests": False}, [("flush_cache", {})]),
    ],
    "prime-rl": [
        ("POST", "/pause", None, [pause("abort", refuse_new=True, clear_cache=True)]),
        (
            "POST",
            "/update_weights",
            {"weight_dir": "/w/9"},
            [("update_weights", {"transport": "disk", "info": {"model_path": "/w/9"}, "flush_cache": False})],
        ),
        ("POST", "/resume", None, [("continue_generation", {})]),
    ],
    "vLLM's own": [
        ("POST", "/pause?mode=wait&clear_cache=0", None, [pause("wait", refuse_new=True, clear_cache=False)]),
        ("POST", "/pause?mode=keep", None, [pause("retract", clear_cache=True)]),
        (
            "POST",
            "/init_weight_transfer_engine",
            {"init_info": {"packed": False}},
            [
                (
                    "init_weight_transfer",
                    {"transport": "ipc", "info": {"packed": False, "group_name": "weight_update_group"}},
                )
            ],
        ),
        ("POST", "/start_weight_update", None, [("begin_weight_update", {})]),
        ("POST", "/start_draft_weight_update", None, [("begin_weight_update", {"selector": "draft"})]),
        (
            "POST",
            "/update_weights",
            {"update_info": [INFO, INFO]},
            [("update_weights", {"transport": "distributed", "info": PACKED, "flush_cache": False})],
        ),
        (
            "POST",
            "/finish_weight_update",
            {"weight_version": "9"},
            [("end_weight_update", {"weight_version": "9", "flush_cache": False})],
        ),
        ("POST", "/abort_requests", {"request_ids": ["a"]}, [("abort_requests", {"rids": ["a"]})]),
        ("POST", "/abort_requests", {}, [("abort_requests", {"abort_all": True})]),
        ("POST", "/sleep?level=0", None, [pause("in_place")]),
        ("GET", "/is_sleeping", None, [("is_sleeping", {})]),
        ("POST", "/release_kv_cache_memory", None, [("release_memory_occupation", {"tags": ["kv_cache"]})]),
    ],
    "this project's own fields": [
        (
            "POST",
            "/begin_weight_update",
            {"session_id": "s", "partial": True, "staged": "true", "target_modules": ["transformer"], "manifest": {}},
            [
                (
                    "begin_weight_update",
                    {
                        "session_id": "s",
                        "partial": True,
                        "staged": True,
                        "target_modules": ["transformer"],
                        "manifest": {},
                    },
                )
            ],
        ),
        ("POST", "/abort_weight_update", {"session_id": "s"}, [("abort_weight_update", {"session_id": "s"})]),
        (
            "POST",
            "/release_memory_occupation",
            {"tags": ["weights"], "backup": True, "wait": True},
            [("release_memory_occupation", {"tags": ["weights"], "backup": True, "wait": True})],
        ),
        (
            "POST",
            "/update_weights_from_ipc",
            {"buffer": {"a": 1}, "tensors": [], "session_id": "s"},
            [
                (
                    "update_weights",
                    {
                        "transport": "ipc",
                        "info": {"buffer": {"a": 1}, "tensors": [], "target_modules": None},
                        "session_id": "s",
                    },
                )
            ],
        ),
        ("POST", "/abort_request", {"rid": "req-1"}, [("abort_requests", {"rid_prefix": "req-1"})]),
        ("POST", "/abort_request", {}, [("abort_requests", {"rids": []})]),
        ("POST", "/flush_cache?timeout=2.5", None, [("flush_cache", {"timeout": 2.5})]),
        (
            "GET",
            "/get_weights_by_name?name=w&truncate_size=4",
            None,
            [("get_weights_by_name", {"name": "w", "truncate_size": 4})],
        ),
    ],
}


@pytest.mark.parametrize("client", SESSIONS)
def test_a_clients_calls_become_these_commands(running: Running, client: str) -> None:
    for method, path, body, expected in SESSIONS[client]:
        running.engine.calls.clear()
        reply = running.llm.request(method, path, json=body)
        assert reply.status_code == 200, (path, reply.text)
        assert running.engine.calls == expected, path


def test_the_replies_are_those_that_clients_read(running: Running) -> None:
    done = {"success": True, "message": "Success"}
    digests = {"transformer.w": "cd"}
    awake = {"method": "wake_up", "kwargs": {"tags": "weights,kv_cache"}}
    for method, path, body, expected in (
        ("POST", "/begin_weight_update", {}, done),
        ("POST", "/update_weight_version", {"new_version": 7}, {**done, "new_version": "7"}),
        ("GET", "/get_weight_version", None, {"weight_version": "7"}),
        ("POST", "/get_weights_checksum", {}, {"transformer": "ab"}),
        ("GET", "/weights_checker", None, {**done, "checksums": digests, "ranks": [{"checksums": digests}]}),
        ("POST", "/get_weights_by_name", {"name": "w"}, [[1.0, 2.0]]),
        ("POST", "/release_memory_occupation", None, None),
        ("POST", "/pause", None, {"status": "paused"}),
        ("GET", "/is_paused", None, {"is_paused": True}),
        ("POST", "/abort_requests", {}, {"status": "aborted", "aborted": 3}),
        ("POST", "/start_weight_update", None, {"message": "Weight update started"}),
        ("POST", "/weight_checker", {}, {"checksums": digests}),
        ("POST", "/weight_checker", {"action": "compare", "baseline": {}}, {"match": True, "mismatches": []}),
        ("GET", "/get_world_size", None, {"world_size": 2}),
        ("POST", "/wake_up?tags=weights", None, {"status": "sleeping", "tags": ["weights"]}),
        ("POST", "/wake_up", None, {"status": "awake", "tags": None}),
        ("POST", "/collective_rpc", awake, {"results": [None, None]}),
        ("POST", "/collective_rpc", {"method": "sleep", "args": ["1"]}, {"results": [None, None]}),
        ("POST", "/reset_prefix_cache", None, {"success": True}),
    ):
        reply = running.llm.request(method, path, json=body)
        assert (reply.status_code, reply.json()) == (200, expected), path
    assert running.llm.post("/flush_cache").text == "Cache flushed.\n"
    assert running.llm.post("/reset_mm_cache").content == b""
    report = running.diffusion.post("/release_memory_occupation").json()
    assert (report["success"], report["sleeping"], report["bytes_freed"]) == (True, True, 7)
    assert running.diffusion.post("/abort_request", json={}).status_code == 404  # the diffusion app has its own


def test_a_refusal_has_its_own_status_in_the_envelope_of_its_family(running: Running) -> None:
    running.engine.fails = {
        "end_weight_update": RefitRefusedError("tensor 'w' never came", field="w", hint="Send it."),
        "begin_weight_update": ConflictError("somebody else's session is open"),
        "continue_generation": InconsistentWeightsError("broken"),
        "flush_cache": ConflictError("busy"),
    }
    for path, status, code in (
        ("/end_weight_update", 400, "refit_refused"),
        ("/begin_weight_update", 409, "conflict"),
        ("/continue_generation", 503, "inconsistent_weights"),
    ):
        reply = running.llm.post(path, json={})
        assert (reply.status_code, reply.json()["success"], reply.json()["code"]) == (status, False, code)
        assert {"message", "hint"} <= reply.json().keys()
        assert ("retry-after" in reply.headers) == (status == 503)
    for path, status, code in (
        ("/finish_weight_update", 400, "refit_refused"),
        ("/start_weight_update", 409, "conflict"),
        ("/resume", 503, "inconsistent_weights"),
    ):
        error = running.llm.post(path).json()["error"]
        assert (error["code"], error["type"], bool(error["message"])) == (status, code, True)
    busy = running.llm.get("/flush_cache")
    assert (busy.status_code, busy.headers["content-type"].split(";")[0], busy.text) == (400, "text/plain", "busy\n")
    assert running.llm.post("/reset_prefix_cache").json() == {"success": False}
    running.engine.answers["check_tensors"] = {"success": False, "message": "differs"}
    body = {"target_module": "transformer", "expected_named_tensors_sha256": {"w": "00"}}
    reply = running.llm.post("/update_weights_from_tensor_checker", json=body)
    assert (reply.status_code, reply.json()["message"]) == (400, "differs")


@pytest.mark.parametrize(
    ("path", "content", "status", "named"),
    [
        ("/begin_weight_update", b"{", 400, "JSON"),
        ("/begin_weight_update", b"[1]", 400, "object"),
        ("/begin_weight_update", b"\xff\xfe", 400, "JSON"),
        ("/begin_weight_update", b'{"manifest": ' + b'{"a":' * 5000, 400, "JSON"),
        ("/begin_weight_update", b"[" * (MAX_BRACKETS + 1), 400, "brackets"),
        ("/begin_weight_update", b'{"selector": "main"}', 400, "'target'"),
        ("/update_weights_from_disk", b"", 400, "model_path"),
        ("/init_weights_update_group", b'{"master_address": "x", "master_port": "x"}', 400, "master_port"),
        ("/update_weights_from_distributed", b'{"names": [1]}', 400, "names"),
        ("/update_weights_from_ipc", b'{"zmq_handles": {"GPU-1": "ipc:///tmp/x"}}', 400, "zmq_handles"),
        ("/pause_generation", b'{"mode": "freeze"}', 400, "'in_place'"),
        ("/pause?mode=freeze", b"", 400, "'keep'"),
        ("/sleep?level=3", b"", 400, "level"),
        ("/flush_cache?timeout=soon", b"", 400, "timeout"),
        ("/abort_requests", b"", 400, "{}"),
        ("/weight_checker", b'{"action": "compare"}', 400, "baseline"),
        ("/update_weights", b'{"weight_dir": null}', 400, "update_info"),
        ("/collective_rpc", b'{"method": "exec"}', 400, "skyrl_start_weight_update"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_what_can_not_be_read_is_refused_by_name_and_runs_nothing(
    running: Running, path: str, content: bytes, status: int, named: str
) -> None:
    reply = running.llm.post(path, content=content, headers={"content-type": "application/json"})
    assert (reply.status_code, running.engine.calls) == (status, []), reply.text
    assert named in reply.text
    assert running.llm.post(path, content=b"a=b", headers={"content-type": "text/plain"}).status_code in (415, 400)


def test_more_base64_than_a_frame_holds_is_refused_with_the_way_out(running: Running) -> None:
    with ControlClient(str(running.llm.base_url)) as client, pytest.raises(PayloadTooLargeError) as caught:
        client.update_weights_from_serialized(["A" * (MAX_BASE64_BYTES // 2), "A" * (MAX_BASE64_BYTES // 2 + 2)])
    assert "application/vnd.safetensors" in (caught.value.hint or "")
    assert running.engine.calls == []


def test_a_failed_update_under_vllms_names_ends_the_session_and_one_without_a_session_does_not(
    running: Running,
) -> None:
    for error, expected in (
        (RefitRefusedError("no such weight"), ["update_weights", "abort_weight_update"]),
        (WeightSessionError("no session is open"), ["update_weights"]),
        (ConflictError("somebody else's"), ["update_weights"]),
    ):
        running.engine.forget()
        running.engine.fails = {"update_weights": error, "abort_weight_update": WeightSessionError("none")}
        reply = running.llm.post("/update_weights", json={"update_info": INFO})
        assert (reply.status_code, reply.json()["error"]["message"]) == (error.status, error.message)
        assert running.engine.names == expected


def test_a_sleep_that_can_not_release_leaves_generation_as_it_was(running: Running) -> None:
    running.engine.fails = {"release_memory_occupation": ConflictError("a session is open")}
    assert running.llm.post("/sleep").status_code == 409
    assert running.engine.names == ["is_paused", "pause_generation", "release_memory_occupation", "continue_generation"]
    running.engine.calls.clear()
    running.engine.paused = True
    assert running.llm.post("/sleep").status_code == 409
    assert running.engine.names == ["is_paused", "pause_generation", "release_memory_occupation"]


def test_ready_says_whether_a_request_would_run(running: Running) -> None:
    assert running.llm.get("/ready").status_code == 200
    for state, generation, reason in (("paused", "waits", None), ("asleep", "refused", "weights are released")):
        running.engine.state = {"state": state, "generation": generation, "reason": reason}
        reply = running.llm.get("/ready")
        assert (reply.status_code, reply.json()["state"]) == (503, state)
        assert reply.json()["reason"]


def test_a_client_that_leaves_does_not_cancel_the_command(running: Running) -> None:
    running.engine.delay_s = 0.3
    head = b"POST /end_weight_update HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    with socket.create_connection((running.llm.base_url.host, running.llm.base_url.port)) as connection:
        connection.sendall(head)
        while not running.engine.calls:
            time.sleep(0.005)
    deadline = time.monotonic() + 5
    while not running.engine.completed:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def file_of(call: Call) -> dict[str, torch.Tensor]:
    """The tensors of the safetensors file that an update call carries."""
    from safetensors.torch import load

    return load(call[1]["info"]["safetensors"].numpy().tobytes())


def test_the_client_sends_tensors_as_safetensors_files_of_a_bounded_size(running: Running) -> None:
    tensors = {f"w{i}": torch.randn(8, 16).to(torch.bfloat16) for i in range(3)}
    tensors["alone"] = torch.arange(1000)
    with ControlClient(str(running.llm.base_url)) as client:
        replies = client.update_weights_from_tensor(
            tensors, bucket_bytes=600, session_id="s", target_modules=["transformer"], partial=True, flush_cache=False
        )
    assert len(replies) == 3
    files = [file_of(call) for call in running.engine.calls]
    assert [sorted(file) for file in files] == [["w0", "w1"], ["w2"], ["alone"]]
    for file in files:
        for name, tensor in file.items():
            assert torch.equal(tensor, tensors[name])
    name, arguments = running.engine.calls[0]
    info = arguments.pop("info")
    assert (name, info["load_format"], info["target_modules"]) == ("update_weights", "safetensors", ["transformer"])
    assert arguments == {
        "transport": "tensor",
        "session_id": "s",
        "target_modules": ["transformer"],
        "partial": True,
        "flush_cache": False,
    }


@pytest.mark.parametrize("form", ["mapping", "generator"])
def test_a_refit_is_one_session_with_the_digest_of_every_tensor(running: Running, form: str) -> None:
    from engine_control.refit.manifest import manifest_of

    tensors = {f"w{i}": torch.randn(4, 4) for i in range(3)}
    with ControlClient(str(running.llm.base_url)) as client:
        given = tensors if form == "mapping" else iter(tensors.items())
        client.refit(given, module="transformer", weight_version="3", staged=True, bucket_bytes=64)
    calls = running.engine.calls
    assert running.engine.names == ["begin_weight_update", *["update_weights"] * 3, "end_weight_update"]
    assert len({arguments["session_id"] for _, arguments in calls}) == 1
    assert (calls[0][1]["staged"], calls[0][1]["target_modules"]) == (True, ["transformer"])
    assert calls[-1][1]["weight_version"] == "3"
    expected = manifest_of(("transformer", name, tensor) for name, tensor in tensors.items())
    assert calls[0 if form == "mapping" else -1][1]["manifest"] == expected


def test_a_refit_that_fails_is_undone_and_raises_what_the_engine_raised(running: Running) -> None:
    refusal = RefitRefusedError("wrong shape", field="transformer.w", value="[2]", hint="Send it as saved.")
    running.engine.fails = {"update_weights": refusal, "abort_weight_update": WeightSessionError("none is open")}
    with ControlClient(str(running.llm.base_url)) as client:
        with pytest.raises(RefitRefusedError) as caught:
            client.refit({"w": torch.zeros(2)})
        assert caught.value.to_message() == refusal.to_message()
        assert running.engine.names == ["begin_weight_update", "update_weights", "abort_weight_update"]
        session = running.engine.calls[0][1]["session_id"]
        assert running.engine.calls[-1][1] == {"session_id": session}
        running.engine.forget()
        running.engine.fails = {"begin_weight_update": ConflictError("somebody else's session is open")}
        with pytest.raises(ConflictError):
            client.refit({"w": torch.zeros(2)})
        assert running.engine.names == ["begin_weight_update"]


def test_the_client_raises_the_same_class_from_either_family_and_from_text(running: Running) -> None:
    running.engine.fails = {
        "pause_generation": EnginePausedError("paused"),
        "is_paused": InconsistentWeightsError("broken"),
        "flush_cache": ConflictError("busy"),
    }
    with ControlClient(str(running.llm.base_url)) as client:
        with pytest.raises(EnginePausedError):
            client.pause_generation()
        with pytest.raises(InconsistentWeightsError):
            client.is_paused()
        with pytest.raises(ConflictError):
            client.flush_cache()
        client.abort_request("a", prefix=True)
        assert client.release_memory_occupation(["weights"]) == {}
        assert (client.is_sleeping(), client.weight_version(), client.world_size(), client.ready()) == (
            True,
            "7",
            2,
            True,
        )


def test_the_rollout_service_has_the_routes_and_takes_larger_bodies_for_weights_only() -> None:
    async def ask() -> tuple[list[httpx.Response], dict[str, Any]]:
        app = create_app(EngineConfig(), ServerConfig(max_body_bytes=1000, max_weights_body_bytes=3000))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            text = b'{"rid": "a", "x": "%s"}' % (b" " * 2000)
            posts = [("/abort_request", text), ("/pause_generation", text), ("/begin_weight_update", text)]
            posts += [("/begin_weight_update", text * 2), ("/pause", b"")]
            replies = [await client.post(path, content=content) for path, content in posts]
            return replies, (await client.get("/openapi.json")).json()["paths"]

    replies, paths = asyncio.run(ask())
    assert [reply.status_code for reply in replies] == [413, 413, 503, 413, 503]
    assert (replies[2].json()["success"], replies[2].json()["code"]) == (False, "engine_unavailable")
    assert replies[4].json()["error"]["code"] == 503
    assert paths.keys() >= WEIGHT_PATHS
    assert "retract" in str(paths["/pause_generation"]["post"])


def test_the_last_known_state_is_of_the_living_engine_and_nobody_waits_longer_than_allowed() -> None:
    async def ask() -> list[Any]:
        life, answer = 1, asyncio.Event()

        async def state() -> dict[str, Any]:
            await answer.wait()
            return {"state": f"of {life}"}

        known = KnownState(state, lambda: life)
        found = [await known.current(0.01)]
        answer.set()
        found.append(await known.current(5))
        answer.clear()
        found.append(await known.current(0.01))
        life = 2
        found.append(await known.current(0.01))
        return found

    assert asyncio.run(ask()) == [None, {"state": "of 1"}, {"state": "of 1"}, None]
