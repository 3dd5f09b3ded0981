"""Finds out, on the actual device, whether the fused operations of a model are row-invariant and right, one by one.

`record_fused` runs a forward with fused blocks and notes every distinct class of fused operation in it, and of
attention on the memory order that fused blocks hand it. `certify_fused` probes each with random inputs: samples of a
batch by themselves, the tokens of each rank, the forward under autograd, and the distance from the plain twin. A class
that fails names a reason to keep the stock blocks; it is never a reason against exact mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any

import torch
import torch.nn.functional as F

from rl_kernels import reference
from rl_kernels.attention import AttentionPlan
from rl_kernels.certify import BATCH, RANKS, SLICES, shards
from rl_kernels.fused import runs_on_triton
from rl_kernels.gated_residual import gated_residual, gated_residual_norm
from rl_kernels.gelu_linear import activated_linear
from rl_kernels.joint_qkv import Stream, joint_qkv
from rl_kernels.mode import EXACT, Choices, exact_mode, observing
from rl_kernels.modulated_norm import modulated_norm, modulated_norm_pair
from rl_kernels.verdict_cache import Question, Verdict, VerdictCache, find_verdict

FUSED: dict[Callable[..., Any], str] = {
    modulated_norm: "modulated_norm",
    modulated_norm_pair: "modulated_norm_pair",
    gated_residual: "gated_residual",
    gated_residual_norm: "gated_residual_norm",
    joint_qkv: "joint_qkv",
    activated_linear: "activated_linear",
}
STOCK = "torch"  # the candidate that is left: the blocks' own forwards
# Tensors [B, T, width] of a stream, and vectors [B, width], that an operation takes.
ARGUMENTS = {
    "modulated_norm": (1, 2),
    "modulated_norm_pair": (1, 4),
    "gated_residual": (2, 1),
    "gated_residual_norm": (2, 3),
    "joint_qkv": (3, 0),
    "attention": (3, 0),
    "activated_linear": (1, 0),
}
VECTORS = 6  # of one wide projection, as blocks make them
# Kernel and twin round once from nearly the same fp32 number: at most one unit in the last place between them.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class FusedClass:
    """One class of fused operation: its name, and all that decides which kernel runs.

    width: elements of a token; outputs: of `activated_linear`, those of a token of the result. head_dim: of `joint_qkv`
    and `attention`, else 0. streams: of `joint_qkv`, whether each has a head norm ("norm") and a rotation ("rope"), in
    the order of the joint sequence.
    """

    operation: str
    width: int
    dtype: torch.dtype
    head_dim: int = 0
    streams: tuple[tuple[str, ...], ...] = ()
    eps: float = 1e-6
    outputs: int = 0

    def __str__(self) -> str:
        shape = f"{self.width // self.head_dim}x{self.head_dim}" if self.head_dim else str(self.width)
        if self.outputs:
            shape += f"x{self.outputs}"
        parts = [self.operation, shape, str(self.dtype).removeprefix("torch.")]
        if self.operation == "attention":
            parts.append("of [B, T, H, D]")
        if self.streams:
            parts.append(f"({' + '.join(' '.join(s) or 'plain' for s in self.streams)})")
        if self.eps != FusedClass.eps:
            parts.append(f"eps {self.eps:g}")
        return " ".join(parts)


@dataclass(frozen=True)
class FusedCall:
    """A class as a forward used it. tokens: the tokens of each stream of one sample, for every call that differs."""

    function: Callable[..., Any]
    tokens: tuple[tuple[int, ...], ...]


def record_fused(forward: Callable[[], object]) -> dict[FusedClass, FusedCall]:
    """Every distinct class of fused operation that runs in exact mode during `forward()`."""
    seen: dict[FusedClass, FusedCall] = {}

    def note(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = _classify(function, args, kwargs)
        if found is not None:
            kind, tokens = found
            earlier = seen.get(kind, FusedCall(function, ()))
            seen[kind] = replace(earlier, tokens=tuple(sorted({*earlier.tokens, tokens})))

    with observing(note), torch.no_grad():
        forward()
    return seen


def certify_fused(
    recorded: dict[FusedClass, FusedCall],
    device: torch.device,
    *,
    choices: Choices = EXACT,
    cache: VerdictCache | None = None,
) -> tuple[Verdict, ...]:
    """Probes each class on `device`, under the library switches of exact mode; a verdict each, in recorded order.

    A verdict's implementation is `torch`, the stock blocks, where the fused operation failed, with the reason in
    `failed_at`; else `triton`, or `twin` where no kernel serves such rows. An attention keeps what `choices` give it,
    `library` or `per_sample`.
    """
    verdicts = []
    with torch.no_grad(), exact_mode(choices=choices):
        for kind, call in recorded.items():
            candidates = (_serving(kind, device, choices), STOCK)
            name = f"{getattr(call.function, '__module__', None)}.{getattr(call.function, '__qualname__', None)}"
            question = Question(str(kind), candidates, f"{name} {call.tokens}")
            probe = partial(_certify, kind, call, device, choices=choices, candidates=candidates)
            verdicts.append(find_verdict(question, device, probe, cache=cache))
    return tuple(verdicts)


def _classify(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[FusedClass, tuple[int, ...]] | None:
    """The class of a call and the tokens of its streams; None if it isn't one that is probed here."""
    if function is F.scaled_dot_product_attention:
        query = args[0] if args else kwargs["query"]
        if query.dim() != 4 or query.is_contiguous() or not query.transpose(1, 2).is_contiguous():
            return None
        _, heads, tokens, head_dim = query.shape
        return FusedClass("attention", heads * head_dim, query.dtype, head_dim), (tokens,)
    operation = FUSED.get(function)
    if operation is None:
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    eps = given.get("eps", FusedClass.eps)
    if operation == "activated_linear":
        x, outputs = given["x"], len(given["weight"])
        return FusedClass(operation, x.shape[-1], x.dtype, outputs=outputs), (x.shape[1],)
    if operation != "joint_qkv":
        x = given["residual" if "residual" in given else "x"]
        return FusedClass(operation, x.shape[-1], x.dtype, eps=eps), (x.shape[1],)
    streams = [s for s in (given["first"], given["second"]) if s is not None]
    kinds = tuple(_stream_kind(s) for s in streams)
    query = streams[0].query
    kind = FusedClass(operation, query.shape[-1], query.dtype, given["head_dim"], kinds, eps)
    return kind, tuple(s.query.shape[1] for s in streams)


