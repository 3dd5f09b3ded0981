"""Weights from a folder: a diffusers pipeline, one module of one, a transformers checkpoint, or one safetensors file.

Files are read plainly, ahead of whom applies their tensors, and never mapped: a mapped file that somebody cuts short
would kill the process. What is half-written, or changes while it is read, is refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.backends._calls import Loader, as_is, items, load_format, one_module, target_modules
from engine_control.refit.backends._read_ahead import DEVICE_LOAD_BYTES, LOAD_BYTES, onto_device, onto_host, room_on
from engine_control.refit.backends._rooms import grouped
from engine_control.refit.backends.base import WeightItem, WeightTransport
from engine_control.refit.payload.layout import check_booleans, piece
from engine_control.refit.payload.safetensors_format import PREFIX_BYTES, Entry, entries, header_bytes

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
STEMS = ("diffusion_pytorch_model", "model")  # what diffusers and transformers call a file without a variant
SHARD = re.compile(r".*-(\d{5})-of-(\d{5})")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_INDEX_BYTES = 256 * 1024**2
FIELD = "model_path"

Seen = tuple[int, int, int]
"""A file's size, its time of change in ns, and its inode."""


@dataclass(frozen=True)
class CheckpointFile:
    """A safetensors file whose header was read and is sound; `entries` in the order of their bytes."""

    path: Path
    seen: Seen
    entries: tuple[Entry, ...]


class DiskTransport(WeightTransport):
    """`info`: `model_path`; `target_modules`, of a pipeline's folder all that the engine has if it is left out;
    `load_format`: null, `auto`, `safetensors`, or an allowed loader."""

    def receive(self, info: Mapping[str, Any]) -> Iterator[WeightItem]:
        _, loader = load_format(info, self.context, ("auto", "safetensors"))
        path = _existing(info.get("model_path"))
        plan = [(module, checkpoint_files(folder)) for module, folder in self._folders(path, info)]
        return self._read(plan, loader)

    def _folders(self, path: Path, info: Mapping[str, Any]) -> list[tuple[str | None, Path]]:
        """Which module lies where. Of a folder, or file, of one module it is the one that the call names, if any."""
        index = path / "model_index.json"
        if not path.is_dir() or not index.exists():
            return [(one_module(info, self.context), path)]
        listed = _json(index)
        parts = [
            name for name, value in listed.items() if isinstance(value, list) and all(isinstance(v, str) for v in value)
        ]
        wanted = target_modules(info, self.context)
        for module in wanted or ():
            if module not in parts or not (path / module).is_dir():
                raise RefitRefusedError(
                    f"the pipeline's folder has no module {module!r}",
                    field="target_modules",
                    value=module,
                    hint=f"Its modules: {', '.join(parts)}.",
                )
        chosen = wanted or [part for part in parts if part in self.context.weights and (path / part).is_dir()]
        if not chosen:
            raise RefitRefusedError(
                f"none of the folder's modules ({', '.join(parts)}) is one of this engine's",
                field=FIELD,
                value=str(path),
                hint=f"The engine has: {', '.join(sorted(self.context.weights))}.",
            )
        return [(module, path / module) for module in chosen]

    def _read(self, plan: list[tuple[str | None, list[CheckpointFile]]], loader: Loader) -> Iterator[WeightItem]:
        for module, files in plan:
            if loader is as_is:
                for name, tensor, more in _tensors(files, self._room(files)):
                    yield WeightItem(module, name, tensor, more=more)
            else:
                named = ((name, tensor) for name, tensor, _ in _tensors(files, None, reuse=False))
                yield from items(module, loader(named), field=FIELD)
        for _, files in plan:
            for file in files:
                _check_unchanged(file.path, file.seen)

    def _room(self, files: list[CheckpointFile]) -> torch.Tensor | None:
        """Where loads go on a GPU. None: on the host, the engine's device or as the GPU is full."""
        if self.context.device.type != "cuda":
            return None
        groups = [group for file in files for group in _groups(file, DEVICE_LOAD_BYTES)]
        return room_on(self.context.device, max((group[-1].end - group[0].start for group in groups), default=0))


