"""The fields of SGLang's control routes, with this project's own beside them, and the command that each stands for."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from engine_control.errors import InvalidRequestError, PayloadTooLargeError
from engine_control.server.bodies import Fields
from engine_control.wire import WireLimits

Command = tuple[str, dict[str, Any]]
Selector = Literal["target", "draft", "all"]
Version = str | int
MAX_BASE64_BYTES = WireLimits().max_header_bytes - 1024**2  # of one call; to the engine, text goes in a frame's header
GROUP = "weight_update_group"  # SGLang's default name


class SglangFields(Fields, frozen=True, kw_only=True):
    """Fields that stand for one command."""

    def command(self) -> Command:
        """The command's name and its arguments."""
        raise NotImplementedError


class BeginWeightUpdate(SglangFields, frozen=True, kw_only=True):
    """Opens the one session in which weights are updated. Pause generation before it, or requests wait meanwhile.

    `target_modules`: those that the session may touch (all, if left out). `partial`: not every weight of a touched
    module has to come. `staged`: steps go on, and the new weights are swapped in at the end. `manifest`: what will have
    been sent, checked at the end. `session_id`: a name of yours, which the other calls of the session then must give.
    """

    selector: Selector | None = None
    target_modules: list[str] | None = None
    partial: bool | None = None
    staged: bool | None = None
    in_place: bool | None = None
    session_id: str | None = None
    manifest: dict[str, Any] | None = None
    abort_all_requests: bool | None = None

    def command(self) -> Command:
        return "begin_weight_update", self.given()


class EndWeightUpdate(SglangFields, frozen=True, kw_only=True):
    """Checks that all weights have come, and makes them the weights; or refuses, and the old ones stay."""

    session_id: str | None = None
    weight_version: Version | None = None
    manifest: dict[str, Any] | None = None
    flush_cache: bool | None = None

    def command(self) -> Command:
        return "end_weight_update", with_version(self.given(), self.weight_version)


class AbortWeightUpdate(SglangFields, frozen=True, kw_only=True):
    """Ends the session as if it had never been: the old weights are the weights."""

    session_id: str | None = None

    def command(self) -> Command:
        return "abort_weight_update", self.given()


class UpdateWeights(SglangFields, frozen=True, kw_only=True):
    """What all update calls have in common. The other fields are the transport's."""

    transport: ClassVar[str] = ""
    SHARED: ClassVar[tuple[str, ...]] = (
        "session_id",
        "selector",
        "target_modules",
        "partial",
        "weight_version",
        "flush_cache",
        "abort_all_requests",
    )

    session_id: str | None = None
    selector: Selector | None = None
    target_modules: list[str] | None = None
    partial: bool | None = None
    weight_version: Version | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None

    def command(self) -> Command:
        info = {name: getattr(self, name) for name in self.__struct_fields__ if name not in self.SHARED}
        return update_command(self, self.transport, info)


class UpdateWeightsFromTensor(UpdateWeights, frozen=True, kw_only=True):
    """Weights in the body: one base64 text for each rank. Without base64: a body of type `application/vnd.safetensors`,
    which is one safetensors file, and the other fields in the query."""

    transport = "tensor"
    serialized_named_tensors: list[str]
    load_format: str | None = None
    payload_gpu_uuids: list[str] | None = None
    weight_update_mode: str | None = None
    lora_alpha: float | None = None
    lora_rank: int | None = None

    def command(self) -> Command:
        length = sum(map(len, self.serialized_named_tensors))
        if length > MAX_BASE64_BYTES:
            raise PayloadTooLargeError(
                f"{length} bytes of base64, at most {MAX_BASE64_BYTES} are read",
                field="serialized_named_tensors",
                value=length,
                hint="Send the tensors' bytes as a body of type application/vnd.safetensors, or fewer at once.",
            )
        return super().command()


class RawTensors(UpdateWeights, frozen=True, kw_only=True):
    """The query beside a body that is a safetensors file."""

    load_format: Literal["safetensors"] | None = None


class UpdateWeightsFromDistributed(UpdateWeights, frozen=True, kw_only=True):
    """Weights by broadcast from the trainer's rank 0, which begins it without waiting for the answer."""

    transport = "distributed"
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP
    load_format: str | None = None
    weight_update_mode: str | None = None
    lora_alpha: float | None = None
    lora_rank: int | None = None


class UpdateWeightsFromDisk(UpdateWeights, frozen=True, kw_only=True):
    """Weights from a folder that the server can read. Needs no session.

    is_async: between two steps of what is in flight, instead of after it. keep_pause: generation stays paused until it
    is continued. torch_empty_cache: torch's allocator gives back what it keeps. recapture_cuda_graph: graphs are
    captured anew. token_step: the trainer's step, kept in the history that /weight_info shows.
    """

    transport = "disk"
    SHARED: ClassVar[tuple[str, ...]] = (
        *UpdateWeights.SHARED,
        "is_async",
        "keep_pause",
        "torch_empty_cache",
        "recapture_cuda_graph",
        "token_step",
    )
    model_path: str
    load_format: str | None = None
    is_async: bool | None = None
    keep_pause: bool | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None