def _stream_kind(stream: Stream) -> tuple[str, ...]:
    has = {"norm": stream.query_weight is not None, "rope": stream.rope is not None}
    return tuple(name for name, there in has.items() if there)


def _serving(kind: FusedClass, device: torch.device, choices: Choices) -> str:
    """What computes the class where fused blocks run."""
    if kind.operation == "activated_linear":
        return "library"
    if kind.operation == "attention":
        key = (kind.width // kind.head_dim, kind.head_dim, kind.dtype)
        return "per_sample" if key in choices.attention_per_sample else "library"
    row = kind.head_dim or kind.width
    whole_heads = not kind.head_dim or row & (row - 1) == 0  # the kernel's heads are powers of two
    return "triton" if whole_heads and runs_on_triton(torch.empty(0, device=device), row) else "twin"


def _certify(
    kind: FusedClass, call: FusedCall, device: torch.device, *, choices: Choices, candidates: tuple[str, ...]
) -> Verdict:
    for tokens in call.tokens:
        wrong = _first_failure(kind, call.function, _random_inputs(kind, tokens, device), choices)
        if wrong is not None:
            sizes = " + ".join(map(str, tokens))
            return Verdict(str(kind), STOCK, candidates, f"{candidates[0]}: {wrong} ({sizes} tokens)")
    return Verdict(str(kind), candidates[0], candidates)


# --- inputs and outputs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    """What one call gets: tensors `[B, T, width]` stream by stream, vectors `[B, width]`, and what all samples share.

    ropes: `[T, head_dim / 2]` or None, and weights: two `[head_dim]` or none, one entry a stream each; of a
    linear layer, its weight and bias.
    """

    streams: tuple[tuple[torch.Tensor, ...], ...]
    vectors: tuple[torch.Tensor, ...] = ()
    ropes: tuple[torch.Tensor | None, ...] = ()
    weights: tuple[tuple[torch.Tensor, ...], ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(stream[0].shape[1] for stream in self.streams)

    def of_samples(self, samples: slice) -> _Inputs:
        """Those samples, in the same memory."""
        streams = tuple(tuple(x[samples] for x in stream) for stream in self.streams)
        return replace(self, streams=streams, vectors=tuple(v[samples] for v in self.vectors))

    def of_tokens(self, parts: Sequence[slice]) -> _Inputs:
        """Those tokens of each stream, in memory of their own as ranks have them."""
        streams = tuple(
            tuple(x[:, part].contiguous() for x in stream) for stream, part in zip(self.streams, parts, strict=True)
        )
        ropes = tuple(None if rope is None else rope[p].contiguous() for rope, p in zip(self.ropes, parts, strict=True))
        return replace(self, streams=streams, ropes=ropes)

    def that_require_grad(self) -> _Inputs:
        """The same numbers in the same memory, as leaves that gradients are wanted for."""
        return replace(
            self,
            streams=tuple(tuple(x.detach().requires_grad_() for x in stream) for stream in self.streams),
            vectors=tuple(v.detach().requires_grad_() for v in self.vectors),
            weights=tuple(tuple(w.detach().requires_grad_() for w in pair) for pair in self.weights),
        )


def _random_inputs(kind: FusedClass, tokens: tuple[int, ...], device: torch.device) -> _Inputs:
    """`BATCH` samples of normal numbers, from a generator of its own: nobody else's random state is touched."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(kind.dtype)

    tensors, vectors = ARGUMENTS[kind.operation]
    streams = tuple(tuple(random(BATCH, t, kind.width) for _ in range(tensors)) for t in tokens)
    wide = random(BATCH, VECTORS * kind.width).chunk(VECTORS, dim=1) if vectors else ()
    ropes: list[torch.Tensor | None] = [None for _ in tokens]
    weights: list[tuple[torch.Tensor, ...]] = [() for _ in tokens]
    for i, has in enumerate(kind.streams):
        if "rope" in has:
            angles = torch.randn(tokens[i], kind.head_dim // 2, device=device, generator=generator)
            ropes[i] = torch.polar(torch.ones_like(angles), angles)
        if "norm" in has:
            weights[i] = (1 + random(kind.head_dim), 1 + random(kind.head_dim))
    if kind.outputs:
        scale = kind.width**-0.5
        weights[0] = (random(kind.outputs, kind.width) * scale, random(kind.outputs))
    return _Inputs(streams, wide[:vectors], tuple(ropes), tuple(weights))


def _compute(kind: FusedClass, function: Callable[..., Any], inputs: _Inputs) -> tuple[torch.Tensor, ...]:
    """What the function, called as blocks call it, makes of the inputs: tensors `[B, tokens of all streams, ...]`."""
    stream, vectors = inputs.streams[0], inputs.vectors
    if kind.operation == "attention":
        heads = (x.unflatten(-1, (-1, kind.head_dim)).transpose(1, 2) for x in stream)
        return (function(*heads).transpose(1, 2),)
    if kind.operation == "joint_qkv":
        both = []
        for tensors, pair, rope in zip(inputs.streams, inputs.weights, inputs.ropes, strict=True):
            query, key, value = tensors
            query_weight, key_weight = pair or (None, None)
            both.append(Stream(query, key, value, query_weight, key_weight, rope))
        joint = function(*both, head_dim=kind.head_dim, eps=kind.eps)
        return tuple(x.transpose(1, 2) for x in joint)
    if kind.operation == "activated_linear":
        return (function(*stream, *inputs.weights[0]),)
    if kind.operation == "modulated_norm":
        return (function(*stream, *vectors, eps=kind.eps),)
    if kind.operation == "modulated_norm_pair":
        return tuple(function(*stream, vectors[:2], vectors[2:], eps=kind.eps))
    if kind.operation == "gated_residual":
        return (function(*stream, *vectors),)
    gate, scale, shift = vectors
    return tuple(function(*stream, gate, scale=scale, shift=shift, eps=kind.eps))


def _twin_of_pair(x: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor], eps: float) -> tuple[torch.Tensor, ...]:
    return tuple(reference.modulated_norm(x, scale, shift, eps=eps) for scale, shift in pairs)


TWINS: dict[str, Callable[..., Any]] = {
    "modulated_norm": reference.modulated_norm,
    "modulated_norm_pair": _twin_of_pair,
    "gated_residual": reference.gated_residual,
    "gated_residual_norm": reference.gated_residual_norm,
    "joint_qkv": reference.joint_qkv,
    "activated_linear": reference.gelu_linear,
}


# --- the probes -----------------------------------------------------------------------------------------------------


def _first_failure(kind: FusedClass, function: Callable[..., Any], inputs: _Inputs, choices: Choices) -> str | None:
    """Where the operation first has other bits than it should, or is far from what it means; None: nowhere."""
    compute = partial(_compute, kind, function)
    whole = compute(inputs)
    wrong = _differing_samples(compute, inputs, whole)
    if kind.operation == "attention":
        wrong = wrong or _differing_in_other_memory(kind, function, inputs, whole)
        wrong = wrong or _differing_beside_padding(kind, function, inputs, choices)
    else:
        wrong = wrong or _differing_tokens(compute, inputs, whole)
    wrong = wrong or _differing_under_autograd(compute, inputs, whole)
    if kind.operation in TWINS:
        wrong = wrong or _far_from_twin(_compute(kind, TWINS[kind.operation], inputs), whole, TOLERANCE[kind.dtype])
    return wrong


Compute = Callable[[_Inputs], tuple[torch.Tensor, ...]]


def _equal(some: tuple[torch.Tensor, ...], others: Iterator[torch.Tensor] | tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _differing_samples(compute: Compute, inputs: _Inputs, whole: tuple[torch.Tensor, ...]) -> str | None:
    for start, end in SLICES:
        samples = slice(start, end)
        if not _equal(compute(inputs.of_samples(samples)), (x[samples] for x in whole)):
            return f"samples {start} to {end - 1} of {BATCH}"
    return None


def _differing_tokens(compute: Compute, inputs: _Inputs, whole: tuple[torch.Tensor, ...]) -> str | None:
    """Each rank's tokens of every stream, for the whole batch and for one sample."""
    starts = (0, *accumulate(inputs.tokens))
    for ranks in RANKS:
        for rank, parts in enumerate(_dealt(inputs.tokens, ranks)):
            theirs = [
                start + i for start, part in zip(starts, parts, strict=False) for i in range(part.start, part.stop)
            ]
            for samples in (slice(None), slice(1, 2)):
                outputs = compute(inputs.of_samples(samples).of_tokens(parts))
                if not _equal(outputs, (x[samples, theirs] for x in whole)):
                    return f"the tokens of rank {rank} of {ranks}"
    return None


def _dealt(tokens: tuple[int, ...], ranks: int) -> list[tuple[slice, ...]]:
    """Which tokens of each stream each rank has; none of a stream that has run out."""
    each = [shards(n, ranks) if n else [] for n in tokens]
    return list(zip_longest(*each, fillvalue=slice(0, 0)))


def _differing_under_autograd(compute: Compute, inputs: _Inputs, whole: tuple[torch.Tensor, ...]) -> str | None:
    with torch.enable_grad():
        outputs = compute(inputs.that_require_grad())
    return None if _equal(tuple(x.detach() for x in outputs), whole) else "the forward under autograd"


def _far_from_twin(twin: tuple[torch.Tensor, ...], whole: tuple[torch.Tensor, ...], tolerance: float) -> str | None:
    """Elements of small numbers may be off by `tolerance`, of large ones by so much of them."""
    for ours, meant in zip(whole, twin, strict=True):
        if ours.shape != meant.shape or ours.dtype != meant.dtype:
            return f"{tuple(ours.shape)} {ours.dtype} instead of {tuple(meant.shape)} {meant.dtype}"
        off = (ours.float() - meant.float()).abs() / (1 + meant.float().abs())
        if not bool((off <= tolerance).all()):  # a NaN isn't
            return f"{float(off.max()):.2g} off its twin"
    return None


def _differing_in_other_memory(
    kind: FusedClass, function: Callable[..., Any], inputs: _Inputs, whole: tuple[torch.Tensor, ...]
) -> str | None:
    """Ranks, and batches whose text comes first and is padded, attend on memory in the order [B, H, T, D]."""
    outputs = _compute(kind, lambda *qkv: function(*(x.contiguous() for x in qkv)), inputs)
    return None if _equal(outputs, whole) else "other bits than of [B, H, T, D]"


def _differing_beside_padding(
    kind: FusedClass, function: Callable[..., Any], inputs: _Inputs, choices: Choices
) -> str | None:
    """Samples of several text lengths, padded, against each by itself without padding."""
    (tokens,) = inputs.tokens
    text = tokens // 4 or tokens // 2
    if not text:
        return None
    lengths = (text, -(-text // 2), 1)
    for text_first in (False, True):
        plan = AttentionPlan(tuple(lengths[i % 3] for i in range(BATCH)), text, tokens - text, text_first)
        with exact_mode(plan, choices):
            (padded,) = _compute(kind, function, inputs)
        for row, length in enumerate(lengths):
            own = slice(row, row + 1)
            real = plan.joint.keep(torch.arange(tokens)[:, None], plan.joint.ends[row])[:, 0].tolist()
            alone = replace(inputs, streams=(tuple(x[own][:, real] for x in inputs.streams[0]),))
            if not _equal(_compute(kind, function, alone), (padded[own][:, real],)):
                return f"{length} of {text} text tokens {'before' if text_first else 'behind'} the others"
    return None
