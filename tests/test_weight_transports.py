"""Weight transports, each between real processes: ranks of an engine on one side, a trainer on the other."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine_control.config import RankSettings
from engine_control.errors import EngineError, InvalidRequestError, RefitRefusedError
from engine_control.rank import RankCommand, RankControl
from engine_control.refit.backends import (
    TransportContext,
    WeightItem,
    WeightTransport,
    _read_ahead,
    disk,
    distributed,
    transports,
)
from engine_control.refit.backends._calls import Announced, Said, announced_again
from engine_control.refit.backends._group import BroadcastError, BroadcastGroup
from engine_control.refit.backends.distributed import Channel, WeightSender, _chunks
from engine_control.refit.backends.ipc import IpcSender
from engine_control.refit.backends.tensor import safetensors_payload, serialize_named_tensors
from engine_control.refit.payload.bucket import flatten
from engine_control.refit.payload.layout import as_bytes
from engine_control.refit.payload.serializer import to_text
from engine_control.refit.shared_buffers import HostBuffer
from engine_control.refit.target import ModuleTarget, TensorInfo

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 20.0
NAMED = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "bf16": torch.randn(2, 3).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "fp32": torch.randn(5, 7),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}
MODULES = {"transformer": {"w": TensorInfo((2,), torch.float32)}, "vae": {}, "text_encoder": {}}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def transport(name: str, *, rank: int = 0, ranks: int = 1, **context: Any) -> WeightTransport:
    device = torch.device(context.pop("device", "cpu"))
    return transports.get(name)(TransportContext(rank, ranks, device, MODULES, **context))


def received(items: Any) -> list[tuple[str | None, str, torch.Tensor]]:
    return [(item.module, item.name, item.tensor.detach().clone()) for item in items]


def assert_same(items: Any, expected: dict[str, torch.Tensor], module: str | None = None) -> None:
    found = [(m, n, str(t.dtype), list(t.shape), bytes(as_bytes(t).cpu().numpy())) for m, n, t in received(items)]
    assert sorted(found) == sorted(
        (module, n, str(t.dtype), list(t.shape), bytes(as_bytes(t).cpu().numpy())) for n, t in expected.items()
    )


class Rank:
    """A rank of an engine, in a process of its own."""

    def __init__(self, rank: int, ranks: int, device: str = "cpu") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "weight_rank.py"), str(rank), str(ranks), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, call: str, transport: str, info: dict[str, Any], **more: Any) -> None:
        command = {"call": call, "transport": transport, "info": info, "timeout_s": TIMEOUT_S, **more}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, call: str, transport: str, info: dict[str, Any], **more: Any) -> Any:
        self.ask(call, transport, info, **more)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Rank]]:
    started = [Rank(rank, 2) for rank in range(2)]
    assert [rank.answer() for rank in started] == ["ready", "ready"]
    yield started
    for rank in started:
        rank.end()


def as_sent(named: dict[str, torch.Tensor], module: str | None = None) -> list[list[Any]]:
    """What a rank answers that has received these tensors, in this order."""
    return [
        [module, n, str(t.dtype), list(t.shape), base64.b64encode(bytes(as_bytes(t).cpu().numpy())).decode()]
        for n, t in named.items()
    ]


# disk


def write(folder: Path, named: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(safetensors.torch.save(named))
    return folder


def sharded(folder: Path, shards: list[dict[str, torch.Tensor]], stem: str = "model") -> Path:
    weight_map = {}
    for number, named in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder, named, file)
        weight_map.update(dict.fromkeys(named, file))
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


HALVES = [dict(list(NAMED.items())[:3]), dict(list(NAMED.items())[3:])]


def from_disk(path: Path, **info: Any) -> Iterator[Any]:
    return transport("disk").receive({"model_path": str(path), **info})


def test_a_file_a_folder_and_a_folder_of_shards_hold_the_same_weights(tmp_path: Path) -> None:
    one = write(tmp_path / "one", NAMED)
    assert_same(from_disk(one), NAMED)
    assert_same(from_disk(one / "model.safetensors", load_format="safetensors"), NAMED)
    assert_same(from_disk(one, target_modules=["vae"], load_format="auto"), NAMED, "vae")
    assert_same(from_disk(sharded(tmp_path / "shards", HALVES)), NAMED)


def test_a_pipelines_folder_yields_the_modules_that_the_engine_has_or_those_that_are_named(tmp_path: Path) -> None:
    listed = {name: ["diffusers", "X"] for name in ("transformer", "vae", "scheduler", "other")}
    tmp_path.joinpath("model_index.json").write_text(json.dumps({"_class_name": "P", **listed, "flag": True}))
    sharded(tmp_path / "transformer", HALVES, "diffusion_pytorch_model")
    write(tmp_path / "vae", {"v": torch.ones(2)}, "diffusion_pytorch_model.safetensors")
    write(tmp_path / "vae", {"v": torch.ones(2).half()}, "diffusion_pytorch_model.fp16.safetensors")
    write(tmp_path / "other", {"o": torch.ones(2)})
    (tmp_path / "scheduler").mkdir()
    assert sorted({(m, n) for m, n, _ in received(from_disk(tmp_path))}) == sorted(
        [*(("transformer", n) for n in NAMED), ("vae", "v")]
    )
    assert_same(from_disk(tmp_path, target_modules=["vae"]), {"v": torch.ones(2)}, "vae")
    for wrong in (["text_encoder"], ["other"], [], "vae"):
        with pytest.raises(RefitRefusedError, match="module"):
            list(from_disk(tmp_path, target_modules=wrong))


def test_the_hubs_links_to_blobs_are_followed_and_links_elsewhere_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "models--x" / "snapshots" / "1" / "transformer"
    blobs = write(tmp_path / "models--x" / "blobs", NAMED, "abc")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(blobs / "abc")
    assert_same(from_disk(folder), NAMED)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(write(tmp_path / "elsewhere", NAMED) / "model.safetensors")
    with pytest.raises(RefitRefusedError, match="outside of its folder"):
        list(from_disk(folder))


def no_folder(folder: Path) -> None:
    pass


def nothing_in_it(folder: Path) -> None:
    folder.mkdir()


def pickles_only(folder: Path) -> None:
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def a_shard_missing(folder: Path) -> None:
    sharded(folder, HALVES).joinpath("model-00002-of-00002.safetensors").unlink()


def a_shard_missing_and_no_index_yet(folder: Path) -> None:
    write(folder, HALVES[0], "model-00001-of-00002.safetensors")


def a_tensor_not_in_its_shard(folder: Path) -> None:
    write(sharded(folder, HALVES), {"odd": NAMED["odd"]}, "model-00001-of-00002.safetensors")


def a_tensor_not_in_the_index(folder: Path) -> None:
    write(sharded(folder, HALVES), {**HALVES[1], "more": torch.ones(1)}, "model-00002-of-00002.safetensors")


def a_tensor_in_two_shards(folder: Path) -> None:
    write(sharded(folder, HALVES), {**HALVES[1], "odd": NAMED["odd"]}, "model-00002-of-00002.safetensors")


def a_tensor_in_two_files_without_an_index(folder: Path) -> None:
    a_tensor_in_two_shards(folder)
    (folder / "model.safetensors.index.json").unlink()


def a_shard_elsewhere(folder: Path) -> None:
    write(folder.parent, NAMED)
    folder.mkdir()
    index = {"weight_map": dict.fromkeys(NAMED, "../model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def a_half_written_index(folder: Path) -> None:
    index = sharded(folder, HALVES) / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes()[:-20])


def a_half_written_file(folder: Path) -> None:
    file = write(folder, NAMED) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def a_file_that_grew(folder: Path) -> None:
    with (write(folder, NAMED) / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def an_empty_file(folder: Path) -> None:
    (write(folder, NAMED) / "model.safetensors").write_bytes(b"")


def a_pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "model.safetensors")


def two_checkpoints(folder: Path) -> None:
    write(sharded(folder, HALVES), NAMED)


def files_without_a_name_of_the_field(folder: Path) -> None:
    write(write(folder, HALVES[0], "a.safetensors"), HALVES[1], "b.safetensors")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_folder, "no such folder"),
        (nothing_in_it, "no safetensors file"),
        (pickles_only, "Convert to safetensors"),
        (a_shard_missing, "shard 'model-00002-of-00002.safetensors' of the index is not there"),
        (a_shard_missing_and_no_index_yet, "1 of 2 shards"),
        (a_tensor_not_in_its_shard, "where it isn't"),
        (a_tensor_not_in_the_index, "field 'more'"),
        (a_tensor_in_two_shards, "field 'odd'"),
        (a_tensor_in_two_files_without_an_index, "is in 'model-00001-of-00002.safetensors' and in"),
        (a_shard_elsewhere, "of its folder"),
        (a_half_written_index, "not JSON"),
        (a_half_written_file, "truncated"),
        (a_file_that_grew, "behind its last tensor"),
        (an_empty_file, "no safetensors file"),
        (a_pipe, "no regular file"),
        (two_checkpoints, "several checkpoints"),
        (files_without_a_name_of_the_field, "several safetensors files"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(RefitRefusedError, match=message):
        list(from_disk(tmp_path / "x"))


def test_a_path_of_another_kind_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    for path in (None, "", 3, "a\0b"):
        with pytest.raises(RefitRefusedError, match="model_path"):
            list(transport("disk").receive({"model_path": path}))
    with pytest.raises(RefitRefusedError, match="load_format"):
        list(from_disk(write(tmp_path, NAMED), load_format="pickle"))


def cut(file: Path) -> None:
    os.truncate(file, 100)


def replace(file: Path) -> None:
    other = file.with_name("new")
    other.write_bytes(file.read_bytes())
    other.replace(file)


def rewrite(file: Path) -> None:
    time.sleep(0.02)  # the clock of files ticks every few milliseconds
    file.write_bytes(file.read_bytes())


@pytest.mark.parametrize("change", [cut, replace, rewrite, Path.unlink])
def test_a_file_that_changes_while_it_is_read_is_refused(change: Callable[[Path], None], tmp_path: Path) -> None:
    items = from_disk(write(tmp_path, NAMED))
    next(items)
    change(tmp_path / "model.safetensors")
    with pytest.raises(RefitRefusedError, match=r"changed while|can't be read"):
        list(items)


def kept(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(named)


@pytest.mark.parametrize("way", ["through the host", "through a GPU's ring", "a loader that keeps tensors"])
def test_a_checkpoint_of_many_loads_and_pieces_arrives_whole(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_read_ahead, "PIECE_BYTES", 1000)
    monkeypatch.setattr(_read_ahead, "SLOTS", 4)
    for name in ("LOAD_BYTES", "DEVICE_LOAD_BYTES"):
        monkeypatch.setattr(disk, name, 3000)
    if way == "through a GPU's ring":
        monkeypatch.setattr(disk.DiskTransport, "_room", lambda self, files: torch.empty(30_000, dtype=torch.uint8))
    named = {f"w{i}": torch.randn(1 + 97 * i % 1300) for i in range(40)} | {"large": torch.randn(7001)}
    folder = sharded(tmp_path, [dict(list(named.items())[:30]), dict(list(named.items())[30:])])
    keeps = way == "a loader that keeps tensors"
    monkeypatch.setitem(sys.modules, __name__, sys.modules[kept.__module__])
    fields = {"model_path": str(folder), **({"load_format": f"{__name__}:kept"} if keeps else {})}
    waiting, found, most = [], {}, 0
    for item in transport("disk", load_formats=[f"{__name__}:kept"]).receive(fields):
        waiting.append(item)
        if not item.more:
            most = max(most, len(waiting))
            found |= {one.name: one.tensor.clone() for one in waiting}
            waiting = []
    assert not waiting
    assert (most == 1) == keeps
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], named[name]) for name in named)


@pytest.mark.parametrize("ring", [False, True])
def test_what_is_cut_short_behind_the_first_load_is_refused_and_an_unfinished_call_leaves_no_file_open(
    ring: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOAD_BYTES", "DEVICE_LOAD_BYTES"):
        monkeypatch.setattr(disk, name, 1)
    monkeypatch.setattr(_read_ahead, "SLOTS", 2)
    if ring:
        monkeypatch.setattr(disk.DiskTransport, "_room", lambda self, files: torch.empty(4000, dtype=torch.uint8))
    folder = write(tmp_path, {f"w{i}": torch.randn(1000) for i in range(9)})
    file = folder / "model.safetensors"
    before = len(os.listdir("/proc/self/fd"))
    unfinished = from_disk(folder)
    next(unfinished)
    unfinished.close()
    assert len(os.listdir("/proc/self/fd")) == before
    items = from_disk(folder)
    next(items)
    os.truncate(file, file.stat().st_size - 4000)
    came: list[str] = []
    with pytest.raises(RefitRefusedError, match="changed while"):
        came.extend(item.name for item in items)
    assert len(came) < 8  # nothing stands for the last one, which isn't there
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_loader_is_called_only_if_the_configuration_allows_it(tmp_path: Path) -> None:
    path = f"{__name__}:doubled"
    sys.modules.setdefault(__name__, sys.modules[doubled.__module__])
    reader = transport("disk", load_formats=[path])
    write(tmp_path, {"w": torch.ones(2)})
    assert_same(reader.receive({"model_path": str(tmp_path), "load_format": path}), {"x.w": torch.full((2,), 2.0)})
    with pytest.raises(RefitRefusedError, match="load_format"):
        list(from_disk(tmp_path, load_format=path))


def doubled(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named:
        yield "x." + name, tensor * 2


# tensor

TRAINER = """
import json, sys, types
import torch, torch.multiprocessing
from dataclasses import dataclass
sys.path.insert(0, sys.argv[1])
from engine_control.refit.payload.serializer import to_text
torch.multiprocessing.set_sharing_strategy("file_system")