class UpdateWeightsFromIpc(UpdateWeights, frozen=True, kw_only=True):
    """Weights from memory of another process on this machine: `buffer` says which, `tensors` what lies where in it.
    (Not checkpoint-engine's `zmq_handles`.)"""

    transport = "ipc"
    buffer: Any = None
    tensors: Any = None
    zmq_handles: Any = None
    load_format: str | None = None

    def command(self) -> Command:
        if self.buffer is None or self.tensors is None:
            raise InvalidRequestError(
                "this server doesn't speak checkpoint-engine's ZeroMQ protocol, whose messages are pickles",
                code="unsupported_transport",
                field="zmq_handles",
                hint="Send buffer and tensors, or use update_weights_from_tensor or update_weights_from_distributed.",
            )
        return update_command(self, self.transport, {"buffer": self.buffer, "tensors": self.tensors})


class InitWeightsUpdateGroup(SglangFields, frozen=True, kw_only=True):
    """Joins a process group with a trainer, which must be joining it at the same time. The engine's first rank is
    `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: str | None = None

    def command(self) -> Command:
        return "init_weight_transfer", {"transport": "distributed", "info": self.given()}


class DestroyWeightsUpdateGroup(SglangFields, frozen=True, kw_only=True):
    """Leaves the group."""

    group_name: str = GROUP

    def command(self) -> Command:
        return "shutdown_weight_transfer", {"transport": "distributed", "info": self.given()}


class UpdateWeightVersion(SglangFields, frozen=True, kw_only=True):
    """Renames the weights as they are. Running requests go on unless `abort_all_requests` says otherwise."""

    new_version: Version
    abort_all_requests: bool | None = None

    def command(self) -> Command:
        return "update_weight_version", {**self.given(), "new_version": str(self.new_version)}


class GetWeightsByName(SglangFields, frozen=True, kw_only=True):
    """The first numbers of one weight."""

    name: str
    truncate_size: int | None = None
    module: str | None = None

    def command(self) -> Command:
        return "get_weights_by_name", self.given()


class GetWeightsChecksum(SglangFields, frozen=True, kw_only=True):
    """SHA-256 of each module's weights as they lie; `not_found` for a module that isn't there."""

    module_names: list[str] | None = None

    def command(self) -> Command:
        return "get_weights_checksum", self.given()


class CheckTensors(SglangFields, frozen=True, kw_only=True):
    """Whether a module's weights have these SHA-256 digests (of dtype, shape and bytes)."""

    target_module: str
    expected_named_tensors_sha256: dict[str, str]

    def command(self) -> Command:
        return "check_tensors", self.given()


class WeightsChecker(SglangFields, frozen=True, kw_only=True):
    """Digests of all weights; or keeps them, overwrites the weights, and compares. With `baseline`, `compare` is with
    those digests."""

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    baseline: dict[str, Any] | None = None

    def command(self) -> Command:
        return "weights_checker", self.given()


class PauseGeneration(SglangFields, frozen=True, kw_only=True):
    """Pauses generation; new requests wait until it continues. What is in flight is aborted, put back into the queue
    (`retract`), frozen (`in_place`), or finished first (`wait`). Pausing twice does no harm."""

    mode: Literal["abort", "retract", "in_place", "wait"] = "abort"

    def command(self) -> Command:
        return "pause_generation", {"mode": self.mode, "refuse_new": False}


class ContinueGeneration(SglangFields, frozen=True, kw_only=True):
    """Ends a pause; without one it does nothing."""

    torch_empty_cache: bool | None = None

    def command(self) -> Command:
        return "continue_generation", self.given()


class ReleaseMemory(SglangFields, frozen=True, kw_only=True):
    """Gives memory back, of all tags if none is named. `backup`: whether contents are kept in host memory. `wait`: lets
    finish what is in flight first, instead of refusing."""

    tags: list[str] | None = None
    backup: bool | None = None
    wait: bool | None = None

    def command(self) -> Command:
        return "release_memory_occupation", self.given()


class ResumeMemory(SglangFields, frozen=True, kw_only=True):
    """Takes memory again. Weights that were released without a backup are undefined until they are updated."""

    tags: list[str] | None = None

    def command(self) -> Command:
        return "resume_memory_occupation", self.given()


class FlushCache(SglangFields, frozen=True, kw_only=True):
    """Drops what is cached across requests; while some are in flight it is refused, at once or after `timeout` s."""

    timeout: float | None = None

    def command(self) -> Command:
        return "flush_cache", self.given()


class AbortRequest(SglangFields, frozen=True, kw_only=True):
    """Aborts every request whose id begins with `rid`, or all. One that isn't there is no error."""

    rid: str = ""
    abort_all: bool = False

    def command(self) -> Command:
        if self.abort_all:
            return "abort_requests", {"abort_all": True}
        return "abort_requests", {"rid_prefix": self.rid} if self.rid else {"rids": []}


def update_command(fields: UpdateWeights, transport: str, info: dict[str, Any]) -> Command:
    """`update_weights` with these fields of the transport's own. It may read `target_modules` too."""
    arguments = with_version(fields.given(*fields.SHARED), fields.weight_version)
    return "update_weights", {
        **arguments,
        "transport": transport,
        "info": {**info, "target_modules": fields.target_modules},
    }


def with_version(arguments: dict[str, Any], given: Version | None) -> dict[str, Any]:
    """The arguments, with the version, if there is one, as text: who counts may send the number."""
    return arguments if given is None else {**arguments, "weight_version": str(given)}
