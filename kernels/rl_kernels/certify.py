"""Finds out, on the actual device, whether the bits of a row depend on the batch, operation by operation.

`record` runs a model's forward and notes every distinct class of operation in it. `certify` then probes each class with
random inputs: the whole batch against slices of it, at several sizes and offsets, and against the shards that sequence
parallelism makes of it (heads of an attention, tokens of everything else). Where an operation has several
implementations it takes the first one that passes. The table says by name what can't be made exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rl_kernels.attention import attention
from rl_kernels.linear import IMPLEMENTATIONS, ROWS
from rl_kernels.mode import EXACT, Choices, exact_mode, observing
from rl_kernels.reduce import folded_mean
from rl_kernels.verdict_cache import Question, Verdict, VerdictCache, find_verdict

ROWWISE: dict[Callable[..., Any], str] = {
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    F.group_norm: "group_norm",
    F.conv2d: "conv2d",
    F.conv3d: "conv3d",
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
ATTENTIONS = ("attention", "cross_attention")
POSITIVE = ("rsqrt", "pow")  # defined, or interesting, for positive numbers
SLICES = ((0, 1), (0, 2), (1, 3), (2, 5), (3, 8))  # [start, end) of a batch of 8
BATCH = 8
RANKS = (2, 4, 8)  # the degrees of sequence parallelism whose shards are probed
WHOLE_SAMPLES = ("conv2d", "conv3d", "group_norm")  # their second axis isn't one of tokens
LINEAR_ROWS = (*range(1, 34), 48, 64, 77, 100, 128, 200, 257, 512, 777, 1024)
# In order of preference, not of measured time: two processes on equal machines must choose alike, or a trainer's
# forward would not have the rollout's bits.
LINEAR_CANDIDATES = ("padded_rows", "fixed_tiles")


@dataclass(frozen=True)
class OperationClass:
    """One class of operation in a model: its name, the shape that decides its kernel, its dtype.

    shape is (K, N) of a linear layer, (heads, tokens, D) of an attention, (heads, queries, keys, D) of one to another
    sequence, else the input's shape without the batch.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.operation} {'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Recorded:
    """A class as a forward used it: the function, and its arguments behind the first.

    tokens: for a linear layer, every number of rows that one sample brought to it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()


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

    @property
    def cached(self) -> int:
        """How many verdicts an earlier process had found."""
        return sum(v.cached for v in self.verdicts)


@dataclass(frozen=True)
class Exactness:
    """What was found, and whether an engine runs in exact mode because of it. certificate None: nobody looked."""

    enabled: bool
    certificate: Certificate | None

    def describe(self) -> dict[str, object]:
        """For whoever asks what holds, and by name what doesn't."""
        certificate = self.certificate
        return {
            "enabled": self.enabled,
            "certified": None if certificate is None else certificate.exact,
            "refused": [] if certificate is None else list(certificate.refused),
            "cached": 0 if certificate is None else certificate.cached,
            "table": [] if certificate is None else [vars(v) for v in certificate.verdicts],
        }


