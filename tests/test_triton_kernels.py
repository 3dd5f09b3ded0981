"""The Triton kernels: what their twins say, and the same bits for a row wherever it is and whatever stands beside it.

On a GPU they run in bf16, fp16 and fp32. Without one they run in Triton's interpreter, in fp32 (bf16 is wrong there),
in a process of its own; and they are compiled for a GPU, which needs none. All of it is skipped without Triton.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiled_kernels import compiled_for_hopper
from interpreter import passed_in_interpreter

from rl_kernels import reference
from rl_kernels.fused import block_of, interpreted_kernels, readable, triton_is_installed, units, warps_for
from rl_kernels.gated_residual import gated_residual, gated_residual_norm
from rl_kernels.joint_qkv import Stream, joint_qkv
from rl_kernels.modulated_norm import modulated_norm, modulated_norm_pair

pytestmark = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNABLE = INTERPRETED or torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
# Both sides are rounded once from nearly the same fp32 number: at most one unit in the last place between them.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# (width, head_dim, longest sequence): no powers of two in width or tokens, as in real models.
SMALL = [(48, 16, 7), (96, 32, 3), (4352, 128, 3)]
SHAPES = SMALL if INTERPRETED else [(1536, 64, 333), (3072, 128, 70), (2432, 64, 50), *SMALL]
SAMPLES = 5
FMA = re.compile(r"\bfma\.")

runs = pytest.mark.skipif(not RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def _on_triton() -> Iterator[None]:
    torch.manual_seed(0)
    with interpreted_kernels() if INTERPRETED else nullcontext():
        yield


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


class Inputs:
    """Rows of every operation, and each operation as a function of which samples and tokens of them it gets."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        width, self.head_dim, tokens = shape
        self.x, self.y = (random(SAMPLES, tokens, width, dtype=dtype) for _ in range(2))
        self.vectors = random(SAMPLES, 6 * width, dtype=dtype).chunk(6, dim=1)
        self.projections = [random(SAMPLES, tokens, width, dtype=dtype) for _ in range(6)]
        self.weights = [1 + random(self.head_dim, dtype=dtype) for _ in range(4)]
        angles = torch.randn(2, tokens, self.head_dim // 2)
        self.ropes = torch.polar(torch.ones_like(angles), angles).to(DEVICE)

    def streams(self, rows: slice, tokens: slice, *, rope: bool) -> tuple[Stream, Stream]:
        parts = [p[rows, tokens] for p in self.projections]
        ropes = [r[tokens] if rope else None for r in self.ropes]
        return (
            Stream(*parts[:3], *self.weights[:2], ropes[0]),
            Stream(*parts[3:], *self.weights[2:], ropes[1]),
        )

    def call(self, name: str, rows: slice, tokens: slice, twin: bool = False) -> tuple[torch.Tensor, ...]:
        """The named operation, or its twin, on those samples and tokens: outputs `[rows, tokens, ...]`."""
        x, y, (a, b, c, d, *_) = self.x[rows, tokens], self.y[rows, tokens], (v[rows] for v in self.vectors)
        norm: Callable[..., Any] = reference.modulated_norm if twin else modulated_norm
        if name == "modulated_norm":
            return (norm(x, a, b),)
        if name == "modulated_norm_pair":
            return (norm(x, a, b), norm(x, c, d)) if twin else modulated_norm_pair(x, (a, b), (c, d))
        if name == "gated_residual":
            return (reference.gated_residual(x, y, a) if twin else gated_residual(x, y, a),)
        if name == "gated_residual_norm":
            fused: Callable[..., Any] = reference.gated_residual_norm if twin else gated_residual_norm
            return fused(x, y, a, scale=b, shift=c)
        joint: Callable[..., Any] = reference.joint_qkv if twin else joint_qkv
        first, second = self.streams(rows, tokens, rope="rope" in name)
        if "one stream" in name:
            return tuple(z.transpose(1, 2) for z in joint(first, head_dim=self.head_dim))
        if "bare" in name:
            first, second = (s._replace(query_weight=None, key_weight=None) for s in (first, second))
        return tuple(z.transpose(1, 2) for z in joint(first, second, head_dim=self.head_dim))


NAMES = [
    "modulated_norm",
    "modulated_norm_pair",
    "gated_residual",
    "gated_residual_norm",
    "joint_qkv",
    "joint_qkv with rope",
    "joint_qkv of one stream",
    "joint_qkv, bare",
]
names = pytest.mark.parametrize("name", NAMES)
ALL = slice(None)


@runs
@names
@shapes
@dtypes
def test_a_kernel_computes_what_its_twin_says(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = Inputs(shape, dtype)
    for ours, twin in zip(inputs.call(name, ALL, ALL), inputs.call(name, ALL, ALL, twin=True), strict=True):
        assert ours.dtype == dtype
        assert ours.shape == twin.shape
        torch.testing.assert_close(ours, twin, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        if name == "gated_residual":  # no sum in it, and no fused multiply-add
            assert torch.equal(ours, twin)


@runs
@names
@shapes
@dtypes
def test_a_row_has_the_same_bits_in_every_batch_and_at_every_place(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs, tokens = Inputs(shape, dtype), shape[2]
    whole = inputs.call(name, ALL, ALL)
    for rows in (slice(0, 1), slice(3, 4), slice(0, 2), slice(2, 5)):
        for some in (ALL, slice(0, 1), slice(1, 3), slice(tokens // 2, tokens)):
            parts = inputs.call(name, rows, some)
            for part, full in zip(parts, whole, strict=True):
                streams = full.shape[1] // tokens  # a joint sequence has both streams' tokens
                each = full.unflatten(1, (streams, tokens))[rows, :, some].flatten(1, 2)
                assert torch.equal(part, each), (rows, some)


@runs
@names
@dtypes
def test_a_row_has_the_same_bits_in_strided_and_misaligned_inputs(name: str, dtype: torch.dtype) -> None:
    inputs = Inputs(SHAPES[0], dtype)
    expected = inputs.call(name, ALL, ALL)

    def misaligned(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros(x.numel() + 1)
        wide[1:] = x.flatten()
        return wide[1:].view(x.shape)

    def token_major(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def every_other_element(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, dim=-1)[..., ::2]

    for moved in (misaligned, token_major, every_other_element):
        other = Inputs.__new__(Inputs)
        other.head_dim, other.ropes = inputs.head_dim, inputs.ropes
        other.x, other.y = moved(inputs.x), moved(inputs.y)
        other.projections = [moved(p) for p in inputs.projections]
        other.vectors = tuple(moved(v) for v in inputs.vectors)
        other.weights = inputs.weights if moved is token_major else [moved(w) for w in inputs.weights]
        for ours, before in zip(other.call(name, ALL, ALL), expected, strict=True):
            assert torch.equal(ours, before), moved.__name__


@runs
@names
def test_a_forward_under_autograd_has_the_bits_of_one_without_and_its_twins_gradients(name: str) -> None:
    inputs = Inputs(SMALL[0], torch.float32)
    without = inputs.call(name, ALL, ALL)
    leaves = [inputs.x, inputs.y, *inputs.projections, *inputs.weights]
    vectors = torch.cat(inputs.vectors, dim=1).requires_grad_()
    inputs.vectors = vectors.chunk(6, dim=1)
    for leaf in leaves:
        leaf.requires_grad_()

    def gradients(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        total = torch.stack([z.square().sum() for z in outputs]).sum()
        return list(torch.autograd.grad(total, [*leaves, vectors], allow_unused=True))

    outputs = inputs.call(name, ALL, ALL)
    assert all(torch.equal(a, b) for a, b in zip(outputs, without, strict=True))
    mine, theirs = gradients(outputs), gradients(inputs.call(name, ALL, ALL, twin=True))
    assert any(g is not None for g in mine)
    for ours, twin in zip(mine, theirs, strict=True):
        assert (ours is None) == (twin is None)
        if ours is not None and twin is not None:
            torch.testing.assert_close(ours, twin, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that starts the interpreter")
def test_all_of_this_holds_in_the_interpreter() -> None:
    assert passed_in_interpreter(__file__) >= len(NAMES) * (2 * len(SMALL) + 2)


# --- compiled without a GPU -----------------------------------------------------------------------------------------


def configurations() -> list[tuple[str, dict[str, Any], int]]:
    """Every kernel at the row shapes of SD3.5-medium and Qwen-Image: name, constants, warps."""
    found: list[tuple[str, dict[str, Any], int]] = []
    for width, head_dim in ((1536, 64), (3072, 128)):
        block, row = block_of(width), {"EPS": 1e-6, "WIDTH": width}
        for flag in (False, True):
            found.append(("modulated_norm", {**row, "BLOCK": block, "PAIR": flag}, warps_for(block)))
            found.append(("gated_residual", {**row, "BLOCK": block, "NORM": flag}, warps_for(block)))
            heads = {**row, "HEADS": 32, "HEAD_DIM": head_dim, "NORM": True, "ROPE": flag}
            found.append(("joint_qkv", heads, warps_for(32 * head_dim)))
    return found


@compiles
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("name", "constants", "warps"), configurations())
def test_a_kernel_compiles_to_whole_vector_loads_without_spills_or_fused_multiply_adds(
    name: str, constants: dict[str, Any], warps: int, dtype: str
) -> None:
    def kind_of(argument: str) -> str:
        return "*fp32" if argument == "rope" and constants.get("ROPE") else f"*{dtype}"

    assembly = compiled_for_hopper(name, name, kind_of, constants, num_warps=warps).asm["ptx"]
    accesses = re.findall(r"(?:ld|st)\.global\S*", assembly)
    assert accesses
    assert all(".v4.b32" in a for a in accesses), accesses
    assert not FMA.search(assembly)
    assert ".local" not in assembly


@compiles
def test_one_compiled_kernel_serves_every_batch_and_every_token_count() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from rl_kernels.jit.gated_residual import gated_residual as kernel

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    seen = set()
    for samples in (1, 2, 16):
        for tokens in (1, 7, 16, 333):
            x = readable(torch.randn(samples, tokens, 64).bfloat16())
            vector = readable(torch.randn(samples, 6 * 64).bfloat16().chunk(6, dim=1)[1])
            strides = (units(x, 0), units(x, 1), units(x, 0), units(x, 1), *[units(vector, 0)] * 3)
            constants = {"EPS": 1e-6, "WIDTH": 64, "BLOCK": 64, "NORM": True}
            _, specialised, _ = bind(x, x, vector, vector, vector, x, x, tokens, *strides, **constants, num_warps=1)
            seen.add(str(specialised))
    assert len(seen) == 1
