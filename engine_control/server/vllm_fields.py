"""The fields of vLLM's control routes, and what they mean in this project's commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from engine_control.errors import InvalidRequestError
from engine_control.server.bodies import Fields
from engine_control.server.sglang_fields import GROUP, BeginWeightUpdate, Version

PauseMode = Literal["abort", "wait", "keep"]
Info = dict[str, Any]


class Pause(Fields, frozen=True, kw_only=True):
    """`abort` and `wait` refuse new requests with 503 meanwhile; with `keep` they wait."""

    mode: PauseMode = "abort"
    clear_cache: bool = True


class Nothing(Fields, frozen=True, kw_only=True):
    """No fields."""


class AbortRequests(Fields, frozen=True, kw_only=True):
    """Without ids all requests are aborted, so at least `{}` must be sent."""

    body_required: ClassVar[bool] = True
    request_ids: list[str] | None = None


class InitTransfer(Fields, frozen=True, kw_only=True):
    """`init_info` is the transport's: with `master_address` it is a process group, else memory of this machine."""

    init_info: Info


class StartWeightUpdate(BeginWeightUpdate, frozen=True, kw_only=True):
    """vLLM's has no fields; those of `/begin_weight_update` are taken."""


class UpdateWeights(Fields, frozen=True, kw_only=True):
    """`update_info`: the transport's fields, or a list of them, one for each rank. `weight_dir` (prime-rl's): a folder
    to load from instead."""

    update_info: Info | list[Info] | None = None
    weight_dir: str | None = None
    session_id: str | None = None


class FinishWeightUpdate(Fields, frozen=True, kw_only=True):
    """What the weights are called from now on."""

    weight_version: Version | None = None
    session_id: str | None = None


class WeightChecker(Fields, frozen=True, kw_only=True):
    """Digests, overwriting the weights for a test, or comparing with digests."""

    action: Literal["checksum", "reset", "compare"] = "checksum"
    baseline: Info | None = None


class Sleep(Fields, frozen=True, kw_only=True):
    """Level 0 pauses only; 1 keeps what it releases in host memory; 2 keeps nothing."""

    level: Literal[0, 1, 2] = 1
    mode: PauseMode = "abort"


class WakeUp(Fields, frozen=True, kw_only=True):
    """Tags to resume; all if there are none. Those that aren't released are let pass."""

    tags: list[str] | None = None


class ResetPrefixCache(Fields, frozen=True, kw_only=True):
    """`reset_running_requests`: requests in flight start anew, instead of standing in the way."""

    reset_running_requests: bool = False


class CollectiveRpc(Fields, frozen=True, kw_only=True):
    """A method's name and its arguments, positional ones or by name."""

    method: str
    args: list[Any] | None = None
    kwargs: Info | None = None

    def arguments(self, *names: str) -> Info:
        """The arguments by name; the positional ones are in the order of `names`."""
        return {**dict(zip(names, self.args or [], strict=False)), **(self.kwargs or {})}


def pause_mode(mode: PauseMode, *, clear_cache: bool) -> str:
    """The command's mode. What vLLM keeps and clears is what SGLang retracts."""
    if mode != "keep":
        return mode
    return "retract" if clear_cache else "in_place"


def init_transport(info: Mapping[str, Any], configured: str | None) -> str:
    """Which transport an `init_info` opens."""
    if "master_address" in info or "nccl_unique_id_b64" in info:
        return "distributed"
    return configured or "ipc"


def update_transport(info: Mapping[str, Any], configured: str | None) -> str:
    """Which transport an `update_info` comes by."""
    if info.keys() & {"ipc_handles", "ipc_handles_pickled", "buffer"}:
        return "ipc"
    if "model_path" in info:
        return "disk"
    return configured or "distributed"


def init_info(info: Mapping[str, Any]) -> Info:
    """With the group's name, of which vLLM has none."""
    return {"group_name": GROUP, **info}


def update_info(given: object) -> Info:
    """One `update_info`: with SGLang's name for the dtypes too; a list, of one for each rank, as `per_rank`.

    Raises:
        InvalidRequestError: it is none.
    """
    if isinstance(given, str):  # SkyRL's, within an RPC
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"update_info is not JSON: {error}", field="update_info") from error
    if isinstance(given, Sequence) and given and all(isinstance(item, Mapping) for item in given):
        ranks = [update_info(item) for item in given]
        return ranks[0] if all(item == ranks[0] for item in ranks) else {**ranks[0], "per_rank": ranks}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            "update_info must be an object, or a list of one for each rank",
            field="update_info",
            value=given,
            hint="Send names, dtype_names and shapes in it; or weight_dir instead.",
        )
    names = {"dtypes": given["dtype_names"]} if "dtype_names" in given else {}
    return {"group_name": GROUP, **names, **given}
