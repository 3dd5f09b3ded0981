"""Finds out, on the actual device, whether the bits of a row depend on the batch, operation by operation.

`record` runs a model's forward and notes every distinct class of operation in it. `certify` then probes each class with
random inputs: the whole batch against slices of it, at several sizes and offsets, and attention also against a subset
of its heads (as sequence parallelism hands them out). Where an operation has several implementations it takes the first
one that passes. The table says by name what can't be made exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from rl_kernels.attention import attention
from rl_kernels.linear import IMPLEMENTATIONS
from rl_kernels.mode import EXACT, Choices, exact_mode, observing

ROWWISE: dict[Callable[..., Any], str] = {
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    F.group_norm: "group_norm",
    F.silu: "silu",
    F.gelu: "gelu",
    F.softmax: "softmax",
    F.log_softmax: "log_softmax",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    torch.exp: "exp",
    torch.sin: "sin",
    torch.cos: "cos",
    torch.rsqrt: "rsqrt",
    torch.norm: "norm",
    torch.Tensor.mean: "mean",
    torch.Tensor.pow: "pow",
}
POSITIVE = ("rsqrt", "pow")  # defined, or interesting, for positive numbers
SLICES = ((0, 1), (0, 2), (1, 3), (2, 5), (3, 8))  # [start, end) of a batch of 8
BATCH = 8
LINEAR_ROWS = (*range(1, 34), 48, 64, 77, 100, 128, 200, 257, 512, 777, 1024)
# In order of preference, not of measured time: two processes on equal machines must choose alike, or a trainer's
# forward would not have the rollout's bits.
LINEAR_CANDIDATES = ("padded_rows", "fixed_tiles")


@dataclass(frozen=True)
class OperationClass:
    """One class of operation in a model: its name, the shape that decides its kernel, its dtype.

    shape is (K, N) of a linear layer, (heads, tokens, D) of an attention, else the input's shape without the batch.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.operation} {'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Recorded:
    """A class as a forward used it: the function, and its arguments behind the first."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What was found for one class. implementation is the first that passed; None: none did."""

    operation: str
    implementation: str | None
    tried: tuple[str, ...]
    failed_at: str | None = None
    microseconds: float | None = None

    @property
    def exact(self) -> bool:
        return self.implementation is not None


@dataclass(frozen=True)
class Certificate:
    """The verdicts of a model on a device, and the choices that follow from them."""

    device: str
    verdicts: tuple[Verdict, ...]
    choices: Choices = field(default=EXACT)

    @property
    def exact(self) -> bool:
        return all(v.exact for v in self.verdicts)

    @property
    def refused(self) -> tuple[str, ...]:
        """The operations that no implementation makes exact here, by name."""
        return tuple(v.operation for v in self.verdicts if not v.exact)


