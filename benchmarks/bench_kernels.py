"""How fast are the fused kernels, against the separate operations, a compiler, and the memory itself?

    python -m benchmarks.bench_kernels

At the row shapes of SD3.5-medium and Qwen-Image (512 pixels, bf16): each fused operation, the same as separate torch
operations (eager, as diffusers writes them), torch.compile of its plain-torch twin, and a copy that moves as many
bytes. All four are replayed from CUDA graphs of several calls, in turn, so no launch is on the clock; what a call costs
on the host is measured apart. Attention is timed on both memory orders of its inputs. The norms of VAE decoders, with
the SiLU behind them, are timed on the planes of one picture of 512 pixels. Needs an NVIDIA GPU and Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm

from benchmarks import measure
from rl_kernels import reference
from rl_kernels.channel_norm import channel_norm
from rl_kernels.fused import triton_is_installed
from rl_kernels.gated_residual import gated_residual, gated_residual_norm
from rl_kernels.group_norm import group_norm
from rl_kernels.joint_qkv import Stream, joint_qkv
from rl_kernels.modulated_norm import modulated_norm, modulated_norm_pair
from rl_kernels.settings import exact_library_settings

LIMIT = (
    "A fused operation reads each input and writes each output once: its limit is a copy of as many bytes, timed "
    "beside it (fraction_of_copy). What fits the cache is read from there, by the copy too. A group norm reads its "
    "input twice, and is compared with a copy of three halves of its bytes."
)
ELEMENT = 2  # bytes of bf16
COPY_CEILING_BYTES = 4 * 2**30
SECONDS_A_GRAPH = 2e-3
ROUGH_BANDWIDTH = 3e12  # bytes per second; it only decides how many calls a graph holds
CALLS_ON_HOST = 50

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The row shapes of a model, the tokens of a picture and a prompt, and the batches that are timed."""

    name: str
    width: int
    head_dim: int
    image_tokens: int
    text_tokens: int
    rows: tuple[int, ...]
    rope: bool


SHAPES = (
    Shape("sd3.5-medium", 1536, 64, 1024, 333, (2, 16, 48), rope=False),
    Shape("qwen-image", 3072, 128, 1024, 64, (2, 16), rope=True),
)

DECODERS = "decoders"
# Channels and sides of planes in the decoders of SD3.5 and of Qwen-Image, by the operation that norms them.
PLANES = {
    "group_norm": ((512, 64), (512, 128), (512, 256), (256, 256), (256, 512), (128, 512)),
    "channel_norm": ((384, 64), (384, 128), (192, 256), (96, 512)),
}
GROUPS = 32
ORDERS = {"channels in front": torch.contiguous_format, "channels innermost": torch.channels_last}


@dataclass(frozen=True)
class Arms:
    """One operation three ways, and the bytes that it can't avoid to move."""

    fused: Call
    eager: Call
    twin: Callable[..., Any]
    twin_inputs: tuple[Any, ...]
    moved: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = measure.command_line("kernels", __doc__ or "", repeats=20)
    parser.add_argument("--shapes", default=",".join([*(s.name for s in SHAPES), DECODERS]), help="what is timed")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() or not triton_is_installed():
        raise SystemExit("bench_kernels times Triton kernels: it needs an NVIDIA GPU and an installed Triton")
    report = measure.Report("kernels", (__doc__ or "").splitlines()[0], measure.settings_of(arguments), limit=LIMIT)
    report.results.append({"case": "copy ceiling", "gb_s": copy_ceiling(arguments.repeats)})
    print(report.results[-1], flush=True)
    with torch.no_grad():
        for shape in (s for s in SHAPES if s.name in arguments.shapes.split(",")):
            for rows in shape.rows:
                for name, arms in operations(shape, rows).items():
                    row = timed(arms, arguments.repeats, compiled=not arguments.no_compile)
                    add(report, {"case": f"{name}, {shape.name}", "rows": rows, **row})
                add(report, {"case": f"attention, {shape.name}", "rows": rows, **attention(shape, rows, arguments)})
                torch.cuda.empty_cache()
                report.write(arguments.out)
        for name, arms in decoder_norms() if DECODERS in arguments.shapes.split(",") else ():
            row = timed(arms, arguments.repeats, compiled=not arguments.no_compile)
            add(report, {"case": name, "rows": 1, **row})
            report.write(arguments.out)
    return 0