def known_as(module, cls):
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    setattr(sys.modules[module], cls.__name__, cls)
    cls.__module__, cls.__qualname__ = module, cls.__name__
    return cls

@dataclass
class FlattenedTensorMetadata:
    name: str; shape: torch.Size; dtype: torch.dtype; start_idx: int; end_idx: int; numel: int

@dataclass
class LocalSerializedTensor:
    values: list

known_as("sglang.srt.weight_sync.tensor_bucket", FlattenedTensorMetadata)
known_as("sglang.srt.model_executor.model_runner", LocalSerializedTensor)
a, b = torch.arange(6.0).reshape(2, 3), torch.arange(3, dtype=torch.uint8)
flat = torch.cat([b, a.flatten().view(torch.uint8)])
bucket = {"flattened_tensor": flat, "metadata": [
    FlattenedTensorMetadata("b", b.shape, b.dtype, 0, 3, 3), FlattenedTensorMetadata("a", a.shape, a.dtype, 3, 27, 24)]}
both = torch.stack([a, a])
texts = {
    "list": to_text([("a", both[0]), ("b", torch.nn.Parameter(b, requires_grad=False)), ("t", both[1].t())]),
    "bucket": to_text(bucket),
    "by_module": to_text({"transformer": bucket, "vae": {"flattened_tensor": torch.empty(0), "metadata": []}}),
    "each": to_text([("a", LocalSerializedTensor([to_text(a + 1), to_text(a).encode()]))]),
}
print(json.dumps(texts), flush=True)
sys.stdin.readline()
"""
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(3, dtype=torch.uint8)


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module")
def trainer_texts() -> Iterator[dict[str, str]]:
    """Payloads of a trainer in another process, in torch's shared memory."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(HERE.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield json.loads(trainer.stdout.readline())  # type: ignore[union-attr]
    trainer.communicate("\n")


