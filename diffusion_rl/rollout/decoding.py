"""At start-up: how an engine decodes its pictures. With fused norms where these are right, and with captured launches
where those give the bits of plain calls; else as diffusers does."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from diffusion_rl.batch import Size
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.decoder import Decoding, fused_decoder, gains_by_capture, wrong_norm
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.rollout.certification import PACKAGE, probe_size
from diffusion_rl.rollout.runners import RUNS
from rl_kernels.certify import Exactness, Verdict
from rl_kernels.fused import triton_is_installed
from rl_kernels.replacing import Replacement
from rl_kernels.verdict_cache import Question, VerdictCache, digest, find_verdict, sources_digest, structure_digest

logger = logging.getLogger(__name__)

PICTURE_TOLERANCE = 8 / 255  # mean difference of two decoders' pictures in [0, 1]; rounding in bf16 leaves less
FUSED, STOCK, CAPTURED = "fused", "stock", "CUDA graph"


def choose_decoding(
    family: ModelFamily, exactness: Exactness, *, cuda_graphs: bool, cache: VerdictCache | None = None
) -> Exactness:
    """Sets how the family decodes, and adds what was found to the table. Off a GPU it decodes as diffusers does.

    Nothing of it is ever a reason against exact mode: pictures are decoded one by one on a GPU, whichever way.
    """
    family.decoding = Decoding()
    if family.device.type != "cuda" or family.pipeline.vae is None:
        return exactness
    forwards, size, verdicts = fused_decoder(family.pipeline.vae), probe_size(family), []
    with torch.no_grad(), family.exact():
        if forwards and triton_is_installed():
            verdicts.append(_fused(family, forwards, size, cache))
            if verdicts[-1].implementation == FUSED:
                family.decoding = Decoding(forwards)
        if cuda_graphs and family.frame_multiple is None and gains_by_capture(size):
            verdicts.append(_captured(family, size))
            if verdicts[-1].implementation == CAPTURED:
                family.decoding = replace(family.decoding, graphs=CudaGraphs())
    for verdict in verdicts:
        if verdict.failed_at is not None:
            logger.warning("%s: %s, because of %s", verdict.operation, verdict.implementation, verdict.failed_at)
    if exactness.certificate is None:
        return exactness
    certificate = exactness.certificate
    return replace(exactness, certificate=replace(certificate, verdicts=(*certificate.verdicts, *verdicts)))


def _latents(family: ModelFamily, size: Size) -> torch.Tensor:
    """One sample's latents, of normal numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, *family.latent_shape(*size), generator=generator).to(family.device)


def _fused(family: ModelFamily, forwards: tuple[Replacement, ...], size: Size, cache: VerdictCache | None) -> Verdict:
    """Whether each fused norm is right on what it gets in a real decode, and the whole picture is."""
    vae, latents = family.pipeline.vae, _latents(family, size)
    stock = family.decode(latents, *size)
    name, tried = f"decoder of {type(vae).__name__}", (FUSED, STOCK)

    def probe() -> Verdict:
        failed_at = wrong_norm(vae, lambda: family.decode(latents, *size)) or _far_from(stock)
        return Verdict(name, STOCK, tried, f"{FUSED}: {failed_at}") if failed_at else Verdict(name, FUSED, tried)

    def _far_from(meant: torch.Tensor) -> str | None:
        off = float((Decoding(forwards)(family.decode, latents, *size) - meant).abs().mean())
        return None if off <= PICTURE_TOLERANCE else f"the picture is {off:.2g} off"

    finite = bool(stock.isfinite().all())  # of other weights nothing is asked here
    details = digest([structure_digest(vae), sources_digest(PACKAGE), list(size), finite])
    return find_verdict(Question(name, tried, details), family.device, probe, cache=cache)


def _captured(family: ModelFamily, size: Size) -> Verdict:
    """Whether a picture has the bits of the plain decode when that is captured and replayed."""
    latents, graphs = _latents(family, size), CudaGraphs()
    expected = family.pictures(latents, *size)
    decoding = replace(family.decoding, graphs=graphs)
    name, tried = f"launches of the decoder of {type(family.pipeline.vae).__name__}", (CAPTURED, "eager")
    for _ in range(RUNS):
        if not torch.equal(decoding(family.decode, latents, *size), expected):
            return Verdict(name, "eager", tried, f"{CAPTURED}: other bits")
    if graphs.replayed == 0:
        return Verdict(name, "eager", tried, f"{CAPTURED}: the decode can't be captured")
    return Verdict(name, CAPTURED, tried)
