"""Memory goes and comes back with the same bits, on every mechanism and device that this machine has."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine_control.config import engine_environment
from engine_control.errors import ConflictError, InsufficientMemoryError, InvalidRequestError
from engine_control.memory.backup import SlabBackup
from engine_control.memory.base import MemoryMechanism, mechanisms, move, storages_of
from engine_control.memory.host import HostStorageSwap
from engine_control.memory.saver import MemorySaver

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Tensors = dict[str, torch.Tensor]


def always(name: str) -> bool:
    return True


def parameters_only(name: str) -> bool:
    return "buffer" not in name


class Model(nn.Module):
    """Ties, views, odd strides, several dtypes, a scalar, an empty tensor, and buffers that no checkpoint has."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(33, 5, generator=generator).to(device))
        self.head = self.embed
        self.slow = nn.Parameter(torch.randn(7, 11, generator=generator).to(device).t())
        whole = torch.randn(64, generator=generator).to(device, torch.bfloat16)
        self.first, self.second = nn.Parameter(whole[:40]), nn.Parameter(whole[16:].view(6, 8)[:, ::2])
        self.register_buffer("buffer_scale", torch.tensor(3.5, device=device))
        self.register_buffer("buffer_table", torch.arange(9, device=device), persistent=False)
        self.register_buffer("buffer_none", torch.empty(0, device=device))

    def named(self) -> Tensors:
        return dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())