def from_text(texts: list[Any], **info: Any) -> Iterator[Any]:
    context = {key: info.pop(key) for key in ("rank", "ranks") if key in info}
    return transport("tensor", **context).receive({"serialized_named_tensors": texts, **info})


def test_a_trainers_pickled_list_bucket_and_modules_arrive_from_its_shared_memory(
    trainer_texts: dict[str, str],
) -> None:
    before = shared_files()
    assert_same(from_text([trainer_texts["list"]], load_format="direct"), {"a": A, "b": B, "t": A.t()})
    bucket = {"load_format": "flattened_bucket"}
    assert_same(from_text([trainer_texts["bucket"]], target_modules=["vae"], **bucket), {"a": A, "b": B}, "vae")
    assert_same(from_text([trainer_texts["by_module"]], **bucket), {"a": A, "b": B}, "transformer")
    assert len(shared_files()) < len(before)  # what was read once is gone


def test_of_a_list_with_a_tensor_for_each_rank_a_rank_opens_its_own_alone(trainer_texts: dict[str, str]) -> None:
    assert_same(from_text(["not base64!", trainer_texts["each"]], rank=1, ranks=2), {"a": A})


def test_a_payload_that_was_read_before_is_refused(trainer_texts: dict[str, str]) -> None:
    text = to_text([("a", torch.ones(3))])
    assert_same(from_text([text]), {"a": torch.ones(3)})
    with pytest.raises(RefitRefusedError, match="not there"):
        list(from_text([text]))


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_what_our_sender_serializes_arrives(load_format: str | None) -> None:
    before = shared_files()
    payload = serialize_named_tensors(NAMED.items(), load_format=load_format)
    assert isinstance(json.loads(json.dumps(payload)), str)
    assert_same(from_text([payload], load_format=load_format), NAMED)
    del payload
    assert shared_files() <= before


def test_safetensors_travel_as_bytes_as_a_tensor_or_as_text_for_one_rank_or_each() -> None:
    data, other = safetensors_payload(NAMED.items()), safetensors_payload([("w", torch.ones(1))])
    reader = transport("tensor", rank=1, ranks=2)
    text = base64.b64encode(data).decode()
    for info in (
        {"safetensors": data},
        {"safetensors": [other, data]},
        {"safetensors": torch.frombuffer(bytearray(data), dtype=torch.uint8)},
        {"serialized_named_tensors": [text]},
    ):
        assert_same(reader.receive({"load_format": "safetensors", "target_modules": ["vae"], **info}), NAMED, "vae")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"serialized_named_tensors": None}, "not a list of payloads"),
        ({"serialized_named_tensors": "gAQu"}, "not a list of payloads"),
        ({"serialized_named_tensors": []}, "not a list of payloads"),
        ({"serialized_named_tensors": ["gAQu"] * 3}, "3 payloads for 2 ranks"),
        ({"serialized_named_tensors": ["gA Qu\n"]}, "base64"),
        ({"serialized_named_tensors": ["gA-_"]}, "base64"),
        ({"serialized_named_tensors": [7]}, "base64"),
        ({"serialized_named_tensors": ["gARdLg=="], "load_format": "safetensors"}, "safetensors file"),
        ({"serialized_named_tensors": ["gARdLg=="], "load_format": "other"}, "unknown load_format"),
        ({"serialized_named_tensors": ["gARdLg=="], "load_format": "flattened_bucket"}, "no bucket"),
        ({"serialized_named_tensors": ["gARdLg=="], "target_modules": ["vae", "transformer"]}, "one module"),
        ({"serialized_named_tensors": ["gARdLg=="], "target_modules": ["nothing"]}, "no module 'nothing'"),
        ({"serialized_named_tensors": ["gARdLg=="], "weight_update_mode": "lora_merge"}, "weight_update_mode"),
        ({"serialized_named_tensors": ["gARdLg=="], "payload_gpu_uuids": ["GPU-1"]}, "no payload was exported"),
        ({"serialized_named_tensors": ["gARdLg=="], "payload_gpu_uuids": []}, "payload_gpu_uuids"),
        ({"safetensors": 7}, "no safetensors file"),
    ],
)
def test_payloads_that_do_not_fit_are_refused(info: dict[str, Any], message: str) -> None:
    with pytest.raises(RefitRefusedError, match=message):
        list(transport("tensor", ranks=2).receive(info))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([("a", 1)], "no tensor"),
        ([("a",)], "not a name and a tensor"),
        (["ab"], "not a name and a tensor"),
        ({"other": []}, "module 'other'"),
        (7, "instead of a list"),
    ],
)
def test_pickles_of_something_else_are_refused(value: Any, message: str) -> None:
    with pytest.raises(RefitRefusedError, match=message):
        list(from_text([base64.b64encode(pickle.dumps(value)).decode()]))