def record(forward: Callable[[], object]) -> dict[OperationClass, Recorded]:
    """Every distinct class of watched operation that runs in exact mode during `forward()`."""
    seen: dict[OperationClass, Recorded] = {}

    def note(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = _classify(function, args, kwargs)
        if found is not None:
            seen.setdefault(*found)

    with observing(note), torch.no_grad():
        forward()
    return seen


def certify(
    recorded: dict[OperationClass, Recorded],
    device: torch.device,
    *,
    linears: Sequence[str] = LINEAR_CANDIDATES,
) -> Certificate:
    """Probes each class on `device`, under the library switches of exact mode.

    A process remembers what it found for a class, device and thread count; `forget` makes it look again.
    """
    verdicts: list[Verdict] = []
    linear_choices: dict[tuple[int, int, torch.dtype], str] = {}
    per_sample: set[tuple[int, int, torch.dtype]] = set()
    threads = torch.get_num_threads()
    with torch.no_grad(), exact_mode():
        for kind, call in recorded.items():
            if kind.operation == "linear":
                verdict = _certify_linear(kind, device, threads, tuple(linears))
                if verdict.implementation is not None:
                    linear_choices[(*kind.shape, kind.dtype)] = verdict.implementation  # type: ignore[index]
            elif kind.operation == "attention":
                verdict = _certify_attention(kind, device, threads)
                if verdict.implementation == "per_sample":
                    per_sample.add((kind.shape[0], kind.shape[2], kind.dtype))
            else:
                verdict = _certify_rowwise(kind, call, device)
            verdicts.append(verdict)
    return Certificate(str(device), tuple(verdicts), Choices(linear_choices, frozenset(per_sample)))


def forget() -> None:
    """Drops what this process remembers of earlier probes."""
    _certify_linear.cache_clear()
    _certify_attention.cache_clear()


def _classify(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OperationClass, Recorded] | None:
    """The class of a call and what is needed to probe it; None if it isn't one that is watched."""
    if function is F.linear:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        kind = OperationClass("linear", (weight.shape[1], weight.shape[0]), weight.dtype)
        return kind, Recorded(function)
    if function is F.scaled_dot_product_attention:
        query = args[0] if args else kwargs["query"]
        kind = OperationClass("attention", tuple(query.shape[1:]), query.dtype)
        return kind, Recorded(function)
    name = ROWWISE.get(function)
    if name is None or not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return None
    x = args[0]
    if x.dim() < 2:
        return None
    return OperationClass(name, tuple(x.shape[1:]), x.dtype), Recorded(function, args[1:], kwargs)


@lru_cache(maxsize=4096)
def _certify_linear(kind: OperationClass, device: torch.device, threads: int, names: tuple[str, ...]) -> Verdict:
    k, n = kind.shape
    x, weight, bias = (_random(shape, kind, device) for shape in ((max(LINEAR_ROWS), k), (n, k), (n,)))
    failure = None
    for name in names:
        implementation = IMPLEMENTATIONS[name]
        whole = implementation(x, weight, bias)
        parts = [slice(s, s + rows) for rows in LINEAR_ROWS for s in (0, 13) if s + rows <= len(x)]
        wrong = next((p for p in parts if not torch.equal(implementation(x[p], weight, bias), whole[p])), None)
        if wrong is None:
            microseconds = _time(partial(implementation, x, weight, bias), device)
            return Verdict(str(kind), name, names, failure, round(microseconds, 1))
        failure = failure or f"{name}: {wrong.stop - wrong.start} rows from {wrong.start}"
    return Verdict(str(kind), None, names, failure)


@lru_cache(maxsize=4096)
def _certify_attention(kind: OperationClass, device: torch.device, threads: int) -> Verdict:
    heads, tokens, d = kind.shape
    q, k, v = (_random((BATCH, heads, tokens, d), kind, device, seed) for seed in range(3))
    names, failure, half = ("library", "per_sample"), None, max(heads // 2, 1)
    for name in names:
        attend = partial(attention, per_sample=name == "per_sample")
        whole = attend(q, k, v)
        wrong = _first_differing_slice(partial(_attend_slice, attend, (q, k, v)), whole)
        if wrong is None and not torch.equal(attend(q[:, :half], k[:, :half], v[:, :half]), whole[:, :half]):
            wrong = f"the first {half} of {heads} heads"
        if wrong is None:
            return Verdict(str(kind), name, names, failure, round(_time(partial(attend, q, k, v), device), 1))
        failure = failure or f"{name}: {wrong}"
    return Verdict(str(kind), None, names, failure)


def _attend_slice(
    attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], start: int, end: int
) -> torch.Tensor:
    return attend(*(x[start:end] for x in tensors))


def _certify_rowwise(kind: OperationClass, call: Recorded, device: torch.device) -> Verdict:
    x = _random((BATCH, *kind.shape), kind, device)
    x = x.abs() + 0.1 if kind.operation in POSITIVE else x
    whole = call.function(x, *call.args, **call.kwargs)
    wrong = _first_differing_slice(lambda a, b: call.function(x[a:b], *call.args, **call.kwargs), whole)
    return Verdict(str(kind), None if wrong else "library", ("library",), wrong)


def _random(shape: tuple[int, ...], kind: OperationClass, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal numbers from a generator of its own: nobody else's random state is touched."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(kind.dtype)


def _first_differing_slice(compute: Callable[[int, int], torch.Tensor], whole: torch.Tensor) -> str | None:
    for start, end in SLICES:
        if not torch.equal(compute(start, end), whole[start:end]):
            return f"samples {start} to {end - 1} of {BATCH}"
    return None


def _time(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median microseconds of a call, after one that warms up."""
    call()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) * 1e6)
    return sorted(taken)[repeats // 2]