@dataclass(frozen=True)
class _Load:
    """Tensors that lie behind each other in an open file."""

    path: Path
    descriptor: int
    entries: Sequence[Entry]

    @property
    def start(self) -> int:
        return self.entries[0].start

    @property
    def nbytes(self) -> int:
        return self.entries[-1].end - self.start

    def read(self, start: int, view: memoryview) -> None:
        try:
            whole = _fill(self.descriptor, self.start + start, view)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not whole:
            raise _changed(self.path)


def checkpoint_files(path: Path) -> list[CheckpointFile]:
    """The safetensors files of one module, by name, with sound headers: together each tensor once, and exactly those of
    the index if there is one.

    Raises:
        RefitRefusedError: naming the file or the tensor.
    """
    if not path.is_dir():
        if path.suffix != SUFFIX:
            raise _refused("it is no safetensors file", path, hint="Convert to safetensors.")
        return [_opened_file(path, path.parent)]
    names = sorted(p.name for p in path.iterdir())
    index = _index_name(path, names)
    shards = _index_of(path / index) if index else None
    chosen = sorted(set(shards.values())) if shards is not None else _without_index(path, names)
    for name in chosen:
        if name not in names:
            raise _refused(f"shard {name!r} of the index is not there", path, hint="Wait until all is written.")
    files = [_opened_file(path / name, path) for name in chosen]
    _check_names(files, shards)
    return files


def _check_names(files: list[CheckpointFile], shards: Mapping[str, str] | None) -> None:
    owner: dict[str, str] = {}
    for file in files:
        for entry in file.entries:
            if entry.name in owner:
                raise RefitRefusedError(
                    f"the tensor is in {owner[entry.name]!r} and in {file.path.name!r}", field=entry.name
                )
            if shards is not None and shards.get(entry.name) != file.path.name:
                raise RefitRefusedError(
                    f"the tensor is in {file.path.name!r}, and not there in the index", field=entry.name
                )
            owner[entry.name] = file.path.name
    for name in shards or ():
        if name not in owner:
            raise RefitRefusedError(f"the index has the tensor in {(shards or {})[name]!r}, where it isn't", field=name)


def _index_name(folder: Path, names: list[str]) -> str | None:
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    plain = [name for name in indices if name.removesuffix(INDEX_SUFFIX) in STEMS]
    whole = [stem + SUFFIX for stem in STEMS if stem + SUFFIX in names]
    chosen = plain or ([] if whole else indices)
    if len(chosen) > 1 or (chosen and whole):
        both = ", ".join([*chosen, *whole])
        raise _refused(f"it holds several checkpoints: {both}", folder, hint="Remove the stale one.")
    return chosen[0] if chosen else None


def _index_of(path: Path) -> Mapping[str, str]:
    table = _json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise _refused("the index has no weight_map", path)
    for shard in table.values():
        if not isinstance(shard, str) or not shard.endswith(SUFFIX) or not _plain(shard):
            raise RefitRefusedError(
                f"{path.name} names a shard that is no safetensors file of its folder", field=FIELD, value=shard
            )
    return table


def _without_index(folder: Path, names: list[str]) -> list[str]:
    found = [name for name in names if name.endswith(SUFFIX)]
    whole = [stem + SUFFIX for stem in STEMS if stem + SUFFIX in found]
    if len(whole) == 1:
        return whole
    if not found:
        pickled = [name for name in names if name.endswith(PICKLES)]
        hint = "Convert to safetensors." if pickled else "Name a folder with safetensors files, or one such file."
        held = f"only {pickled[0]!r} and the like" if pickled else "none"
        raise _refused(f"no safetensors file in the folder, {held}", folder, hint=hint)
    shards = [match for name in found if (match := SHARD.fullmatch(name.removesuffix(SUFFIX)))]
    if shards and len(shards) != int(shards[0][2]):
        raise _refused(
            f"{len(shards)} of {int(shards[0][2])} shards, and no index", folder, hint="Wait until all is written."
        )
    if len(whole) > 1 or (len(found) > 1 and len(shards) != len(found)):
        raise _refused(
            f"several safetensors files and no index: {', '.join(found)}", folder, hint="Name one of the files."
        )
    return found


def _opened_file(path: Path, folder: Path) -> CheckpointFile:
    _check_place(path, folder)
    with _open(path) as descriptor:
        seen = _seen(os.fstat(descriptor))
        total = seen[0]
        length = header_bytes(_bytes(descriptor, 0, min(PREFIX_BYTES, total)), total, field=str(path))
        found = entries(_bytes(descriptor, PREFIX_BYTES, length), total, field=str(path))
    return CheckpointFile(path, seen, tuple(found))