# distributed


def meet(ranks: list[Rank], info: dict[str, Any], join: Callable[[], Any], **more: Any) -> Any:
    """Has the ranks join while this process does."""
    for rank in ranks:
        rank.ask("init", "distributed", info, **more)
    joined = join()
    for rank in ranks:
        assert rank.answer().get("error") is None
    return joined


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def a_sender(ranks: list[Rank], **options: Any) -> WeightSender:
    sender = WeightSender("127.0.0.1", world_size=3, backend="gloo", timeout_s=TIMEOUT_S, **options)
    meet(ranks, sender.init_info(), sender.join)
    return sender


@contextlib.contextmanager
def sending(ranks: list[Rank], **options: Any) -> Iterator[WeightSender]:
    sender = a_sender(ranks, **options)
    yield sender
    sender.close()
    for rank in ranks:
        rank.do("shutdown", "distributed", {})


def broadcast(ranks: list[Rank], sender: WeightSender, named: dict[str, torch.Tensor], **info: Any) -> list[Any]:
    form = {"load_format": info["load_format"]} if "load_format" in info else {}
    for rank in ranks:
        rank.ask("receive", "distributed", {**sender.announce(named.items(), **form), **info})
    sender.send(named.items(), **form)
    return [rank.answer() for rank in ranks]


def test_a_plain_torch_trainer_meets_two_ranks_and_each_receives_every_tensor(ranks: list[Rank]) -> None:
    from torch.distributed import PrefixStore, broadcast, distributed_c10d, rendezvous

    port = free_port()
    where = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 3}
    info = {**where, "group_name": "sync", "backend": "gloo"}

    def join() -> Any:
        wait = distributed_c10d.default_pg_timeout
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 3, timeout=wait))
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], "gloo", PrefixStore("sync", store), group_name="sync", timeout=wait
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        return group

    group = meet(ranks, info, join)
    named = {k: v for k, v in NAMED.items() if k != "empty"}
    fields = {
        "names": list(named),
        "dtypes": [str(t.dtype) for t in named.values()],
        "shapes": [list(t.shape) for t in named.values()],
        "group_name": "sync",
    }
    for rank in ranks:
        rank.ask("receive", "distributed", {**fields, "target_modules": ["vae"]})
    for tensor in named.values():
        broadcast(tensor, src=0, group=group)
    flat, _ = flatten(named.items())
    for rank in ranks:
        assert rank.answer()["value"] == as_sent(named, "vae")
        rank.ask("receive", "distributed", {**fields, "load_format": "flattened_bucket"})
    broadcast(flat, src=0, group=group)
    for rank in ranks:
        assert rank.answer()["value"] == as_sent(named)
        assert rank.do("init", "distributed", info)["error"].endswith("destroy it first.")
        assert rank.do("shutdown", "distributed", {"group_name": "sync"}).get("value", 0) is None
        again = rank.do("shutdown", "distributed", {"group_name": "sync"})
        assert again["error"].startswith("The group to be destroyed does not exist.")
        assert rank.do("receive", "distributed", fields)["code"] == "unknown_group"


def test_our_sender_broadcasts_singly_or_flattened_and_every_dtype(ranks: list[Rank]) -> None:
    named = {**NAMED, "int16": torch.arange(3, dtype=torch.int16), "fp8": torch.ones(5).to(torch.float8_e4m3fn)}
    with sending(ranks) as sender:
        for form in ({}, {"load_format": "flattened_bucket"}):
            for answer in broadcast(ranks, sender, named, **form):
                assert answer["value"] == as_sent(named)


@pytest.mark.parametrize("packed_bytes", [1, 20, 10_000])
def test_vllms_packed_chunks_are_cut_alike_on_both_sides(ranks: list[Rank], packed_bytes: int) -> None:
    with sending(ranks, packed_bytes=packed_bytes) as sender:
        fields = {"names": list(NAMED), "dtype_names": [str(t.dtype)[6:] for t in NAMED.values()]}
        fields["shapes"] = [list(t.shape) for t in NAMED.values()]
        for again in (fields, {"names": [], "dtype_names": [], "shapes": []}):
            for rank in ranks:
                rank.ask("receive", "distributed", again)
            sender.send(NAMED.items())
            assert [rank.answer()["value"] for rank in ranks] == [as_sent(NAMED)] * 2


def test_a_packed_chunk_ends_when_it_exceeds_the_buffer_and_not_when_it_fills_it() -> None:
    tensors = [torch.empty(count, dtype=torch.uint8) for count in (6, 4, 1, 30, 10, 2)]
    assert [[t.nbytes for t in chunk] for chunk in _chunks(tensors, 10, flat=False)] == [[6, 4, 1], [30], [10, 2]]


def test_a_call_that_is_ended_early_takes_the_rest_off_the_group(ranks: list[Rank]) -> None:
    with sending(ranks) as sender:
        fields = sender.announce(NAMED.items())
        for rank in ranks:
            rank.ask("receive", "distributed", fields, stop_after=2)
        sender.send(NAMED.items())
        assert [len(rank.answer()["value"]) for rank in ranks] == [2, 2]
        assert broadcast(ranks, sender, NAMED)[1]["value"] == as_sent(NAMED)


