"""Weights in the request itself: safetensors bytes, or handles to memory of a trainer on the same host.

The handles come as SGLang-style trainers send them, base64 of a pickle, which is read as data (`payload.unpickler`).
The receiver maps the sender's memory, so the sender keeps its tensors, unchanged, until the reply has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.backends._calls import Loader, items, load_format, one_module, refuse_modes, target_modules
from engine_control.refit.backends.base import WeightItem, WeightTransport
from engine_control.refit.payload.bucket import flatten, unflatten
from engine_control.refit.payload.devices import device_uuid, plain_uuid, release_imports
from engine_control.refit.payload.rebuild import SERIALIZED_TENSOR, load_payload
from engine_control.refit.payload.safetensors_format import file_bytes, tensors
from engine_control.refit.payload.serializer import entry_of_rank, from_text, pickle_from, to_text
from engine_control.refit.payload.unpickler import FIELD, Holder

FORMATS = ("direct", "flattened_bucket", "safetensors")


class TensorTransport(WeightTransport):
    """`info`: `serialized_named_tensors`, a text for each rank, or `safetensors`, the bytes (of each rank); which entry
    a rank takes can be said by `payload_gpu_uuids`; `load_format`: null, `direct`, `flattened_bucket`, `safetensors`,
    or an allowed loader; `target_modules`."""

    def receive(self, info: Mapping[str, Any]) -> Iterator[WeightItem]:
        refuse_modes(info)
        form, loader = load_format(info, self.context, FORMATS)
        if form == "safetensors" or info.get("safetensors") is not None:
            return self._files(info, loader)
        text = self._entry(info.get(FIELD), info, field=FIELD)
        modules = target_modules(info, self.context)
        alone = one_module(info, self.context) if modules is None or len(modules) == 1 else None
        return self._mapped(pickle_from(text), form, modules, alone, loader)

    def _entry(self, entries: object, info: Mapping[str, Any], *, field: str) -> Any:
        """This rank's entry; the others are not looked at, since opening one takes it from its rank."""
        if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
            raise RefitRefusedError("not a list of payloads", field=field, hint="Send one for each rank.")
        uuids = info.get("payload_gpu_uuids")
        if uuids is None:
            return entries[entry_of_rank(entries, self.context.rank, self.context.world_size, field=field)]
        if not isinstance(uuids, Sequence) or isinstance(uuids, str) or len(uuids) != len(entries):
            raise RefitRefusedError(
                "not a UUID for each payload", field="payload_gpu_uuids", value=uuids, hint="Name each payload's GPU."
            )
        own, theirs = device_uuid(self.context.device), [plain_uuid(uuid) for uuid in uuids]
        if own is None or own not in theirs:
            raise RefitRefusedError(
                f"no payload was exported from this rank's device {own or self.context.device}",
                field="payload_gpu_uuids",
                value=", ".join(theirs),
                hint="Export from the GPU that the rank computes on, or send safetensors.",
            )
        return entries[theirs.index(own)]

    def _files(self, info: Mapping[str, Any], loader: Loader) -> Iterator[WeightItem]:
        data = info.get("safetensors")
        field = "safetensors"
        if data is None:
            field = FIELD
            data = from_text(self._entry(info.get(FIELD), info, field=FIELD))
        elif isinstance(data, list | tuple):
            data = self._entry(data, info, field=field)
        if not isinstance(data, bytes | bytearray | memoryview | torch.Tensor):
            raise RefitRefusedError(f"a {type(data).__name__} is no safetensors file", field=field, hint="Send bytes.")
        return items(one_module(info, self.context), loader(tensors(data, field=field)), field=field)

    def _mapped(
        self, data: bytes, form: str | None, modules: list[str] | None, alone: str | None, loader: Loader
    ) -> Iterator[WeightItem]:
        payload, part = load_payload(data), None
        try:
            for part in self._parts(payload, form, modules, alone):
                yield from items(part[0], loader(part[1]), field=FIELD)
        finally:
            payload = part = None  # the mappings end with their last reference
            release_imports(self.context.device)

    def _parts(
        self, payload: Any, form: str | None, modules: list[str] | None, alone: str | None
    ) -> Iterator[tuple[str | None, Iterable[tuple[str, torch.Tensor]]]]:
        """Each module of the payload with its tensors."""
        by_module = isinstance(payload, dict) and not _is_bucket(payload)
        if not by_module and modules is not None and len(modules) != 1:
            raise RefitRefusedError(
                f"the payload is of one module, and {len(modules)} are named",
                field="target_modules",
                value=", ".join(modules),
                hint="Send an object by module, or name exactly one.",
            )
        parts = payload if by_module else {alone: payload}
        for module in parts:
            if by_module and module not in (modules or self.context.weights):
                raise RefitRefusedError(
                    f"the payload has a module {module!r} that the call does not mean",
                    code="unknown_module",
                    field=FIELD,
                    value=module,
                    hint=f"Expected: {', '.join(modules or sorted(self.context.weights))}.",
                )
        for module, part in parts.items():
            if form == "flattened_bucket":
                yield module, unflatten(_as_bucket(part), field=FIELD)
            else:
                yield module, self._named(part)

    def _named(self, part: object) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(part, list | tuple):
            raise RefitRefusedError(
                f"a {type(part).__name__} instead of a list of names and tensors",
                field=FIELD,
                hint="A bucket needs load_format 'flattened_bucket'.",
            )
        for pair in part:
            if isinstance(pair, list | tuple) and len(pair) == 2:
                yield pair[0], self._unwrapped(pair[0], pair[1])
            else:
                raise RefitRefusedError("not a name and a tensor", field=FIELD, value=type(pair).__name__)

    def _unwrapped(self, name: object, value: Any) -> Any:
        """The tensor, out of a list that has it for each rank if that is what came."""
        if not isinstance(value, Holder) or value.cls.name != SERIALIZED_TENSOR:
            return value
        each = value.state.get("values")
        if not isinstance(each, list | tuple) or not each:
            raise RefitRefusedError("values is not a list of payloads", field=str(name))
        index = entry_of_rank(each, self.context.rank, self.context.world_size, field=str(name))
        return load_payload(pickle_from(each[index], field=str(name)))


