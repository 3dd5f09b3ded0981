"""Where does the time of decoding one picture go, and what do fused norms, memory order and captured launches gain?

    python -m benchmarks.profile_decode
    python -m benchmarks.profile_decode --family qwen-image

One picture at a time by the VAE of the family's shape (random weights, bf16), five ways, in turn: by diffusers' own
forwards, with fused norms, with channels innermost on top of that (SD3.5's VAE; Qwen-Image's computes so anyway), and
the first and the third of these as a CUDA graph. Kernel time by class, and the gaps between kernels. Needs an NVIDIA
GPU and Triton.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import full_size, measure
from benchmarks.profile_step import account_of
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.decoder import Decoding, fused_decoder, norms_of
from diffusion_rl.models.graphs import CudaGraphs
from rl_kernels.fused import triton_is_installed

# With one block of the transformer: only the VAE computes.
FAMILIES: Mapping[str, Callable[[str], ModelFamily]] = {
    "sd3.5-medium": partial(full_size.sd35_medium, layers=1),
    "qwen-image": partial(full_size.qwen_image, layers=1),
}
CAPTURES = 3  # calls until a graph is replayed: plain, captured, replayed
LIMIT = (
    "A decoder's convolutions are its matrix products. What is left beside their class is traffic of elementwise "
    "operations and changes of memory order, or gaps (1 - busy)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the profile."""
    arguments = options().parse_args(argv)
    if not torch.cuda.is_available() or not triton_is_installed():
        raise SystemExit("profile_decode profiles GPU kernels: it needs an NVIDIA GPU and an installed Triton")
    report = measure.Report(
        "profile_decode", (__doc__ or "").splitlines()[0], measure.settings_of(arguments), limit=LIMIT
    )
    family = FAMILIES[arguments.family]("cuda")
    size = (arguments.size, arguments.size)
    latents = torch.randn(1, *family.latent_shape(*size), device="cuda")
    ways = decodings(family)
    arms = {name: partial(way, family.decode, latents, *size) for name, way in ways.items()}
    with torch.no_grad(), family.exact():
        series = measure.alternate(arms, arguments.repeats, warmups=CAPTURES)
        stock = arms["stock"]()
        for name, arm in arms.items():
            row = {**row_of(name, arm, stock), "ms": series[name].median * 1e3}
            report.results.append(row)
            print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)
            report.ratios[f"stock_over: {name}"] = measure.ratio(series["stock"], series[name])
    report.results.append({"name": "norms", "count": len(norms_of(family.pipeline.vae.decoder))})
    report.write(arguments.out)
    return 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_decode",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=measure.RESULTS / "profile_decode.json", help="where the result goes"
    )
    parser.add_argument("--family", choices=list(FAMILIES), default="sd3.5-medium", help="whose VAE")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds, each of all ways in turn")
    parser.add_argument("--size", type=int, default=512, help="pixels a side; graphs are for at most 512")
    parser.add_argument("--commit", help="what is measured, where the checkout can't say it itself")
    return parser


def decodings(family: ModelFamily) -> dict[str, Decoding]:
    """The ways to decode, by name."""
    vae = family.pipeline.vae
    fused = fused_decoder(vae)
    return {
        "stock": Decoding(),
        "fused norms": Decoding(fused_decoder(vae, channels_last=False)),
        "fused norms, channels innermost": Decoding(fused),
        "stock, captured": Decoding(graphs=CudaGraphs()),
        "fused norms, channels innermost, captured": Decoding(fused, CudaGraphs()),
    }


def row_of(name: str, arm: Callable[[], torch.Tensor], stock: torch.Tensor) -> dict[str, Any]:
    """Where one way's time and memory go, and how far its picture is from diffusers' own."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    off = (arm() - stock).abs()
    peak = torch.cuda.max_memory_allocated() - before
    same = torch.equal(arm(), arm())
    return {
        "name": name,
        "mean_difference_from_stock": float(off.mean()),
        "largest_difference_from_stock": float(off.max()),
        "same_bits_again": same,
        "peak_mb": peak / 1e6,
        **account_of(arm),
    }


if __name__ == "__main__":
    sys.exit(main())