DYING = """
import sys, os, torch
sys.path.insert(0, sys.argv[1])
from engine_control.refit.backends.distributed import WeightSender
sender = WeightSender("127.0.0.1", world_size=2, backend="gloo")
print(sender.init_info()["master_port"], flush=True)
sender.join()
sender.send([("a", torch.ones(3))])
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def test_a_trainer_that_dies_gives_an_error_and_leaves_the_group_closed() -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", DYING, str(HERE.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = trainer.stdout.readline()  # type: ignore[union-attr]
    info = {"master_address": "127.0.0.1", "master_port": int(port), "rank_offset": 1, "world_size": 2}
    alone = Rank(0, 1)
    assert alone.answer() == "ready"
    assert alone.do("init", "distributed", {**info, "backend": "gloo"}).get("error") is None
    alone.ask("receive", "distributed", {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[3], [3]]})
    trainer.communicate("\n")
    lost = alone.answer()
    assert lost["code"] == "broadcast_failed"
    assert "weight_update_group" in lost["error"]
    assert alone.do("shutdown", "distributed", {})["code"] == "unknown_group"
    alone.end()


def test_a_trainer_that_is_silent_gives_an_error_on_both_sides(ranks: list[Rank]) -> None:
    sender = WeightSender("127.0.0.1", world_size=3, backend="gloo", timeout_s=TIMEOUT_S)
    meet(ranks, sender.init_info(), sender.join, timeout_s=1.5)
    for rank in ranks:
        rank.ask("receive", "distributed", sender.announce(NAMED.items()), timeout_s=1.5)
    assert [rank.answer()["code"] for rank in ranks] == ["broadcast_failed"] * 2
    with pytest.raises(BroadcastError):
        sender.send([("a", torch.ones(1_000_000))] * 100)
    sender.close()


@contextlib.contextmanager
def paired(
    *, load_formats: tuple[str, ...] = (), **options: Any
) -> Iterator[tuple[WeightTransport, WeightSender, ThreadPoolExecutor]]:
    """An engine's transport and a sender that have met, and a thread for the sender."""
    engine = transport("distributed", timeout_s=TIMEOUT_S, load_formats=load_formats)
    sender = WeightSender("127.0.0.1", world_size=2, backend="gloo", timeout_s=TIMEOUT_S, **options)
    with ThreadPoolExecutor(1) as trainer:
        joined = trainer.submit(sender.join)
        engine.init(sender.init_info())
        joined.result()
        yield engine, sender, trainer
    engine.close()
    sender.close()


def test_the_next_broadcast_comes_while_the_tensors_of_the_last_are_being_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "LOAD_BYTES", 1)
    named = {"a": torch.ones(2), "b": torch.full((8 << 20,), 2.0)}  # of which no socket's buffer holds the second
    with paired() as (engine, sender, trainer):
        sent = trainer.submit(sender.send, named.items())
        arriving = engine.receive({**sender.announce(named.items()), "target_modules": ["transformer"]})
        first = next(arriving)
        sent.result(TIMEOUT_S / 2)
        assert_same([first, *arriving], named, "transformer")


class Noting:
    """A group that notes what is begun and finished, by the broadcast's number, and where its bytes lie."""

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group
        self.device = group.device
        self.events: list[str] = []
        self.addresses: list[int] = []

    def begin(self, tensor: torch.Tensor) -> tuple[int, Any]:
        number = len(self.addresses)
        self.events.append(f"begin {number}")
        self.addresses.append(tensor.data_ptr())
        return number, self._group.begin(tensor)

    def finish(self, work: tuple[int, Any]) -> None:
        self.events.append(f"finish {work[0]}")
        self._group.finish(work[1])

    def close(self) -> None:
        self._group.close()


def note(owner: Any) -> Noting:
    """Has a channel, or a sender, note what it does."""
    name = "group" if isinstance(owner, Channel) else "_group"
    noting = Noting(getattr(owner, name))
    setattr(owner, name, noting)
    return noting


IN_TURN = ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "begin 3", "finish 2", "finish 3"]


def test_two_loads_are_always_on_their_way_in_two_buffers_and_a_loads_tensors_are_taken_before_its_buffer_is_given_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "LOAD_BYTES", 1)
    named = {f"{i}{half}": torch.full((3,), i) for i in range(4) for half in "ab"}
    with paired(packed_bytes=30) as (engine, sender, trainer):
        there, here = note(engine._channels["weight_update_group"]), note(sender)
        sent = trainer.submit(sender.send, named.items())
        taken = []
        for item in engine.receive({**sender.announce(named.items()), "target_modules": ["transformer"]}):
            assert torch.equal(item.tensor, named[item.name])
            taken.append((item.name, item.more))
            there.events.append(f"take {item.name}")
        sent.result()
    assert taken == [(name, name.endswith("a")) for name in named]
    assert [event for event in there.events if "take" not in event] == here.events == IN_TURN
    for load in range(4):
        takes = [f"take {load}a", f"take {load}b"]
        at = there.events.index(f"finish {load}") + 1
        assert there.events[at : at + 2] == takes
    for group in (there, here):
        assert group.addresses == group.addresses[:2] * 2
        assert len(set(group.addresses)) == 2


def all_at_last(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(named)


def test_a_loader_may_keep_tensors_to_the_end_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "LOAD_BYTES", 1)
    sys.modules.setdefault(__name__, sys.modules[all_at_last.__module__])
    path = f"{__name__}:all_at_last"
    named = {str(i): torch.full((3,), i) for i in range(5)}
    with paired(load_formats=(path,)) as (engine, sender, trainer):
        sent = trainer.submit(sender.send, named.items())
        items = list(engine.receive({**sender.announce(named.items(), load_format=path)}))
        sent.result()
    assert_same(items, named)
    assert not any(item.more for item in items)


def test_many_small_broadcasts_are_on_their_way_together_but_not_more_than_a_device_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "LOAD_BROADCASTS", 3)
    named = {str(i): torch.full((3,), i) for i in range(7)}
    with paired() as (engine, sender, trainer):
        there = note(engine._channels["weight_update_group"])
        sent = trainer.submit(sender.send, named.items())
        items = [WeightItem(*i[:2], i.tensor.clone(), i.more) for i in engine.receive(sender.announce(named.items()))]
        sent.result()
    assert_same(items, named)
    assert [item.more for item in items] == [True, True, False, True, True, False, False]
    assert there.events[:9] == [*(f"begin {i}" for i in range(6)), *(f"finish {i}" for i in range(3))]


