"""The control layer's client: an engine's weights, pauses and memory over HTTP. It imports httpx and torch.

with ControlClient("http://127.0.0.1:30000") as client:
    client.pause_generation("retract")
    client.refit(transformer.state_dict(), weight_version="7")
    client.continue_generation()
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import httpx
import torch

from engine_control.closing import Closing
from engine_control.errors import ConflictError, EngineError, ErrorMessage, InvalidRequestError, from_message

NamedTensors: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
PauseMode = Literal["abort", "retract", "in_place", "wait"]
BUCKET_BYTES = 256 * 1024**2
PIECE_BYTES = 1024**2  # of a body, handed to the socket at once
RAW_TYPE = "application/vnd.safetensors"


class ControlClient(Closing):
    """Talks to one engine. Commands take as long as they take: there is no time-out unless one is given.

    Every method raises the `EngineError` that the engine raised, and `httpx.TransportError` if it can't be reached.
    Fields that are left out (None) are what the engine takes then; `fields` are a route's further ones.
    """

    def __init__(self, base_url: str, *, timeout: float | None = None) -> None:
        self._client = httpx.Client(base_url=base_url, timeout=timeout)

    def refit(
        self,
        named_tensors: NamedTensors,
        *,
        module: str = "transformer",
        weight_version: str | None = None,
        partial: bool = False,
        staged: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> dict[str, Any]:
        """Sends a module's new weights in one session, and has the engine check them against their digests before they
        count. Returns the reply to its end. After an error the old weights are the weights.

        The tensors may be made one by one, by a generator: each is needed once, and those of a bucket at a time. Of a
        mapping or a list the digests are sent ahead.
        """
        from engine_control.refit.manifest import manifest_of

        def digests(items: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
            return dict(manifest_of((module, name, tensor) for name, tensor in items).get(module, {}))

        session = f"client-{uuid.uuid4().hex}"
        at_hand = isinstance(named_tensors, Mapping | Sequence)
        ahead = {"manifest": {module: digests(_items(named_tensors))}} if at_hand else {}
        behind: dict[str, Any] = {} if at_hand else {"manifest": {module: {}}}
        begun = False
        try:
            self.begin_weight_update(
                target_modules=[module], partial=partial, staged=staged, session_id=session, **ahead
            )
            begun = True
            for bucket in _buckets(_items(named_tensors), bucket_bytes):
                if not at_hand:
                    behind["manifest"][module].update(digests(bucket))
                self._send_bucket(bucket, {"session_id": session, "target_modules": [module], "flush_cache": False})
            return self.end_weight_update(session_id=session, weight_version=weight_version, **behind)
        except BaseException as error:
            if begun or not isinstance(error, EngineError):  # else there is no session of ours
                with contextlib.suppress(EngineError, httpx.HTTPError):
                    self.abort_weight_update(session_id=session)
            raise

    def begin_weight_update(self, *, session_id: str | None = None, **fields: Any) -> dict[str, Any]:
        """Opens a session. `fields`: selector, target_modules, partial, staged, in_place, manifest, abort_all_requests.
        The reply says where the old bytes are kept (`undo`)."""
        return self._post("/begin_weight_update", {"session_id": session_id, **fields})

    def end_weight_update(
        self, *, session_id: str | None = None, weight_version: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Checks and commits the session. `fields`: manifest, flush_cache."""
        return self._post("/end_weight_update", {"session_id": session_id, "weight_version": weight_version, **fields})

    def abort_weight_update(self, *, session_id: str | None = None) -> dict[str, Any]:
        """Afterwards the old weights are the weights, and no session is open."""
        return self._post("/abort_weight_update", {"session_id": session_id})

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, *, bucket_bytes: int = BUCKET_BYTES, **fields: Any
    ) -> list[dict[str, Any]]:
        """Sends tensors within a session, in safetensors files of about `bucket_bytes`; one reply for each. `fields`:
        session_id, target_modules, partial, weight_version, flush_cache."""
        return [self._send_bucket(bucket, fields) for bucket in _buckets(_items(named_tensors), bucket_bytes)]

    def update_weights_from_serialized(self, serialized_named_tensors: list[str], **fields: Any) -> dict[str, Any]:
        """Sends SGLang's form: one base64 text for each rank. `fields`: load_format and others."""
        return self._post(
            "/update_weights_from_tensor", {"serialized_named_tensors": serialized_named_tensors, **fields}
        )

    def update_weights_from_disk(self, model_path: str, **fields: Any) -> dict[str, Any]:
        """Has the engine load a folder that it can read. `fields`: target_modules, weight_version, flush_cache..."""
        return self._post("/update_weights_from_disk", {"model_path": model_path, **fields})

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], **fields: Any
    ) -> dict[str, Any]:
        """Has the engine receive these tensors from the group, of which rank 0 must be sending them meanwhile."""
        return self._post(
            "/update_weights_from_distributed", {"names": names, "dtypes": dtypes, "shapes": shapes, **fields}
        )

    def update_weights_from_ipc(self, buffer: Any, tensors: Any, **fields: Any) -> dict[str, Any]:
        """Has the engine read tensors out of memory of this machine, which must stay as it is until this returns."""
        return self._post("/update_weights_from_ipc", {"buffer": buffer, "tensors": tensors, **fields})

    def init_weights_update_group(
        self, master_address: str, master_port: int, *, rank_offset: int, world_size: int, **fields: Any
    ) -> dict[str, Any]:
        """Has the engine join a group, which rank 0 must be joining meanwhile. `fields`: group_name, backend."""
        where = {"master_address": master_address, "master_port": master_port}
        body = {**where, "rank_offset": rank_offset, "world_size": world_size, **fields}
        return self._post("/init_weights_update_group", body)

    def destroy_weights_update_group(self, group_name: str | None = None) -> dict[str, Any]:
        """Has the engine leave the group."""
        return self._post("/destroy_weights_update_group", {"group_name": group_name})

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool | None = None) -> dict[str, Any]:
        """Renames the weights as they are."""
        body = {"new_version": new_version, "abort_all_requests": abort_all_requests}
        return self._post("/update_weight_version", body)

    def weight_info(self) -> dict[str, Any]:
        """The weights' version, how often they were updated, and the last updates."""
        return self._object(self._client.get("/weight_info"))

    def weight_version(self) -> str:
        """What the weights are called."""
        return str(self.weight_info()["weight_version"])

    def get_weights_checksum(self, module_names: list[str] | None = None) -> dict[str, str]:
        """SHA-256 of each module as it lies."""
        return self._post("/get_weights_checksum", {"module_names": module_names})

    def update_weights_from_tensor_checker(self, target_module: str, expected: Mapping[str, str]) -> dict[str, Any]:
        """Whether the module's weights have these SHA-256 digests. One that hasn't raises `InvalidRequestError`."""
        body = {"target_module": target_module, "expected_named_tensors_sha256": dict(expected)}
        return self._post("/update_weights_from_tensor_checker", body)

    def weights_checker(self, action: str = "checksum", *, baseline: Mapping[str, str] | None = None) -> dict[str, Any]:
        """`checksum`, `snapshot`, `reset_tensors` or `compare`. A difference raises `InvalidRequestError`."""
        return self._post("/weights_checker", {"action": action, "baseline": baseline})

    def get_weights_by_name(
        self, name: str, *, truncate_size: int | None = None, module: str | None = None
    ) -> list[Any]:
        """The weight's first numbers, as nested lists; what isn't finite is None."""
        body = {"name": name, "truncate_size": truncate_size, "module": module}
        numbers: list[Any] = self._reply("/get_weights_by_name", body).json()
        return numbers

    def load_lora_adapter(self, lora_name: str, lora_path: str, **fields: Any) -> dict[str, Any]:
        """Has the engine load a folder that peft has saved. `fields`: lora_version, in_place, abort_all_requests."""
        return self._post("/load_lora_adapter", {"lora_name": lora_name, "lora_path": lora_path, **fields})

    def load_lora_adapter_from_tensors(
        self, lora_name: str, config_dict: Mapping[str, Any], named_tensors: NamedTensors, **fields: Any
    ) -> dict[str, Any]:
        """Loads an adapter from peft's configuration and state. `fields` as above."""
        query = {"lora_name": lora_name, "config_dict": json.dumps(dict(config_dict)), **fields}
        return self._send_file("/load_lora_adapter_from_tensors", list(_items(named_tensors)), query)

    def unload_lora_adapter(self, lora_name: str, **fields: Any) -> dict[str, Any]:
        """Has the engine forget an adapter. `fields`: abort_all_requests."""
        return self._post("/unload_lora_adapter", {"lora_name": lora_name, **fields})

    def list_lora_adapters(self) -> dict[str, Any]:
        """Every adapter by its name."""
        adapters: dict[str, Any] = self._object(self._client.get("/v1/list_loras"))["loras"]
        return adapters

    def pause_generation(self, mode: PauseMode = "abort") -> dict[str, Any]:
        """Pauses; new requests wait. What is in flight is aborted, retracted, frozen, or finished first."""
        return self._post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> dict[str, Any]:
        """Ends a pause."""
        return self._post("/continue_generation", {})

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return bool(self._object(self._client.get("/is_paused"))["is_paused"])

    def abort_request(self, rid: str = "", *, prefix: bool = False, abort_all: bool = False) -> None:
        """Aborts a request (with `prefix`, those whose id begins so), or all. A language-model engine takes every `rid`
        for a prefix."""
        self._reply("/abort_request", {"rid": rid, "prefix": prefix, "abort_all": abort_all})

    def flush_cache(self, timeout: float = 0.0) -> None:
        """Drops what is cached across requests; waits up to `timeout` s for those in flight, and raises then."""
        reply = self._client.post("/flush_cache", params={"timeout": timeout})
        if reply.status_code == 400:  # as SGLang says that it is busy
            raise ConflictError(reply.text.strip(), code="busy", hint="Wait for the requests, or abort them.")
        checked(reply)

    def release_memory_occupation(
        self, tags: list[str] | None = None, *, backup: bool | None = None, wait: bool | None = None
    ) -> dict[str, Any]:
        """Gives memory back; of all tags if none is named. A language-model engine says nothing: {}."""
        return self._post("/release_memory_occupation", {"tags": tags, "backup": backup, "wait": wait})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Takes memory again. A language-model engine says nothing: {}."""
        return self._post("/resume_memory_occupation", {"tags": tags})

    def is_sleeping(self) -> bool:
        """Whether memory is released that a request needs."""
        return bool(self._object(self._client.get("/is_sleeping"))["is_sleeping"])

    def world_size(self) -> int:
        """How many ranks the engine has."""
        return int(self._object(self._client.get("/get_world_size"))["world_size"])

    def ready(self) -> bool:
        """Whether a request would be computed at once."""
        return self._client.get("/ready").status_code == 200

    def health(self) -> bool:
        """Whether the engine is well, be it paused or asleep."""
        return self._client.get("/health").status_code == 200

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _send_bucket(self, bucket: list[tuple[str, torch.Tensor]], fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._send_file("/update_weights_from_tensor", bucket, fields)

    def _send_file(
        self, path: str, named_tensors: list[tuple[str, torch.Tensor]], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        from engine_control.refit.payload.safetensors_format import file_bytes

        file = memoryview(file_bytes(named_tensors))
        reply = self._client.post(
            path,
            content=(bytes(file[at : at + PIECE_BYTES]) for at in range(0, len(file), PIECE_BYTES)),
            headers={"content-type": RAW_TYPE, "content-length": str(len(file))},
            params={name: value for name, value in fields.items() if value is not None},
        )
        return self._object(reply)

    def _post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._object(self._reply(path, fields))

    def _reply(self, path: str, fields: Mapping[str, Any]) -> httpx.Response:
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            content = json.dumps(given, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the request can't be written as JSON: {error}", code="invalid_json") from error
        return checked(self._client.post(path, content=content, headers={"content-type": "application/json"}))

    def _object(self, reply: httpx.Response) -> dict[str, Any]:
        found: dict[str, Any] | None = checked(reply).json()
        return found or {}


def checked(reply: httpx.Response) -> httpx.Response:
    """The reply, if it is a success.

    Raises:
        EngineError: the one that it stands for.
    """
    if reply.status_code != 200:
        raise error_from(reply)
    return reply


def error_from(reply: httpx.Response) -> EngineError:
    """The error that a reply stands for, be it a problem+json, SGLang's or vLLM's; for others one that quotes it."""
    try:
        body = reply.json()
        inner = body.get("error")
        if isinstance(inner, dict):
            code, field, message = inner.get("type"), inner.get("param"), inner["message"]
            hint, value = inner.get("hint"), None
        else:
            code, field, message = body.get("code"), body.get("field"), body.get("detail") or body["message"]
            hint, value = body.get("hint"), body.get("value")
    except (AttributeError, KeyError, TypeError, ValueError):
        return _from_text(reply)
    return from_message(ErrorMessage(code or "", reply.status_code, message, field, value, hint))


def _from_text(reply: httpx.Response) -> EngineError:
    text = reply.text.strip()[:200]
    message = text if reply.headers.get("content-type", "").startswith("text/plain") else ""
    message = message or f"status {reply.status_code}: {text}"
    return from_message(ErrorMessage("", reply.status_code, message))


def _items(named_tensors: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    return named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors


def _buckets(items: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in order, in lists of at most so many bytes; a larger tensor has one of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in items:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