def add(report: measure.Report, row: dict[str, Any]) -> None:
    report.results.append(row)
    for name in ("eager_over_fused", "compiled_over_fused", "fraction_of_copy"):
        if name in row:
            report.ratios[f"{row['case']}, {row['rows']} rows: {name}"] = row[name]
    print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def copy_ceiling(repeats: int) -> float:
    """GB/s, read and written, of a large copy."""
    source = torch.empty(COPY_CEILING_BYTES // 4, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    series = measure.alternate({"copy": lambda: target.copy_(source)}, repeats, warmups=3)["copy"]
    return COPY_CEILING_BYTES / series.median / 1e9


def operations(shape: Shape, rows: int) -> dict[str, Arms]:
    """Every fused operation on the image stream of that many rows; the joint one on both streams."""
    width, tokens = shape.width, shape.image_tokens
    x, y = (random(rows, tokens, width) for _ in range(2))
    a, b, c, d, e, _ = random(rows, 6 * width).chunk(6, dim=1)
    stream = rows * tokens * width * ELEMENT
    vector = rows * width * ELEMENT
    return {
        "modulated_norm": Arms(
            partial(modulated_norm, x, a, b),
            partial(eager_norm, x, a, b),
            reference.modulated_norm,
            (x, a, b),
            2 * stream + 2 * vector,
        ),
        "modulated_norm_pair": Arms(
            partial(modulated_norm_pair, x, (a, b), (c, d)),
            partial(eager_norm_pair, x, (a, b), (c, d)),
            twin_norm_pair,
            (x, a, b, c, d),
            3 * stream + 4 * vector,
        ),
        "gated_residual": Arms(
            partial(gated_residual, x, y, e),
            partial(eager_residual, x, y, e),
            reference.gated_residual,
            (x, y, e),
            3 * stream + vector,
        ),
        "gated_residual_norm": Arms(
            partial(gated_residual_norm, x, y, e, scale=a, shift=b),
            partial(eager_residual_norm, x, y, e, (a, b)),
            twin_residual_norm,
            (x, y, e, a, b),
            4 * stream + 3 * vector,
        ),
        "joint_qkv": joint_arms(shape, rows),
    }


def decoder_norms() -> Iterator[tuple[str, Arms]]:
    """Each norm of a plane `[1, C, side, side]` and its SiLU, in both memory orders."""
    for operation, planes in PLANES.items():
        for (channels, side), (order, memory_format) in product(planes, ORDERS.items()):
            x = random(1, channels, side, side).contiguous(memory_format=memory_format)
            weight, bias = random(channels), random(channels)
            yield f"{operation} {channels} x {side}^2, {order}", norm_arms(operation, x, weight, bias)


def norm_arms(operation: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Arms:
    plane = x.numel() * ELEMENT
    if operation == "channel_norm":
        twin = partial(reference.channel_norm, silu=True)
        fused, eager = partial(channel_norm, x, weight, silu=True), partial(eager_channel_norm, x, weight)
        return Arms(fused, eager, twin, (x, weight), 2 * plane)
    twin_of_groups = partial(reference.group_norm, groups=GROUPS, silu=True)
    fused = partial(group_norm, x, GROUPS, weight, bias, silu=True)
    eager = partial(eager_group_norm, x, weight, bias)
    return Arms(fused, eager, lambda x, w, b: twin_of_groups(x, weight=w, bias=b), (x, weight, bias), 3 * plane)


def eager_group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, GROUPS, weight, bias))


def eager_channel_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normed = F.normalize(x.float(), dim=1).to(x.dtype)
    return F.silu(normed * x.shape[1] ** 0.5 * weight[:, None, None] + 0.0)