def test_what_is_too_large_to_come_is_refused_and_the_group_closed() -> None:
    with paired() as (engine, _, _):
        call = {"names": ["a", "b"], "dtypes": ["uint8"] * 2, "shapes": [[3], [1 << 50]]}
        with pytest.raises(RefitRefusedError, match=f"no room for {(1 << 50) + 256} bytes") as refused:
            list(engine.receive(call))
        assert refused.value.code == "no_room"
        with pytest.raises(RefitRefusedError, match="not one of those that are open"):
            engine.receive(call)


def test_an_announcement_that_was_changed_where_it_lies_is_read_again() -> None:
    info = {"names": ["a"], "dtypes": ["uint8"], "shapes": [[3]]}
    first = announced_again(info, Said())
    assert announced_again(json.loads(json.dumps(info)), first) is first
    info["shapes"][0][0] = 4  # type: ignore[index]
    assert announced_again(info, first).tensors == [Announced("a", torch.uint8, (4,))]


def test_nobody_at_the_address_is_an_error_that_names_it_and_leaves_nothing_open() -> None:
    engine = transport("distributed", timeout_s=1.0)
    before = len(os.listdir("/proc/self/fd"))
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(RefitRefusedError, match=r"127\.0\.0\.1:1"):
        engine.init(info)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(InvalidRequestError, match="does not exist"):
        engine.shutdown({})


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offset": 3}, "rank_offset"),
        ({"rank_offset": 2}, "world_size"),
        ({"rank_offset": True}, "rank_offset"),
        ({"master_port": "12a"}, "master_port"),
        ({"master_port": 70_000}, "master_port"),
        ({"master_address": None}, "master_address"),
        ({"backend": "nccl"}, "backend"),
        ({"backend": "mpi"}, "backend"),
        ({"packed": True, "packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
    ],
)
def test_a_group_that_can_not_be_is_refused_before_anybody_waits(changed: dict[str, Any], field: str) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, **changed}
    with pytest.raises(RefitRefusedError) as refused:
        transport("distributed", ranks=2, timeout_s=600).init(info)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": ["a"]}, "1 names, 2 dtypes and 2 shapes"),
        ({"dtypes": ["float32", "float33"]}, "dtype"),
        ({"shapes": [[1], [-1]]}, "shape"),
        ({"shapes": [[1], "2"]}, "shape"),
        ({"names": ["a", ""]}, "without a name"),
        ({"names": "ab"}, "not a list"),
        ({"target_modules": ["vae", "transformer"]}, "exactly one"),
        ({"load_format": "direct"}, "load_format"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused_before_anything_is_received(
    changed: dict[str, Any], message: str, ranks: list[Rank]
) -> None:
    with sending(ranks) as sender:
        fields = {**sender.announce([("a", torch.ones(1)), ("b", torch.ones(1))]), **changed}
        assert message in ranks[0].do("receive", "distributed", fields)["error"]


# ipc


def test_tensors_arrive_through_host_memory_half_by_half_and_leave_nothing(ranks: list[Rank]) -> None:
    named = {f"w{i}": torch.randn(1 + i, 50) for i in range(12)} | NAMED
    before, found, batches = shared_files(), [], 0
    with IpcSender(half_bytes=3000) as sender:
        for info in sender.batches(named.items(), module="vae"):
            assert all(tensor["offset"] % 256 == 0 for tensor in info["tensors"])
            answers = [rank.do("receive", "ipc", json.loads(json.dumps(info))) for rank in ranks]
            assert answers[0] == answers[1]
            assert answers[0]["mapped"] == 1
            found += answers[0]["value"]
            batches += 1
    assert found == as_sent(named, "vae")
    assert batches > 3
    for rank in ranks:
        assert rank.do("shutdown", "ipc", {})["mapped"] == 0
        assert rank.do("shutdown", "ipc", {})["error"].startswith("no buffer is mapped")
    assert shared_files() == before


def test_the_next_sender_takes_the_place_of_the_last_one(ranks: list[Rank]) -> None:
    for value in (1.0, 2.0):
        with IpcSender(half_bytes=1000) as sender:
            for info in sender.batches([("w", torch.full((3,), value))]):
                answer = ranks[0].do("receive", "ipc", info)
        assert answer["value"] == as_sent({"w": torch.full((3,), value)})
        assert answer["mapped"] == 1
    ranks[0].do("shutdown", "ipc", {})


def test_a_sender_that_says_the_same_again_is_read_again_and_another_place_is_noticed() -> None:
    receiver, weights = transport("ipc"), torch.arange(8.0)
    buffer = HostBuffer(1024)
    entry = {"module": None, "name": "w", "dtype": "float32", "shape": [8], "offset": 0}
    places = [(1.0, 0), (2.0, 0), (3.0, 512), (4.0, 0), (5.0, 512), (6.0, 2), (7.0, 2)]  # 2 is not aligned: a copy
    for value, offset in places:
        buffer.bytes[offset : offset + 32] = (weights * value).view(torch.uint8)
        info = {"buffer": buffer.handle, "tensors": [{**entry, "offset": offset}]}
        assert_same(receiver.receive(json.loads(json.dumps(info))), {"w": weights * value})
    receiver.close()
    buffer.close()


def by_one_buffer(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    room = torch.empty(3)
    for name, tensor in named:
        yield name, room.copy_(tensor * 2)


class OneRank:
    """What a control layer needs of an engine of two vectors."""

    memory: Any = None
    device = torch.device("cpu")
    weight_kernels = None

    def __init__(self) -> None:
        self.module = torch.nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(3)})
        self.target = ModuleTarget({"m": self.module})

    def flush_caches(self, modules: object) -> None:
        pass

    def drop_graphs(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_a_loader_may_hand_on_one_buffer_again_and_again() -> None:
    path = f"{__name__}:by_one_buffer"
    sys.modules.setdefault(__name__, sys.modules[by_one_buffer.__module__])
    engine = OneRank()
    rank = RankControl(engine, RankSettings(load_formats=(path,)))
    new = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    rank.carry_out(RankCommand("begin", {"modules": ["m"], "partial": False, "staged": False, "undo": True}))
    with IpcSender(half_bytes=1000) as sender:
        [info] = sender.batches(new.items())
        outcome = rank.carry_out(RankCommand("update", {"transport": "ipc", "info": {**info, "load_format": path}}))
    assert outcome.error is None
    rank.carry_out(RankCommand("commit", {"flush": False}))
    assert {name: value.tolist() for name, value in engine.module.items()} == {"a": [2.0] * 3, "b": [4.0] * 3}
    rank.close()


def test_a_tensor_larger_than_a_half_is_an_error_at_the_sender() -> None:
    with IpcSender(half_bytes=1000) as sender, pytest.raises(ValueError, match=r"'w' has 4000 bytes.*half_bytes"):
        list(sender.batches([("w", torch.ones(1000))]))


KILLED = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from engine_control.refit.backends.ipc import IpcSender
sender = IpcSender(half_bytes=1000)
print(json.dumps(next(sender.batches([("w", torch.ones(3))]))), flush=True)
sys.stdin.readline()
"""


def test_a_sender_or_a_receiver_that_is_killed_leaves_no_memory_behind() -> None:
    before = shared_files()
    sender = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(HERE.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    info = json.loads(sender.stdout.readline())  # type: ignore[union-attr]
    dies, stays = transport("ipc"), transport("ipc")
    assert_same(stays.receive(info), {"w": torch.ones(3)})
    sender.send_signal(signal.SIGKILL)
    sender.communicate()
    assert_same(stays.receive(info), {"w": torch.ones(3)})  # mapped, so still there
    with pytest.raises(RefitRefusedError, match="sender must live"):
        list(dies.receive(info))
    stays.close()
    assert "memfd:engine-weights" not in Path("/proc/self/maps").read_text()
    assert shared_files() == before


def a_memfd(size: int, *, sealed: bool, name: str = "engine-weights-" + "0" * 32) -> int:
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def handle(descriptor: int, nbytes: int = 4096, **changed: Any) -> dict[str, Any]:
    where = {"pid": os.getpid(), "descriptor": descriptor}
    return {"kind": "memfd", "token": "0" * 32, "bytes": nbytes, **where, **changed}


def test_only_a_sealed_buffer_of_a_sender_is_mapped() -> None:
    good, unsealed = a_memfd(4096, sealed=True), a_memfd(4096, sealed=False)
    other, file = a_memfd(4096, sealed=True, name="secret"), os.open(__file__, os.O_RDONLY)
    tensors = [{"module": None, "name": "w", "dtype": "float32", "shape": [2], "offset": 0}]
    assert_same(transport("ipc").receive({"buffer": handle(good), "tensors": tensors}), {"w": torch.zeros(2)})
    for buffer in (
        handle(unsealed),
        handle(other),
        handle(file),
        handle(10_000),
        handle(good, 8192),
        handle(good, 0),
        handle(good, pid=2**40),
        handle(good, pid="self"),
        handle(good, token="../../etc"),
        handle(good, token="1" * 32),
        handle(good, kind="file"),
        handle(good, kind="cuda"),
        "good",
        None,
    ):
        with pytest.raises(RefitRefusedError, match=r"buffer|descriptor|process|cpu"):
            list(transport("ipc").receive({"buffer": buffer, "tensors": tensors}))
    for changed in (
        {"offset": 4092},
        {"offset": -1},
        {"shape": [2**61]},
        {"dtype": "x"},
        {"name": ""},
        {"module": "x"},
    ):
        with pytest.raises(RefitRefusedError):
            list(transport("ipc").receive({"buffer": handle(good), "tensors": [{**tensors[0], **changed}]}))
    for descriptor in (good, unsealed, other, file):
        os.close(descriptor)


def test_cuda_handles_are_refused_on_a_cpu_before_they_are_looked_at() -> None:
    fields = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    for handles in ({"ipc_handles": [{"GPU-1": []}]}, {"ipc_handles_pickled": "gAQu"}):
        with pytest.raises(RefitRefusedError, match="on cpu"):
            list(transport("ipc").receive({**fields, **handles}))


def test_what_a_transport_does_not_open_it_does_not_close() -> None:
    for name in ("disk", "tensor"):
        with pytest.raises(EngineError):
            transport(name).init({})
        with pytest.raises(EngineError):
            transport(name).shutdown({})
    for name in ("disk", "tensor", "distributed", "ipc"):
        transport(name).close()


# on GPUs


def on_gpu(named: dict[str, torch.Tensor], device: str = "cuda:0") -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in named.items()}


@pytest.fixture(scope="module")
def gpu_rank() -> Iterator[Rank]:
    rank = Rank(0, 1, "cuda:0")
    assert rank.answer() == "ready"
    yield rank
    rank.end()


@gpu
def test_tensors_arrive_through_gpu_memory_half_by_half(gpu_rank: Rank) -> None:
    named = on_gpu({f"w{i}": torch.randn(1 + i, 50) for i in range(12)} | NAMED)
    found = []
    for _ in range(2):  # a second sender takes the first one's place
        with IpcSender(half_bytes=3000, device="cuda:0") as sender:
            for info in sender.batches(named.items()):
                answer = gpu_rank.do("receive", "ipc", json.loads(json.dumps(info)))
                assert "error" not in answer, answer
                found += answer["value"]
    assert found == as_sent(named) * 2
    assert gpu_rank.do("shutdown", "ipc", {})["value"] is None


@gpu
def test_host_memory_and_files_reach_a_rank_on_a_gpu_too(gpu_rank: Rank, tmp_path: Path) -> None:
    with IpcSender(half_bytes=3000) as sender:
        for info in sender.batches(NAMED.items()):
            assert gpu_rank.do("receive", "ipc", info)["value"] == as_sent(NAMED)
    gpu_rank.do("shutdown", "ipc", {})
    value = gpu_rank.do("receive", "disk", {"model_path": str(write(tmp_path, NAMED))})["value"]
    assert sorted(value) == sorted(as_sent(NAMED))


@gpu
def test_a_payload_of_cuda_handles_arrives_and_one_of_another_gpu_is_refused(gpu_rank: Rank) -> None:
    named = on_gpu(NAMED)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    for load_format in (None, "flattened_bucket"):
        payload = serialize_named_tensors(named.items(), load_format=load_format)
        info = {"serialized_named_tensors": [payload], "load_format": load_format}
        answer = gpu_rank.do("receive", "tensor", {**info, "payload_gpu_uuids": ["GPU-" + uuid.upper()]})
        assert answer.get("value") == as_sent(named), answer
    refused = gpu_rank.do("receive", "tensor", {**info, "payload_gpu_uuids": ["GPU-other"]})
    assert uuid.lower() in refused["error"]
    assert "other" in refused["error"]


@gpu
def test_a_handle_whose_device_is_a_uuid_arrives_under_its_patched_name(
    gpu_rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.arange(6.0, device="cuda:0").reshape(2, 3).t()
    arguments = list(reduce_tensor(tensor)[1])
    arguments[6] = str(torch.cuda.get_device_properties(0).uuid)
    patched = types.ModuleType("sglang.srt.utils.patch_torch")

    def _rebuild_cuda_tensor_modified() -> None:
        """Stands for the trainer's."""

    _rebuild_cuda_tensor_modified.__module__ = patched.__name__
    _rebuild_cuda_tensor_modified.__qualname__ = "_rebuild_cuda_tensor_modified"
    vars(patched)["_rebuild_cuda_tensor_modified"] = _rebuild_cuda_tensor_modified
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, patched.__name__, patched)

    class Reduced:
        def __reduce__(self) -> Any:
            return _rebuild_cuda_tensor_modified, tuple(arguments)

    text = base64.b64encode(pickle.dumps([("w", Reduced())])).decode()
    answer = gpu_rank.do("receive", "tensor", {"serialized_named_tensors": [text]})
    assert answer.get("value") == as_sent({"w": tensor}), answer