def _tensors(
    files: list[CheckpointFile], room: torch.Tensor | None, *, reuse: bool = True
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Names, tensors (in `room`, or on the host), and whether a tensor holds until the next one. Without `reuse` all
    hold."""
    with ExitStack() as opened:
        if room is None:
            arrivals = onto_host(_loads(files, LOAD_BYTES, opened), reuse=reuse)
        else:
            arrivals = onto_device(_loads(files, DEVICE_LOAD_BYTES, opened), room)
        with closing(arrivals):  # and with it all reading, before the files
            for load, flat in arrivals:
                for entry in load.entries:
                    value = piece(flat, entry.start - load.start, entry.dtype, entry.shape)
                    yield entry.name, check_booleans(value, name=entry.name), entry is not load.entries[-1]


def _loads(files: list[CheckpointFile], nbytes: int, opened: ExitStack) -> Iterator[_Load]:
    """`opened` closes the files."""
    for file in files:
        descriptor = opened.enter_context(_open(file.path))
        if _seen(os.fstat(descriptor)) != file.seen:
            raise _changed(file.path)
        yield from (_Load(file.path, descriptor, group) for group in _groups(file, nbytes))


def _groups(file: CheckpointFile, nbytes: int) -> Iterator[list[Entry]]:
    return grouped(file.entries, lambda entry: entry.end - entry.start, over=nbytes - 1)


def _existing(value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise RefitRefusedError("not a path", field=FIELD, value=value, hint="Send the path of a folder or file.")
    path = Path(value)
    if not os.path.exists(path):  # pathlib's raises where one may not look
        raise _refused("there is no such folder or file", path, hint="The path must be one that the server can read.")
    return path


def _plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _check_place(path: Path, folder: Path) -> None:
    """A file of the folder, or what the hub's cache links to from there: `blobs` of a folder above it."""
    real, root = path.resolve(), folder.resolve()
    in_blobs = real.parent.name == "blobs" and root.is_relative_to(real.parent.parent)
    if not (real.is_relative_to(root) or in_blobs):
        raise RefitRefusedError(
            f"{path.name} is a link to a file outside of its folder",
            field=FIELD,
            value=str(path),
            hint="Copy it there, or name the folder that it is in.",
        )


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """The file's descriptor. Not waiting: nobody may ever write into a pipe of that name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refused("it is no regular file", path)
        yield descriptor
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def _fill(descriptor: int, start: int, view: memoryview) -> bool:
    """Reads the whole view from byte `start` on; False if the file ends before."""
    while view.nbytes:
        count = os.preadv(descriptor, [view], start)
        if count == 0:
            return False
        view, start = view[count:], start + count
    return True


def _bytes(descriptor: int, start: int, count: int) -> bytearray:
    data = bytearray(count)
    return data if _fill(descriptor, start, memoryview(data)) else bytearray()


def _json(path: Path) -> dict[str, Any]:
    with _open(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_INDEX_BYTES:
            raise _refused(f"{size} bytes, at most {MAX_INDEX_BYTES} are read", path)
        data = _bytes(descriptor, 0, size)
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON: {error}", path, hint="Is it half-written?") from error
    if not isinstance(table, dict):
        raise _refused("it is no JSON object", path)
    return table


def _seen(found: os.stat_result) -> Seen:
    return found.st_size, found.st_mtime_ns, found.st_ino


def _check_unchanged(path: Path, seen: Seen) -> None:
    try:
        now = _seen(path.stat())
    except OSError as error:
        raise _unreadable(path, error) from error
    if now != seen:
        raise _changed(path)


def _refused(message: str, path: Path, *, hint: str | None = None) -> RefitRefusedError:
    return RefitRefusedError(message, field=FIELD, value=str(path), hint=hint)


def _unreadable(path: Path, error: OSError) -> RefitRefusedError:
    return _refused(f"it can't be read: {error.strerror}", path, hint="Was it deleted meanwhile?")


def _changed(path: Path) -> RefitRefusedError:
    return _refused("it changed while it was read", path, hint="Write a checkpoint whole before you name it.")