def bits(tensors: Tensors) -> dict[str, tuple[object, ...]]:
    return {
        name: (t.dtype, tuple(t.shape), t.stride(), t.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


@pytest.fixture(params=[("host", CPU), ("host", CUDA), ("vmm", CUDA)], ids=["host-cpu", "host-cuda", "vmm-cuda"])
def mechanism(request: pytest.FixtureRequest) -> MemoryMechanism:
    name, device = request.param
    if device == CUDA and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if name == "vmm":
        pytest.importorskip("torch_memory_saver")
    return mechanisms.get(name)(device)


@pytest.fixture
def savers() -> Iterator[Callable[..., MemorySaver]]:
    """Makes savers, and closes them."""
    made: list[MemorySaver] = []

    def make(mechanism: MemoryMechanism) -> MemorySaver:
        made.append(MemorySaver(mechanism, pinned=True))
        return made[-1]

    yield make
    for saver in made:
        saver.resume(saver.tags)
        saver.close()


@pytest.fixture
def held(mechanism: MemoryMechanism, savers: Callable[..., MemorySaver]) -> tuple[MemorySaver, Model]:
    model = Model(mechanism.device)
    saver = savers(mechanism)
    saver.hold("weights", model.named, discardable=parameters_only)
    return saver, model


def test_every_bit_comes_back_with_its_ties_views_and_strides(held: tuple[MemorySaver, Model]) -> None:
    saver, model = held
    before = bits(Model().named())
    objects = {name: id(t) for name, t in model.named().items()}
    for _ in range(2):
        assert saver.release(["weights"], backup=True).tags == ["weights"]
        assert saver.released == {"weights"}
        resumed = saver.resume(["weights"])
        assert (resumed.tags, resumed.undefined) == (["weights"], [])
        assert saver.released == frozenset()
    assert bits(model.named()) == before
    assert {name: id(t) for name, t in model.named().items()} == objects
    with torch.no_grad():
        model.head.fill_(1)
        model.first[16:].fill_(2)
    assert model.embed.sum() == 33 * 5
    assert (model.second == torch.full_like(model.second, 2))[:3].all()


def test_without_a_backup_only_what_may_be_lost_is_undefined(held: tuple[MemorySaver, Model]) -> None:
    saver, model = held
    before = bits({name: t for name, t in model.named().items() if not parameters_only(name)})
    saver.release(["weights"], backup=False)
    assert saver.needed_bytes(["weights"]) >= sum(s.nbytes() for s in {model.embed.untyped_storage()})
    undefined = saver.resume(["weights"]).undefined
    assert undefined == ["embed", "head", "slow", "first", "second"]
    assert bits({name: t for name, t in model.named().items() if not parameters_only(name)}) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)  # memory is there


def test_what_is_tied_to_a_tensor_that_must_be_kept_is_kept(savers: Callable[..., MemorySaver]) -> None:
    whole = torch.arange(8.0)
    named = {"buffer": whole[:2], "weight": whole, "other": torch.ones(3)}
    saver = savers(HostStorageSwap(CPU))
    saver.hold("weights", lambda: named, discardable=parameters_only)
    saver.release(["weights"], backup=False)
    assert saver.resume(["weights"]).undefined == ["other"]
    assert whole.tolist() == list(range(8))


def test_duplicates_are_no_ops_and_unknown_tags_change_nothing(held: tuple[MemorySaver, Model]) -> None:
    saver, model = held
    before = bits(model.named())
    assert saver.resume(["weights"]).tags == []
    assert saver.release(["weights", "weights"], backup=True).tags == ["weights"]
    again = saver.release(["weights"], backup=False)
    assert (again.tags, again.bytes_freed) == ([], 0)
    for call in (partial(saver.release, backup=True), saver.resume, saver.needed_bytes):
        with pytest.raises(InvalidRequestError, match=r"unknown memory tag 'wieghts'.*Known: weights"):
            call(["weights", "wieghts"])
    assert saver.released == {"weights"}
    assert saver.resume(["weights", "weights"]).undefined == []
    assert saver.needed_bytes(["weights"]) == 0
    assert bits(model.named()) == before


def test_tensors_that_were_replaced_between_cycles_are_looked_up_anew(held: tuple[MemorySaver, Model]) -> None:
    saver, model = held
    saver.release(["weights"], backup=True)
    saver.resume(["weights"])
    model.slow = nn.Parameter(torch.full((200, 300), 7.0, device=model.embed.device))
    assert saver.release(["weights"], backup=True).tags == ["weights"]
    assert saver.needed_bytes(["weights"]) > 200 * 300 * 4
    saver.resume(["weights"])
    assert (model.slow == 7).all()


def test_what_was_made_from_the_memory_is_dropped_before_it_goes(savers: Callable[..., MemorySaver]) -> None:
    weight = torch.ones(4)
    seen: list[float] = []
    saver = savers(HostStorageSwap(CPU))
    saver.hold("weights", lambda: {"weight": weight}, discardable=always)
    saver.on_release("weights", lambda: seen.append(float(weight.sum())))
    saver.on_release("cuda_graph", lambda: seen.append(-1.0))
    for _ in range(2):
        saver.release(["weights", "cuda_graph"], backup=True)
        assert saver.released == {"weights", "cuda_graph"}
        saver.resume(["cuda_graph", "weights"])
    assert seen == [4.0, -1.0] * 2


def test_memory_of_a_file_or_of_other_processes_is_made_our_own(tmp_path: Path) -> None:
    save_file({"a": torch.randn(33, 5), "b": torch.randn(7).bfloat16()}, tmp_path / "w.safetensors")
    named = load_file(tmp_path / "w.safetensors")
    shared = torch.arange(10.0).share_memory_()
    buffer = torch.frombuffer(bytearray(range(64)), dtype=torch.float32)
    named |= {"tied": named["a"], "shared": shared, "view": shared[2:8:2], "x": buffer[:4], "y": buffer[4:]}
    assert not named["a"].untyped_storage().resizable()
    named["seen by numpy"] = torch.ones(3)
    assert named["seen by numpy"].numpy().sum() == 3
    before = bits(named)
    mechanism = HostStorageSwap(CPU)
    mechanism.adopt("weights", list(named.values()))
    assert bits(named) == before
    assert not any(s.is_shared() for s in storages_of(named.values()))
    named["shared"][4] = -1.0
    assert named["view"][1] == -1.0
    assert len(storages_of([named["x"], named["y"]])) == 2  # so that either can go without the other
    kept = [(t.data_ptr(), name) for name, t in named.items()]
    mechanism.adopt("weights", list(named.values()))
    assert [(t.data_ptr(), name) for name, t in named.items()] == kept
    size = sum(named[name].nbytes for name in ("a", "b", "shared", "x", "y", "seen by numpy"))
    assert mechanism.release("weights", list(named.values())) == size
    assert not any(t.any() for t in named.values())


def test_memory_that_two_tags_share_is_refused(savers: Callable[..., MemorySaver]) -> None:
    whole = torch.ones(4)
    saver = savers(HostStorageSwap(CPU))
    saver.hold("weights", lambda: {"whole": whole}, discardable=always)
    with pytest.raises(InvalidRequestError, match="'part' of tag 'kv_cache' shares memory with 'whole'"):
        saver.hold("kv_cache", lambda: {"part": whole[:2]}, discardable=always)
    with pytest.raises(InvalidRequestError, match="held already"):
        saver.hold("weights", dict, discardable=always)


class Budgeted(MemoryMechanism):
    """Registered from outside of the package: storages that shrink, and may grow to `budget` bytes together."""

    keeps_addresses = False
    budget = 10**9

    def adopt(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        move(tensors, torch.UntypedStorage)

    def release(self, tag: str, tensors: Sequence[torch.Tensor]) -> int:
        self.sizes = {**getattr(self, "sizes", {}), tag: [s.nbytes() for s in storages_of(tensors)]}
        for storage in storages_of(tensors):
            storage.resize_(0)
        self.budget += sum(self.sizes[tag])
        return sum(self.sizes[tag])

    def resume(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        if sum(self.sizes[tag]) > self.budget:
            raise InsufficientMemoryError(f"the budget is {self.budget}")
        for storage, size in zip(storages_of(tensors), self.sizes[tag], strict=True):
            storage.resize_(size)
        self.budget -= sum(self.sizes[tag])

    def free_bytes(self) -> int:
        return self.budget


def test_a_resume_is_all_or_nothing_and_can_be_tried_again(savers: Callable[..., MemorySaver]) -> None:
    mechanisms.register("budgeted", Budgeted)
    assert {"budgeted", "host", "vmm"} == set(mechanisms.names())
    mechanism = mechanisms.get("budgeted")(CPU)
    assert isinstance(mechanism, Budgeted)
    models = {"weights": Model(), "kv_cache": Model()}
    saver = savers(mechanism)
    for tag, model in models.items():
        saver.hold(tag, model.named, discardable=always)
    before = bits(models["weights"].named())
    saver.release(["weights", "kv_cache"], backup=True)
    needed = saver.needed_bytes(["weights", "kv_cache"])
    mechanism.budget = needed - 1
    reason = f"{needed} bytes are needed to resume weights, kv_cache, {needed - 1} are free on cpu"
    for _ in range(2):
        with pytest.raises(InsufficientMemoryError, match=reason) as refusal:
            saver.resume(["weights", "kv_cache"])
        assert refusal.value.status == 503
        assert saver.released == {"weights", "kv_cache"}
        assert all(s.nbytes() == 0 for m in models.values() for s in storages_of(m.parameters()))
    assert saver.resume(["weights"]).undefined == []
    mechanism.budget = needed
    assert saver.resume(["weights", "kv_cache"]).tags == ["kv_cache"]
    assert all(bits(model.named()) == before for model in models.values())


class SmallMachine(HostStorageSwap):
    free = 0

    def free_bytes(self) -> int:
        return self.free


def test_memory_that_a_cpu_has_not_is_refused_before_a_page_is_touched(savers: Callable[..., MemorySaver]) -> None:
    mechanism, weight = SmallMachine(CPU), torch.ones(1000)
    saver = savers(mechanism)
    saver.hold("weights", lambda: {"weight": weight}, discardable=always)
    where = weight.data_ptr()
    saver.release(["weights"], backup=True)
    with pytest.raises(InsufficientMemoryError, match="4000 bytes are needed for 'weights', 0 are free on cpu"):
        saver.resume(["weights"])
    assert not weight.any()  # a stray read finds zeros
    mechanism.free = HostStorageSwap(CPU).free_bytes()
    assert 4000 < mechanism.free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert saver.resume(["weights"]).undefined == []
    assert weight.all()
    assert weight.data_ptr() == where


def test_a_backup_that_finds_no_room_releases_nothing(savers: Callable[..., MemorySaver], tmp_path: Path) -> None:
    named = {"small": torch.ones(1000), "large": torch.ones(MIB)}
    saver = MemorySaver(HostStorageSwap(CPU), pinned=False, backup_folder=str(tmp_path))
    for name, tensor in named.items():
        saver.hold(name, partial(dict, x=tensor), discardable=always)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(InsufficientMemoryError, match=f"backup of {4 * MIB} bytes can't be written to {tmp_path}"):
            saver.release(["small", "large"], backup=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saver.released == frozenset()
    assert (named["large"] == 1).all()
    assert bytes_of_open_files(tmp_path) == 0
    assert saver.release(["small", "large"], backup=True).bytes_freed == 4000 + 4 * MIB
    assert bytes_of_open_files(tmp_path) == 4000 + 4 * MIB
    assert saver.resume(["small", "large"]).bytes == 4000 + 4 * MIB
    assert (named["small"] == 1).all()
    assert (named["large"] == 1).all()
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert bytes_of_open_files(tmp_path) == 0
    saver.close()


def bytes_of_open_files(folder: Path) -> int:
    """Of the files of that folder that this process has open, with or without a name."""
    files = [link for link in Path("/proc/self/fd").iterdir() if os.path.islink(link)]
    return sum(link.stat().st_size for link in files if os.readlink(link).startswith(str(folder)))


def test_a_slab_of_host_memory_is_made_once_and_grows_when_it_must() -> None:
    backup = SlabBackup(pinned=False)
    tensors = [torch.arange(1000), torch.ones(3), torch.arange(5.0).bfloat16()]
    for count, fill in ((2, 5), (2, 6), (3, 7)):
        storages = storages_of(tensors[:count])
        before = [t.clone() for t in tensors]
        backup.save(storages)
        for tensor in tensors[:count]:
            tensor.fill_(fill)
        backup.restore(storages)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    backup.close()


def test_a_slab_that_the_host_has_no_room_for_is_refused_before_a_page_is_touched() -> None:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 6 // 10
    try:
        tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]  # addresses alone
    except RuntimeError:
        pytest.skip("this kernel grants no memory that it hasn't")
    with pytest.raises(InsufficientMemoryError, match=r"backup needs \d+ bytes of host memory, \d+ are free"):
        SlabBackup(pinned=False).save(storages_of(tensors))


def test_the_mechanism_for_cuda_says_where_it_does_not_work() -> None:
    with pytest.raises(InvalidRequestError, match=r"'vmm' needs a CUDA device, not cpu.*'host'"):
        mechanisms.get("vmm")(CPU)
    with pytest.raises(InvalidRequestError, match=r"unknown memory mechanism 'hosts'.*Did you mean 'host'"):
        mechanisms.get("hosts")


def test_a_thousand_cycles_leave_nothing_behind(held: tuple[MemorySaver, Model]) -> None:
    saver, model = held
    before = bits(model.named())

    def cycles(count: int) -> tuple[int, int, int]:
        for index in range(count):
            saver.release(["weights"], backup=index % 2 == 0)
            saver.resume(["weights"])
            if index % 2:
                with torch.no_grad():
                    model.first.fill_(1.0)
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))

    early = cycles(100)
    late = cycles(900)
    assert late[0] - early[0] < 4 * MIB
    assert late[1:] == early[1:]
    assert bits(model.named())["buffer_table"] == before["buffer_table"]


MEASURED = """
import sys, torch
from functools import partial
from pathlib import Path
from safetensors.torch import load_file
from engine_control.memory.host import HostStorageSwap
from engine_control.memory.saver import MemorySaver

def resident():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

torch.empty(1).fill_(1)
named, alive = dict(load_file(sys.argv[1])), []
for index in range(40):
    named[str(index)] = torch.full((2**20 // 2 + index,), float(index))
    alive.append(torch.full((5000,), 1.0))  # what stays lies in between
saver = MemorySaver(HostStorageSwap(torch.device("cpu")), pinned=False)
saver.hold("weights", lambda: named, discardable=lambda name: True)
size = sum(t.numel() * t.element_size() for t in named.values())
sums = {name: t.sum().item() for name, t in named.items()}
for backup in (True, False):
    activation, above = torch.ones(16 * 2**20), torch.ones(5000)
    del activation  # malloc keeps it
    full = resident()
    freed = saver.release(["weights"], backup=backup).bytes_freed
    empty = resident()
    saver.resume(["weights"])
    if backup:
        assert sums == {name: t.sum().item() for name, t in named.items()}
        for tensor in named.values():
            tensor.add_(0)
    print(size, freed, full - empty)
"""


def test_resident_memory_of_an_engine_process_falls_by_what_was_released(tmp_path: Path) -> None:
    save_file({"file": torch.rand(8 * MIB)}, tmp_path / "w.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "w.safetensors")],
        env={**engine_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) == 2
    for size, freed, fell in rows:
        assert freed == size
        assert fell > 0.97 * (size + 64 * MIB)


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_a_gpu
def test_a_gpu_has_the_released_bytes_and_gets_none_that_are_not_there(
    mechanism: MemoryMechanism, savers: Callable[..., MemorySaver]
) -> None:
    if mechanism.device.type != "cuda":
        pytest.skip("needs a GPU")
    size = 2**30
    with mechanism.region("weights"):
        named = {f"w{i}": torch.full((size // 4,), i, dtype=torch.uint8, device="cuda") for i in range(4)}
    saver = savers(mechanism)
    saver.hold("weights", lambda: named, discardable=always)
    free = mechanism.free_bytes()
    freed = saver.release(["weights"], backup=True).bytes_freed
    assert freed >= size
    assert mechanism.free_bytes() - free >= 0.99 * size
    hog = torch.empty(mechanism.free_bytes() - size // 2, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        with pytest.raises(InsufficientMemoryError, match=f"{size} bytes are needed to resume weights"):
            saver.resume(["weights"])
    del hog
    torch.cuda.empty_cache()
    assert saver.resume(["weights"]).bytes == size
    assert all((t == i).all() for i, t in enumerate(named.values()))


@needs_a_gpu
def test_addresses_hold_where_promised_and_so_do_cuda_graphs(
    mechanism: MemoryMechanism, savers: Callable[..., MemorySaver]
) -> None:
    if not mechanism.keeps_addresses:
        pytest.skip("the mechanism doesn't promise it")
    with mechanism.region("weights"):
        inside = torch.ones(1000, 1000, device="cuda")
    named = {"inside": inside, "outside": torch.ones(1000, 1000, device="cuda")}
    where = inside.data_ptr()
    saver = savers(mechanism)
    saver.hold("weights", lambda: named, discardable=always)
    assert inside.data_ptr() == where  # what lies in the region already isn't moved
    addresses = [t.data_ptr() for t in named.values()]
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(1000, 1000, device="cuda")
    torch.add(inside, named["outside"])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.copy_(inside + named["outside"])
    for _ in range(3):
        saver.release(["weights"], backup=True)
        with pytest.raises(ConflictError, match="while it is released"), mechanism.region("weights"):
            pass
        saver.resume(["weights"])
        out.zero_()
        graph.replay()
        assert (out == 2).all()
    assert [t.data_ptr() for t in named.values()] == addresses


@pytest.mark.parametrize("backup", [True, False])
def test_scratch_memory_is_never_kept_and_never_missed(tmp_path: Path, backup: bool) -> None:
    saver = MemorySaver(HostStorageSwap(CPU), pinned=False, backup_folder=str(tmp_path))
    cache = torch.ones(MIB)
    saver.hold("kv_cache", lambda: {"kv_cache": cache}, scratch=True)
    assert saver.release(["kv_cache"], backup=backup).bytes_freed == 4 * MIB
    assert saver._backups == {}
    assert saver.resume(["kv_cache"]).undefined == []
    assert cache.shape == (MIB,)
