"""Passes over many tensors in one launch: a refit with them is a refit without them, bit for bit and error for error.

A plain implementation of the protocol runs everywhere. Triton's runs on a GPU, or in its interpreter in a process of
its own, and is compiled without either; all of that is skipped without Triton.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from interpreter import passed_in_interpreter

from engine_control import checksum
from engine_control.errors import RefitRefusedError
from engine_control.refit.backends import WeightItem
from engine_control.refit.session import RefitSession
from engine_control.refit.target import ModuleTarget
from engine_control.weight_kernels import WeightKernels
from rl_kernels.fused import triton_is_installed
from rl_kernels.weights import BLOCK, NON_FINITE, TritonWeights, weight_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_TRITON = triton_is_installed() and (INTERPRETED or torch.cuda.is_available())
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not INTERPRETED else torch.device("cpu")
CPU = torch.device("cpu")
on_triton = pytest.mark.skipif(not ON_TRITON, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
compiles = pytest.mark.skipif(not triton_is_installed() or INTERPRETED, reason="needs Triton, not its interpreter")
SIZES = [1, 1023, 1024, 5000, BLOCK, BLOCK + 1, 3 * BLOCK + 777]  # bytes


class PlainKernels:
    """The protocol on a CPU, a loop over tensors. `broken_after`: how many launches succeed."""

    def __init__(self, broken_after: int = 1000) -> None:
        self.device = CPU
        self.launches = 0
        self._broken_after = broken_after

    def reads(self, tensor: torch.Tensor) -> bool:
        return tensor.device == CPU and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0

    def row_sums(
        self, parts: Sequence[torch.Tensor], first_rows: Sequence[int], factors: torch.Tensor, sums: torch.Tensor
    ) -> None:
        assert all(self.reads(part) for part in parts)
        for part, first in zip(parts, first_rows, strict=True):
            flat = part.detach().reshape(-1).view(torch.int8).long()
            rows = torch.nn.functional.pad(flat, (0, -len(flat) % checksum.ROW)).view(-1, checksum.ROW)
            sums[first : first + len(rows)] = (rows @ factors.long()).int()

    def replace(
        self, lives: Sequence[torch.Tensor], news: Sequence[torch.Tensor], olds: Sequence[int] | None
    ) -> torch.Tensor:
        if self.launches == self._broken_after:
            raise RuntimeError("no kernel")
        self.launches += 1
        assert len({live.element_size() for live in lives}) == 1
        assert all(self.reads(live) and self.reads(new) for live, new in zip(lives, news, strict=True))
        for live, new, old in zip(lives, news, olds or [0] * len(lives), strict=True):
            if old:
                ctypes.memmove(old, live.data_ptr(), live.nbytes)
            ctypes.memmove(live.data_ptr(), new.data_ptr(), live.nbytes)
        bad = [new.is_floating_point() and not bool(new.float().isfinite().all()) for new in news]
        return torch.tensor(bad, dtype=torch.int8)


class Weights(torch.nn.Module):
    """Of several dtypes and sizes: less than a row, more than a MiB, none at all, and one that no kernel can write."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(5)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "matrix": ((700, 801), torch.bfloat16),
            "bias": ((301,), torch.bfloat16),
            "scale": ((64, 9), torch.float32),
            "short": ((33,), torch.float16),
            "empty": ((0, 4), torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).to(device, dtype)))
        self.turned = torch.nn.Parameter(torch.randn(40, 30, device=device).t())
        self.register_buffer("count", torch.arange(7, device=device))
        self.register_buffer("mask", torch.tensor([True, False, True], device=device))

    def new(self) -> dict[str, torch.Tensor]:
        """Other numbers for each; one lies where no vector load can read it."""
        found = {n: ~t if t.dtype == torch.bool else t.detach() * 2 + 1 for n, t in self.state_dict().items()}
        room = torch.empty(302, dtype=torch.bfloat16, device=self.bias.device)
        found["bias"] = room[1:].copy_(found["bias"])
        return found


def kinds() -> list[Any]:
    return ["torch", "plain", pytest.param("triton", marks=on_triton)]


@pytest.fixture(params=kinds())
def kernels(request: pytest.FixtureRequest) -> WeightKernels | None:
    return {"torch": lambda: None, "plain": PlainKernels, "triton": lambda: TritonWeights(DEVICE)}[request.param]()


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: t.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def place_of(kernels: WeightKernels | None) -> torch.device:
    return CPU if kernels is None else kernels.device


def together(new: dict[str, torch.Tensor]) -> list[WeightItem]:
    return [WeightItem(None, name, tensor, more=True) for name, tensor in new.items()]


def test_weights_digests_and_an_undo_are_the_same_whoever_writes(kernels: WeightKernels | None) -> None:
    module = Weights(place_of(kernels))
    before, new = bytes_of(dict(module.state_dict())), module.new()
    session = RefitSession(ModuleTarget({"m": module}), ["m"], kernels=kernels)
    session.update(together(new))
    assert bytes_of(dict(module.state_dict())) == bytes_of(new)
    assert session.verify() == checksum.device_digests((f"m.{n}", t.cpu()) for n, t in new.items())
    session.undo()
    assert bytes_of(dict(module.state_dict())) == before