def joint_arms(shape: Shape, rows: int) -> Arms:
    first, second = (a_stream(shape, rows, tokens) for tokens in (shape.image_tokens, shape.text_tokens))
    moved = 6 * rows * (shape.image_tokens + shape.text_tokens) * shape.width * ELEMENT
    norm = RMSNorm(shape.head_dim, eps=1e-6).cuda().bfloat16()
    return Arms(
        partial(joint_qkv, first, second, head_dim=shape.head_dim),
        partial(eager_joint, first, second, norm, shape.head_dim),
        partial(twin_joint, head_dim=shape.head_dim),
        (*first, *second),
        moved,
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def a_stream(shape: Shape, rows: int, tokens: int) -> Stream:
    projections = [random(rows, tokens, shape.width) for _ in range(3)]
    angles = torch.randn(tokens, shape.head_dim // 2, device="cuda")
    rope = torch.polar(torch.ones_like(angles), angles) if shape.rope else None
    weights = [torch.ones(shape.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return Stream(*projections, *weights, rope)


def eager_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def eager_norm_pair(x: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    normed = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    return [normed * (1 + scale[:, None]) + shift[:, None] for scale, shift in pairs]


def eager_residual(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x + gate.unsqueeze(1) * y


def eager_residual_norm(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    total = eager_residual(x, y, gate)
    return total, eager_norm(total, *pair)


def eager_joint(first: Stream, second: Stream, norm: RMSNorm, head_dim: int) -> list[torch.Tensor]:
    """Each projection cut into heads, normed, rotated; then both streams put together."""

    def heads(x: torch.Tensor, rope: torch.Tensor | None, *, normed: bool) -> torch.Tensor:
        x = x.unflatten(-1, (-1, head_dim))
        x = norm(x) if normed else x
        if rope is None:
            return x
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rope.unsqueeze(1)).flatten(3).type_as(x)

    streams = (first, second)
    query = torch.cat([heads(s.query, s.rope, normed=True) for s in streams], dim=1)
    key = torch.cat([heads(s.key, s.rope, normed=True) for s in streams], dim=1)
    value = torch.cat([heads(s.value, None, normed=False) for s in streams], dim=1)
    return [z.transpose(1, 2) for z in (query, key, value)]


def twin_norm_pair(x: torch.Tensor, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.modulated_norm(x, *vectors[:2]), reference.modulated_norm(x, *vectors[2:])


def twin_residual_norm(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, *norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.gated_residual_norm(x, y, gate, scale=norm[0], shift=norm[1])


def twin_joint(*tensors: torch.Tensor | None, head_dim: int) -> tuple[torch.Tensor, ...]:
    first, second = Stream(*tensors[:6]), Stream(*tensors[6:])  # type: ignore[arg-type]
    return reference.joint_qkv(first, second, head_dim=head_dim)


def timed(arms: Arms, repeats: int, *, compiled: bool) -> dict[str, Any]:
    """Device microseconds of each arm, bandwidth of the fused one, and what a call costs outside a graph."""
    calls = {"fused": arms.fused, "eager": arms.eager}
    if compiled:
        torch._dynamo.reset()
        calls["compiled"] = partial(torch.compile(arms.twin, dynamic=False), *arms.twin_inputs)
    source = torch.empty(arms.moved // (2 * ELEMENT), dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    calls["copy"] = lambda: target.copy_(source)
    inner = max(1, min(50, int(SECONDS_A_GRAPH * ROUGH_BANDWIDTH / arms.moved)))
    series = measure.alternate({name: graph_of(call, inner) for name, call in calls.items()}, repeats, warmups=3)
    row: dict[str, Any] = {f"{name}_us": one.median / inner * 1e6 for name, one in series.items()}
    for name, one in series.items():
        if name not in ("fused", "copy"):
            row[f"{name}_over_fused"] = measure.ratio(one, series["fused"])
    row["megabytes"] = arms.moved / 1e6
    row["gb_s"] = arms.moved * inner / series["fused"].median / 1e9
    row["fraction_of_copy"] = measure.ratio(series["copy"], series["fused"])
    hosted = measure.alternate({n: partial(often, calls[n]) for n in ("fused", "eager")}, 5, warmups=1)
    row["ungraphed_us"] = {name: one.median / CALLS_ON_HOST * 1e6 for name, one in hosted.items()}
    row["max_abs_difference_from_twin"] = largest_difference(arms.fused(), arms.twin(*arms.twin_inputs))
    return row


def graph_of(call: Call, inner: int) -> Call:
    """Replays `inner` calls, one after the other."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return graph.replay


def often(call: Call) -> None:
    for _ in range(CALLS_ON_HOST):
        call()


def largest_difference(ours: Any, twin: Any) -> float:
    pairs = [(ours, twin)] if isinstance(ours, torch.Tensor) else zip(ours, twin, strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def attention(shape: Shape, rows: int, arguments: Any) -> dict[str, Any]:
    """Attention as exact mode pins it, on `[B, T, H, D]` memory (what `joint_qkv` leaves) and on `[B, H, T, D]`."""
    heads, tokens = shape.width // shape.head_dim, shape.image_tokens + shape.text_tokens
    by_token = [random(rows, tokens, heads, shape.head_dim).transpose(1, 2) for _ in range(3)]
    by_head = [x.contiguous() for x in by_token]

    def merged(inputs: list[torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs).transpose(1, 2).flatten(2)

    with exact_library_settings():
        out = F.scaled_dot_product_attention(*by_token)
        series = measure.alternate(
            {"by_token": partial(merged, by_token), "by_head": partial(merged, by_head)}, arguments.repeats, warmups=3
        )
        equal = torch.equal(merged(by_token), merged(by_head))
        half = slice(0, max(rows // 2, 1))
        alone = merged([x[half] for x in by_token])
        invariant = torch.equal(alone, merged(by_token)[half])
    return {
        "memory_by_token_us": series["by_token"].median * 1e6,
        "memory_by_head_us": series["by_head"].median * 1e6,
        "merges_without_a_copy": out.transpose(1, 2).is_contiguous(),
        "same_bits_on_both_orders": equal,
        "half_the_batch_has_the_same_bits": invariant,
    }


if __name__ == "__main__":
    sys.exit(main())