def record(forward: Callable[[], object]) -> dict[OperationClass, Recorded]:
    """Every distinct class of watched operation that runs in exact mode during `forward()`."""
    seen: dict[OperationClass, Recorded] = {}

    def note(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = _classify(function, args, kwargs)
        if found is not None:
            kind, call = found
            earlier = seen.get(kind, call)
            seen[kind] = replace(earlier, tokens=tuple(sorted({*earlier.tokens, *call.tokens})))

    with observing(note), torch.no_grad():
        forward()
    return seen


def certify(
    recorded: dict[OperationClass, Recorded],
    device: torch.device,
    *,
    linears: Sequence[str] = LINEAR_CANDIDATES,
    cache: VerdictCache | None = None,
) -> Certificate:
    """Probes each class on `device`, under the library switches of exact mode.

    A process remembers what it found (`verdict_cache.forget` makes it look again); with a `cache`, later processes on
    equal machines do too.
    """
    verdicts: list[Verdict] = []
    linear_choices: dict[tuple[int, int, torch.dtype], str] = {}
    per_sample: set[tuple[int, int, torch.dtype]] = set()
    folded: set[tuple[int, torch.dtype]] = set()
    with torch.no_grad(), exact_mode():
        for kind, call in recorded.items():
            question, probe = _asked(kind, call, device, tuple(linears))
            verdict = find_verdict(question, device, probe, cache=cache)
            verdicts.append(verdict)
            if kind.operation == "linear" and verdict.implementation is not None:
                k, n = kind.shape
                linear_choices[k, n, kind.dtype] = verdict.implementation
            elif kind.operation in ATTENTIONS and verdict.implementation == "per_sample":
                heads, *_, d = kind.shape
                per_sample |= {(heads // ranks, d, kind.dtype) for ranks in (1, *RANKS) if heads % ranks == 0}
            elif verdict.implementation == "folded":
                folded.add((kind.shape[-1], kind.dtype))
    choices = Choices(linear=linear_choices, attention_per_sample=frozenset(per_sample), folded_means=frozenset(folded))
    return Certificate(str(device), tuple(verdicts), choices)


def shards(length: int, ranks: int) -> list[slice]:
    """`length` cut for `ranks` ranks: parts of ceil(length / ranks), the last one shorter; empty ones left out."""
    size = -(-length // ranks)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def linear_rows(tokens: Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows at which a linear layer is probed: `LINEAR_ROWS`, and those of one sample of that many tokens
    and of its shards, with and without guidance (two rows of the batch, or one)."""
    parts = {part.stop - part.start for t in tokens for ranks in (1, *RANKS) for part in shards(t, ranks)}
    return tuple(sorted({*LINEAR_ROWS, *parts, *(2 * part for part in parts)}))


def _classify(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OperationClass, Recorded] | None:
    """The class of a call and what is needed to probe it; None if it isn't one that is watched."""
    if function is F.linear:
        x = args[0] if args else kwargs["input"]
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        kind = OperationClass("linear", (weight.shape[1], weight.shape[0]), weight.dtype)
        return kind, Recorded(function, tokens=(x.shape[1:-1].numel(),))
    if function is F.scaled_dot_product_attention:
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        heads, queries, d = query.shape[1:]
        if key.shape[2] != queries:
            return OperationClass("cross_attention", (heads, queries, key.shape[2], d), query.dtype), Recorded(function)
        return OperationClass("attention", (heads, queries, d), query.dtype), Recorded(function)
    name = ROWWISE.get(function)
    if name is None or not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return None
    x = args[0]
    if x.dim() < 2:
        return None
    return OperationClass(name, tuple(x.shape[1:]), x.dtype), Recorded(function, args[1:], kwargs)


def _asked(
    kind: OperationClass, call: Recorded, device: torch.device, linears: tuple[str, ...]
) -> tuple[Question, Callable[[], Verdict]]:
    """The question about a class, with all that the answer depends on, and the probe that answers it."""
    if kind.operation == "linear":
        rows = linear_rows(call.tokens)
        details = f"{rows} {[_name(IMPLEMENTATIONS[name]) for name in linears]}"
        return Question(str(kind), linears, details), partial(_certify_linear, kind, device, linears, rows)
    if kind.operation in ATTENTIONS:
        ways = ("library", "per_sample")
        return Question(str(kind), ways, _name(attention)), partial(_certify_attention, kind, device, ways)
    arguments = [_described(a) for a in call.args] + [f"{k}={_described(v)}" for k, v in sorted(call.kwargs.items())]
    details = f"{_name(call.function)}({', '.join(arguments)})"
    over_rows = kind.operation == "mean" and _reduced_axes(kind, call) == {len(kind.shape)}
    candidates: tuple[str, ...] = ("library", "folded") if over_rows else ("library",)
    return Question(str(kind), candidates, details), partial(_certify_rowwise, kind, call, device, candidates)


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', repr(function))}"


def _described(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{tuple(argument.shape)} {argument.dtype}"
    return repr(argument)


def _certify_linear(
    kind: OperationClass, device: torch.device, names: tuple[str, ...], sizes: tuple[int, ...]
) -> Verdict:
    k, n = kind.shape
    x, weight, bias = (_random(shape, kind, device) for shape in ((max(sizes), k), (n, k), (n,)))
    failure = None
    for name in names:
        implementation = IMPLEMENTATIONS[name]
        whole = implementation(x, weight, bias)
        parts = [slice(s, s + rows) for rows in sizes for s in (0, 13) if s + rows <= len(x) and rows < len(x)]
        part = next((p for p in parts if not torch.equal(implementation(x[p], weight, bias), whole[p])), None)
        wrong = None if part is None else f"{part.stop - part.start} rows from {part.start}"
        wrong = wrong or _differing_under_autograd(implementation, (x[:ROWS], weight, bias), whole[:ROWS])
        if wrong is None:
            microseconds = _time(partial(implementation, x, weight, bias), device)
            return Verdict(str(kind), name, names, failure, round(microseconds, 1))
        failure = failure or f"{name}: {wrong}"
    return Verdict(str(kind), None, names, failure)


def _certify_attention(kind: OperationClass, device: torch.device, names: tuple[str, ...]) -> Verdict:
    heads, queries, *others, d = kind.shape
    keys = others[0] if others else queries
    shapes = [(BATCH, heads, tokens, d) for tokens in (queries, keys, keys)]
    tensors = tuple(_random(shape, kind, device, seed) for seed, shape in enumerate(shapes))
    failure = None
    for name in names:
        attend = partial(attention, per_sample=name == "per_sample")
        whole = attend(*tensors)
        wrong = _first_differing_slice(partial(_attend_slice, attend, tensors), whole)
        wrong = wrong or _first_differing_heads(attend, tensors, whole)
        wrong = wrong or _differing_under_autograd(attend, tensors, whole)
        if wrong is None:
            return Verdict(str(kind), name, names, failure, round(_time(partial(attend, *tensors), device), 1))
        failure = failure or f"{name}: {wrong}"
    return Verdict(str(kind), None, names, failure)


def _differing_under_autograd(
    function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], whole: torch.Tensor
) -> str | None:
    """A trainer's forward records gradients; the library may take another kernel for that."""
    with torch.enable_grad():
        found = function(*(x.detach().requires_grad_() for x in tensors))
    return None if torch.equal(found.detach(), whole) else "the forward under autograd"


def _attend_slice(
    attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], start: int, end: int
) -> torch.Tensor:
    return attend(*(x[start:end] for x in tensors))


def _first_differing_heads(
    attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], whole: torch.Tensor
) -> str | None:
    """Each rank's heads, for the whole batch and for one sample, in memory of their own as ranks have them."""
    heads = whole.shape[1]
    for ranks in (r for r in RANKS if heads % r == 0):
        for part in shards(heads, ranks):
            for samples in (slice(None), slice(1, 2)):
                out = attend(*(x[samples, part].contiguous() for x in tensors))
                if not torch.equal(out, whole[samples, part]):
                    return f"heads {part.start} to {part.stop - 1} of {heads}"
    return None


def _certify_rowwise(kind: OperationClass, call: Recorded, device: torch.device, names: tuple[str, ...]) -> Verdict:
    x = _random((BATCH, *kind.shape), kind, device)
    x = x.abs() + 0.1 if kind.operation in POSITIVE else x
    failure = None
    for name in names:
        keepdim = bool(call.kwargs.get("keepdim", False))
        function = partial(folded_mean, keepdim=keepdim) if name == "folded" else _with_arguments(call)
        whole = function(x)
        wrong = _first_differing_slice(lambda a, b, f=function: f(x[a:b]), whole)  # type: ignore[misc]
        for axis in _token_axes(kind, call, whole):
            wrong = wrong or _first_differing_tokens(function, x, whole, axis)
        wrong = wrong or _differing_under_autograd(function, (x,), whole)
        if wrong is None:
            return Verdict(str(kind), name, names, failure)
        failure = failure or f"{name}: {wrong}"
    return Verdict(str(kind), None, names, failure)


def _with_arguments(call: Recorded) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = call.function(x, *call.args, **call.kwargs)
        return y

    return compute


def _token_axes(kind: OperationClass, call: Recorded, whole: torch.Tensor) -> Iterator[int]:
    """The axes between batch and features along which a sequence shard may cut the operation's input."""
    if kind.operation in WHOLE_SAMPLES:
        return
    for axis in range(1, len(kind.shape)):
        reduced = _reduced_axes(kind, call)
        if axis not in reduced and axis < whole.dim() and whole.shape[axis] == kind.shape[axis - 1]:
            yield axis


def _reduced_axes(kind: OperationClass, call: Recorded) -> set[int]:
    """The axes that the operation sums over, so that no rank can compute it from a part of them."""
    dims = len(kind.shape) + 1
    if kind.operation in ("layer_norm", "rms_norm"):
        normalized = call.kwargs.get("normalized_shape", call.args[0] if call.args else ())
        return set(range(dims - len(normalized), dims))
    position = {"mean": 0, "softmax": 0, "log_softmax": 0, "norm": 1}.get(kind.operation)
    if position is None:
        return set()
    given = call.kwargs.get("dim", call.args[position] if len(call.args) > position else None)
    if given is None:
        return set(range(dims))
    return {axis % dims for axis in ([given] if isinstance(given, int) else given)}


def _first_differing_tokens(
    compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, whole: torch.Tensor, axis: int
) -> str | None:
    """Each rank's tokens, for the whole batch and for one sample, in memory of their own as ranks have them."""
    length = x.shape[axis]
    for ranks in RANKS:
        for part in shards(length, ranks):
            cut = (slice(None),) * (axis - 1) + (part,)
            for samples in (slice(None), slice(1, 2)):
                if not torch.equal(compute(x[samples, *cut].contiguous()), whole[samples, *cut]):
                    return f"tokens {part.start} to {part.stop - 1} of {length} (axis {axis})"
    return None


def _random(shape: tuple[int, ...], kind: OperationClass, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal numbers from a generator of its own: nobody else's random state is touched."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(kind.dtype)


def _first_differing_slice(compute: Callable[[int, int], torch.Tensor], whole: torch.Tensor) -> str | None:
    for start, end in SLICES:
        if not torch.equal(compute(start, end), whole[start:end]):
            return f"samples {start} to {end - 1} of {BATCH}"
    return None


def _time(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
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