def _is_bucket(value: object) -> bool:
    return isinstance(value, dict) and {"flattened_tensor", "metadata"} <= set(value)


def _as_bucket(value: object) -> object:
    """A bucket as a dict, also of one that was sent as an instance of its class."""
    return dict(value.state) if isinstance(value, Holder) else value


class Payload(str):
    """The text of a payload. While it lives, so do the tensors that it points to."""

    tensors: list[tuple[str, torch.Tensor]]


def serialize_named_tensors(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, load_format: str | None = None
) -> Payload:
    """A payload for one rank, an entry of `serialized_named_tensors`, without the tensors' bytes.

    It holds handles: to the tensors' own CUDA memory (CUDA IPC, which memory from a pool of virtual addresses doesn't
    have), or to copies in shared memory of tensors on the CPU. Send it once, to the same host; keep it, and the tensors
    unchanged, until the reply has come.

    load_format: null, or `flattened_bucket` (one copy of all), which the call has to say too.
    """
    kept = [(name, t.detach().clone() if t.device.type == "cpu" else t.detach()) for name, t in named_tensors]
    if load_format == "flattened_bucket":
        flat, metadata = flatten(kept)
        payload = Payload(to_text({"flattened_tensor": flat, "metadata": [vars(entry) for entry in metadata]}))
        payload.tensors = [("flattened_tensor", flat)]
        return payload
    if load_format not in (None, "direct"):
        raise ValueError(f"load_format {load_format!r}: known are None, 'direct' and 'flattened_bucket'")
    payload = Payload(to_text(kept))
    payload.tensors = kept
    return payload


def safetensors_payload(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """A payload with the tensors' bytes, for `load_format` `safetensors`: it goes to any host and any rank.

    Raises:
        ValueError: a name twice, or a dtype that safetensors has no code for.
    """
    return bytes(file_bytes(named_tensors))