def vllm_handle(tensor: torch.Tensor) -> tuple[str, list[Any]]:
    from torch.multiprocessing.reductions import reduce_tensor

    return str(torch.cuda.get_device_properties(tensor.device).uuid), list(reduce_tensor(tensor)[1])


def as_json(arguments: list[Any]) -> list[Any]:
    plain = [None, list(arguments[1]), list(arguments[2]), arguments[3], None, str(arguments[5]), *arguments[6:]]
    return [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in plain]


@gpu
def test_vllms_handles_arrive_singly_packed_and_pickled(gpu_rank: Rank) -> None:
    named = on_gpu({k: v for k, v in NAMED.items() if k != "empty"})
    fields = {
        "names": list(named),
        "dtype_names": [str(t.dtype)[6:] for t in named.values()],
        "shapes": [list(t.shape) for t in named.values()],
    }
    assert gpu_rank.do("init", "ipc", {"packed": False})["value"] is None
    handles = [{uuid: as_json(a)} for uuid, a in map(vllm_handle, named.values())]
    answer = gpu_rank.do("receive", "ipc", {**fields, "ipc_handles": handles})
    assert answer.get("value") == as_sent(named), answer
    pickled = base64.b64encode(pickle.dumps([{u: tuple(a)} for u, a in map(vllm_handle, named.values())])).decode()
    answer = gpu_rank.do("receive", "ipc", {**fields, "ipc_handles_pickled": pickled})
    assert answer.get("value") == as_sent(named), answer
    flat, _ = flatten(named.items())
    uuid, arguments = vllm_handle(flat)
    sizes = [t.nbytes for t in named.values()]
    for shift in (0, 1):  # one export, read twice: the buffer stays mapped
        flat += shift
        torch.cuda.synchronize()
        call = {**fields, "ipc_handles": {uuid: as_json(arguments)}, "tensor_sizes": sizes}
        answer = gpu_rank.do("receive", "ipc", {**call, **({"names": ["x"]} if shift else {})})
        assert ("value" in answer) is not bool(shift), answer
    assert gpu_rank.do("shutdown", "ipc", {})["value"] is None