@pytest.mark.parametrize("name", ["matrix", "bias", "scale", "short", "turned"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_number_that_is_none_is_refused_by_name_and_nothing_has_changed(
    kernels: WeightKernels | None, name: str, value: float
) -> None:
    module = Weights(place_of(kernels))
    before, new = bytes_of(dict(module.state_dict())), module.new()
    new[name][(-1,) * new[name].dim()] = value
    session = RefitSession(ModuleTarget({"m": module}), ["m"], kernels=kernels)
    with pytest.raises(RefitRefusedError, match=f"weight '{name}' of 'm': it holds NaN or infinity"):
        session.update(together(new))
    assert bytes_of(dict(module.state_dict())) == before


def test_one_launch_writes_what_stays_valid_together_and_no_more() -> None:
    module = torch.nn.ParameterDict({str(i): torch.zeros(8) for i in range(5)})
    kernels, launches = PlainKernels(), []
    new = {name: torch.full((8,), float(name)) for name in module}

    def items() -> Iterator[WeightItem]:
        for name, tensor in new.items():
            yield WeightItem(None, name, tensor, more=name in "013")
            launches.append(kernels.launches)

    RefitSession(ModuleTarget({"m": module}), ["m"], kernels=kernels).update(items())
    assert launches == [0, 0, 1, 1, 2]
    assert bytes_of(dict(module.state_dict())) == bytes_of(new)


@pytest.mark.parametrize("launches", [0, 1, 2])
def test_a_launch_that_fails_leaves_all_weights_as_they_were(launches: int) -> None:
    module = Weights(CPU)
    before, new = bytes_of(dict(module.state_dict())), module.new()
    kernels = PlainKernels(broken_after=launches)
    session = RefitSession(ModuleTarget({"m": module}), ["m"], kernels=kernels)
    with pytest.raises(RuntimeError, match="no kernel"):
        session.update(together(new))
    assert kernels.launches == launches
    assert bytes_of(dict(module.state_dict())) == before


class Backwards(PlainKernels):
    """A launch's tensors have no order."""

    def replace(
        self, lives: Sequence[torch.Tensor], news: Sequence[torch.Tensor], olds: Sequence[int] | None
    ) -> torch.Tensor:
        return super().replace(lives[::-1], news[::-1], None if olds is None else olds[::-1]).flip(0)


class TiedWeights(torch.nn.Module):
    """One matrix under two names, and a bias of another size of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(8, 4))
        self.head = self.embed
        self.bias = torch.nn.Parameter(torch.randn(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernels", [PlainKernels(broken_after=1), Backwards(broken_after=1)])
def test_a_staged_commit_that_fails_leaves_a_tied_weight_of_two_names_as_it_was(kernels: PlainKernels) -> None:
    module = TiedWeights()
    before = bytes_of(dict(module.state_dict()))
    new = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    session = RefitSession(ModuleTarget({"m": module}), ["m"], staged=True, kernels=kernels)
    session.update(WeightItem(None, name, tensor) for name, tensor in new.items())
    session.verify()
    with pytest.raises(RuntimeError, match="no kernel"):
        session.commit()
    assert kernels.launches == 1
    assert bytes_of(dict(module.state_dict())) == before


def test_without_an_undo_the_kernels_keep_nothing(kernels: WeightKernels | None) -> None:
    module = Weights(place_of(kernels))
    new = module.new()
    session = RefitSession(ModuleTarget({"m": module}), ["m"], undo=False, kernels=kernels)
    session.update(together(new))
    session.verify()
    session.commit()
    assert bytes_of(dict(module.state_dict())) == bytes_of(new)


@on_triton
def test_the_sums_are_those_of_products_of_byte_matrices() -> None:
    torch.manual_seed(0)
    parts = [torch.randint(-128, 128, (size,), dtype=torch.int8) for size in SIZES]
    firsts, total = [], 0
    for part in parts:
        firsts.append(total)
        total += -(-len(part) // checksum.ROW) + 1  # a row that stays zero between two
    sums, wanted = (torch.zeros(total, checksum.COLUMNS, dtype=torch.int32) for _ in range(2))
    PlainKernels().row_sums(parts, firsts, checksum._factors(CPU), wanted)
    on_device = sums.to(DEVICE)
    TritonWeights(DEVICE).row_sums([p.to(DEVICE) for p in parts], firsts, checksum._factors(DEVICE), on_device)
    assert torch.equal(on_device.cpu(), wanted)
    with pytest.raises(ValueError, match="contiguous"):
        TritonWeights(DEVICE).row_sums([], [], checksum._factors(DEVICE).contiguous(), on_device)


@on_triton
@pytest.mark.parametrize("dtype", [*NON_FINITE, torch.int64, torch.bool], ids=str)
def test_every_dtype_is_replaced_and_looked_at(dtype: torch.dtype) -> None:
    """Every byte value occurs, so every float8 does; each tensor is told apart."""
    torch.manual_seed(0)
    kernels, counts = TritonWeights(DEVICE), [7, 70_000, 0, 140_001]
    raw = [
        torch.randint(0, 2 if dtype == torch.bool else 256, (n * dtype.itemsize,), dtype=torch.uint8) for n in counts
    ]
    finite = [torch.ones(n).to(dtype) for n in counts]
    spoilt = [torch.ones(counts[3]).to(dtype) for _ in range(2)]
    for tensor, place in zip(spoilt, (0, -1), strict=True):  # in a whole block, and in the rest behind it
        tensor[place] = float("nan") if dtype.is_floating_point else 0
    for news in (finite, [r.view(dtype) for r in raw], *([*finite[:3], tensor] for tensor in spoilt)):
        lives = [torch.zeros(n, dtype=torch.float32).to(dtype).to(DEVICE) for n in counts]
        olds = [torch.full((n * dtype.itemsize,), 9, dtype=torch.uint8, device=DEVICE) for n in counts]
        before = [live.cpu().clone() for live in lives]
        there = [new.to(DEVICE) for new in news]
        bad = kernels.replace(lives, there, [old.data_ptr() for old in olds]).cpu().tolist()
        wanted = [int(new.is_floating_point() and not bool(new.double().isfinite().all())) for new in news]
        assert bad == wanted
        for live, old, was, new in zip(lives, olds, before, news, strict=True):
            assert torch.equal(live.cpu().view(torch.uint8), new.view(torch.uint8))
            assert torch.equal(old.cpu(), was.view(torch.uint8))


class StandIn(torch.Tensor):
    """As a DTensor is: of a shape and a device, with no memory of its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> StandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        return cast(StandIn, made)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a stand-in")


def test_what_has_no_memory_of_its_own_is_no_work_for_a_kernel() -> None:
    kernels = TritonWeights(CPU)
    whole = torch.ones(64)
    assert kernels.reads(whole)
    assert kernels.reads(torch.ones(0, 4))
    assert not kernels.reads(StandIn(whole))
    assert not kernels.reads(whole[1:])
    assert not kernels.reads(whole.view(8, 8).t())


@pytest.mark.skipif(not torch.cuda.is_available() or not triton_is_installed(), reason="needs a GPU and Triton")
def test_on_a_gpu_an_engine_has_these_kernels() -> None:
    assert weight_kernels(CPU) is None
    found = weight_kernels(torch.device("cuda"))
    assert found is not None
    assert found.device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.skipif(not triton_is_installed() or INTERPRETED, reason="needs Triton, outside of its interpreter")
def test_in_the_interpreter_all_of_it_holds() -> None:
    assert passed_in_interpreter(__file__) >= 3 * 12 + len(NON_FINITE)


def compiled(name: str, signature: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """The kernel's PTX for a GPU of compute capability 9.0, with the alignment that launches find."""
    import triton
    from triton.backends.compiler import GPUTarget

    from rl_kernels.jit import weights as kernels

    whole = {**signature, "blocks": "i32", **dict.fromkeys(constants, "constexpr")}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(signature))}
    source = triton.compiler.ASTSource(getattr(kernels, name), whole, constants, attrs=aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@compiles
def test_whole_blocks_are_read_by_vectors_and_multiplied_on_tensor_cores() -> None:
    import triton.language as tl

    shape = {"ROWS": 128, "ROW": 1024, "COLUMNS": 8, "PADDED": 16, "SLICE": 128}
    sums = compiled("row_sums", {"table": "*i64", "factors": "*i8", "sums": "*i32"}, shape, num_warps=4, num_stages=4)
    assert "cp.async.cg.shared.global" in sums
    assert re.search(r"wgmma\.mma_async\S*s32\.s8\.s8", sums)
    for item, size in ((tl.int8, 1), (tl.int16, 2), (tl.int32, 4)):
        constants = {"ITEM": item, "ITEMS": BLOCK // size, "PART": (16 << 10) // size, "KEEP": True}
        copy = compiled("replace", {"table": "*i64", "bad": "*i8"}, constants, num_warps=8, num_stages=3)
        for access in ("ld", "st"):
            assert len(re.findall(rf"\b{access}\.global\.v4\.b32", copy)) == 8  # both tensors, all of a part


@pytest.mark.parametrize(
    "fault", [RuntimeError("Failed to find C compiler"), torch.AcceleratorError("CUDA error")], ids=str
)
def test_a_triton_that_cannot_compile_leaves_the_work_to_torch(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_nothing(kernels: object) -> None:
        raise fault

    monkeypatch.setattr("rl_kernels.weights.triton_is_installed", lambda: True)
    monkeypatch.setattr("rl_kernels.weights._compile", compile_nothing)
    device = torch.device("cuda", 0)
    if isinstance(fault, torch.AcceleratorError):
        with pytest.raises(torch.AcceleratorError):
            weight_kernels(device)
    else:
        assert weight_kernels(device) is None
        assert "C compiler" in caplog.text