@contextlib.contextmanager
def nccl_pair(**options: Any) -> Iterator[tuple[Rank, WeightSender]]:
    rank = Rank(0, 1, "cuda:1")
    assert rank.answer() == "ready"
    sender = WeightSender("127.0.0.1", world_size=2, device="cuda:0", timeout_s=TIMEOUT_S, **options)
    meet([rank], sender.init_info(), sender.join)
    yield rank, sender
    rank.do("shutdown", "distributed", {})
    sender.close()
    rank.end()


@two_gpus
def test_nccl_brings_tensors_singly_flattened_and_packed_and_after_a_call_that_ended_early() -> None:
    named = on_gpu({**NAMED, "int16": torch.arange(3, dtype=torch.int16)})
    with nccl_pair() as (rank, sender):
        for form in ({}, {"load_format": "flattened_bucket"}):
            assert broadcast([rank], sender, named, **form)[0].get("value") == as_sent(named)
        rank.ask("receive", "distributed", sender.announce(named.items()), stop_after=1)
        sender.send(named.items())
        assert len(rank.answer()["value"]) == 1
        assert broadcast([rank], sender, named)[0].get("value") == as_sent(named)
    with nccl_pair(packed_bytes=20) as (rank, sender):
        assert broadcast([rank], sender, named)[0].get("value") == as_sent(named)


@two_gpus
def test_a_plain_torch_trainer_meets_a_rank_over_nccl() -> None:
    from torch.distributed import PrefixStore, broadcast, distributed_c10d, rendezvous

    rank = Rank(0, 1, "cuda:1")
    assert rank.answer() == "ready"
    port = free_port()
    wait = distributed_c10d.default_pg_timeout
    torch.cuda.set_device(0)

    def join() -> Any:
        store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
        group, _ = distributed_c10d._new_process_group_helper(
            2, 0, [], "nccl", PrefixStore("nccl-sync", store), group_name="nccl-sync", timeout=wait
        )
        distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        return group

    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    group = meet([rank], {**where, "group_name": "nccl-sync"}, join)
    named = on_gpu({k: v for k, v in NAMED.items() if k != "empty"})
    fields = {
        "names": list(named),
        "dtypes": [str(t.dtype) for t in named.values()],
        "shapes": [list(t.shape) for t in named.values()],
        "group_name": "nccl-sync",
    }
    rank.ask("receive", "distributed", fields)
    for tensor in named.values():
        broadcast(tensor, src=0, group=group)
    assert rank.answer().get("value") == as_sent(named)
    assert rank.do("shutdown", "distributed", {})["value"] is None  # while the trainer is still in the group
    group._get_backend(torch.device("cuda")).shutdown()
    rank.end()


@two_gpus
def test_a_trainer_that_dies_under_nccl_gives_an_error_and_the_rank_lives_on() -> None:
    script = DYING.replace('backend="gloo"', 'backend="nccl", device="cuda:0"').replace("ones(3)", "ones(3).cuda()")
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(HERE.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(trainer.stdout.readline())  # type: ignore[union-attr]
    rank = Rank(0, 1, "cuda:1")
    assert rank.answer() == "ready"
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    assert rank.do("init", "distributed", info, timeout_s=8.0).get("error") is None
    two = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[3], [3]]}
    rank.ask("receive", "distributed", two, timeout_s=8.0)
    trainer.communicate("\n")
    lost = rank.answer()
    assert lost["code"] == "broadcast_failed", lost
    time.sleep(3)  # NCCL's watchdog would end the process now
    assert rank.do("shutdown", "distributed", {}, timeout_s=8.0)["code"] == "unknown_group"
    rank.end()
