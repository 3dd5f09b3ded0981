"""At start-up: does this model, on this device, give a sample the same bits in any batch? By name, what doesn't?"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from diffusion_rl.batch import Conditioning, DenoiseBatch
from diffusion_rl.models import ModelFamily
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.parallel.layout import Layout
from engine_control.errors import EngineError
from rl_kernels.certify import Certificate, Verdict, certify, record
from rl_kernels.fused import triton_is_installed
from rl_kernels.mode import LIBRARY, Choices

logger = logging.getLogger(__name__)

LARGEST_SIDE = 512  # pixels; larger pictures use the same kernels, on more rows
SAMPLES = 5
DECODE_TOGETHER = 8  # the most pictures that are ever decoded together
LARGEST_DECODED_SIDE = 128  # pixels; larger pictures gain nothing from company
SLICES = ((0, 1), (1, 3), (2, 5))  # of SAMPLES, for the whole transformer


class NotExactError(EngineError):
    """Deterministic inference was asked for, and an operation of this model can't be made exact on this device."""

    status = 500
    default_code = "not_exact"


@dataclass(frozen=True)
class Exactness:
    """What was found, and whether the engine runs in exact mode because of it. certificate None: nobody looked."""

    enabled: bool
    certificate: Certificate | None

    def describe(self) -> dict[str, object]:
        """For `/server_info` and `diffusion-rl doctor`."""
        certificate = self.certificate
        return {
            "enabled": self.enabled,
            "certified": None if certificate is None else certificate.exact,
            "refused": [] if certificate is None else list(certificate.refused),
            "table": [] if certificate is None else [vars(v) for v in certificate.verdicts],
        }


def make_exact(family: ModelFamily, wanted: str) -> Exactness:
    """Certifies the family's transformer on its device and sets how the family computes.

    wanted: `auto` is exact where certified, `on` insists, `off` leaves the libraries as they are. A family is probed
    once; engines made of it later reuse what was found.

    Raises:
        NotExactError: `on`, and some operation depends on the batch whatever is tried; the message names it.
    """
    if wanted == "off":
        family.choices = _library(family)
        return Exactness(False, None)
    if family.certificate is None or not family.choices.exact:
        family.decodes_together = _decodes_together(family)
        family.certificate = certify_family(family)
    return _decide(family, family.certificate, wanted)


def _decide(family: ModelFamily, certificate: Certificate, wanted: str) -> Exactness:
    """Sets how the family computes, by what the certificate says and what is wanted."""
    if certificate.exact:
        family.choices = certificate.choices
        return Exactness(True, certificate)
    refused = "; ".join(certificate.refused)
    if wanted == "on":
        raise NotExactError(
            f"not exact on {certificate.device}: {refused}",
            field="deterministic",
            value=wanted,
            hint="Use another dtype or device, or --disable-deterministic-inference.",
        )
    logger.warning("a sample's bits may depend on its batch on %s, because of: %s", certificate.device, refused)
    family.choices = _library(family)
    return Exactness(False, certificate)


def _library(family: ModelFamily) -> Choices:
    """The libraries as they are, around the fused kernels where those run."""
    return replace(LIBRARY, fused=True) if _can_fuse(family) else LIBRARY


def _can_fuse(family: ModelFamily) -> bool:
    return family.device.type == "cuda" and bool(family.block_forwards) and triton_is_installed()


def certify_ranks(
    family: ModelFamily, exactness: Exactness, arrangement: Arrangement, layout: Layout, wanted: str
) -> Exactness:
    """Has all ranks compute together what this one has computed alone, and adds what was found to the table.

    Every rank calls it at the same time, and each comes to the same end. Without exact mode nothing is probed.

    Raises:
        NotExactError: `on`, and a shared prediction has other bits.
    """
    if not exactness.enabled or exactness.certificate is None or layout.ranks == 1:
        return exactness
    family.choices = for_shards(family.choices, layout.sp_degree)
    certificate = exactness.certificate
    verdicts = (*certificate.verdicts, _shared_prediction(family, arrangement, layout))
    return _decide(family, Certificate(certificate.device, verdicts, family.choices), wanted)


def for_shards(choices: Choices, degree: int) -> Choices:
    """What was chosen for attention over all heads goes for each rank's share of them as well."""
    shares = {(heads // degree, width, dtype) for heads, width, dtype in choices.attention_per_sample}
    return replace(choices, attention_per_sample=choices.attention_per_sample | shares)


@torch.no_grad()
def _shared_prediction(family: ModelFamily, arrangement: Arrangement, layout: Layout) -> Verdict:
    """The whole prediction, guided and not, of several samples and of one, by all ranks and by this one alone."""
    name = f"transformer {type(family.transformer).__name__}, {layout.sp_degree} x {layout.cfg_degree} ranks"
    batch, tried = _batch(family), ("chosen operations",)
    unguided = replace(batch, conditioning=tuple(replace(c, negative=None) for c in batch.conditioning))
    for whole, what in ((batch, "guided"), (unguided, "unguided")):
        for start, end in ((0, SAMPLES), *SLICES[:1]):
            part = _part(whole, start, end)
            if not torch.equal(family.predict(part, arrangement=arrangement), family.predict(part)):
                return Verdict(name, None, tried, f"samples {start} to {end - 1} of {SAMPLES}, {what}")
    return Verdict(name, "chosen operations", tried)


def certify_family(family: ModelFamily) -> Certificate:
    """Probes each operation that a guided forward of the transformer runs, then the whole transformer."""
    batch = _batch(family)
    certificate = certify(record(lambda: family.predict(batch)), family.device)
    if not certificate.exact:
        return certificate
    before, family.choices = family.choices, certificate.choices
    try:
        verdicts = [*certificate.verdicts, _whole_transformer(family, batch)]
        if _can_fuse(family):
            verdicts.append(_fused_blocks(family, batch))
        return Certificate(certificate.device, tuple(verdicts), family.choices)
    finally:
        family.choices = before


def _fused_blocks(family: ModelFamily, batch: DenoiseBatch) -> Verdict:
    """Takes the fused forwards of the blocks if the whole transformer stays exact with them, under autograd too."""
    stock = family.choices
    family.choices = replace(stock, fused=True)
    found = _whole_transformer(family, batch)
    failed_at = found.failed_at
    if found.exact:
        with torch.no_grad():
            plain = family.predict(batch)
        with torch.enable_grad():
            if not torch.equal(family.predict(batch).detach(), plain):
                failed_at = "the forward under autograd"
    name, tried = f"blocks of {type(family.transformer).__name__}", ("fused", "stock")
    if failed_at is None:
        return Verdict(name, "fused", tried)
    family.choices = stock
    return Verdict(name, "stock", tried, f"fused: {failed_at}")


@torch.no_grad()
def _whole_transformer(family: ModelFamily, batch: DenoiseBatch) -> Verdict:
    whole = family.predict(batch)
    name = f"transformer {type(family.transformer).__name__}"
    for start, end in SLICES:
        if not torch.equal(family.predict(_part(batch, start, end)), whole[start:end]):
            return Verdict(name, None, ("chosen operations",), f"samples {start} to {end - 1} of {SAMPLES}")
    return Verdict(name, "chosen operations", ("chosen operations",))


def _part(batch: DenoiseBatch, start: int, end: int) -> DenoiseBatch:
    """Samples [start, end) of a batch."""
    return replace(
        batch,
        latents=batch.latents[start:end],
        timesteps=batch.timesteps[start:end],
        conditioning=batch.conditioning[start:end],
    )


@torch.no_grad()
def _decodes_together(family: ModelFamily) -> tuple[int, int] | None:
    """The `(height, width)` at which pictures have the same bits decoded together, in any number, and one by one.

    None: at no size that was tried, so they are decoded one by one. A GPU isn't tried: its libraries choose a
    convolution by the batch size.
    """
    side = _side(family)
    if family.device.type != "cpu" or side > LARGEST_DECODED_SIDE:
        return None
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(DECODE_TOGETHER, *family.latent_shape(side, side), generator=generator)
    with family.exact():
        alone = torch.cat([family.decode(x[None], side, side) for x in latents])
        for count in range(2, DECODE_TOGETHER + 1):
            first, last = slice(0, count), slice(DECODE_TOGETHER - count, None)
            for part in (first, last):
                if not torch.equal(family.decode(latents[part], side, side), alone[part]):
                    return None
    return side, side


def _side(family: ModelFamily) -> int:
    """Pixels of a probe's side: the default size, or `LARGEST_SIDE`."""
    multiple, defaults = family.size_multiple, family.defaults
    return min(defaults.height, defaults.width, max(LARGEST_SIDE // multiple * multiple, multiple))


@torch.no_grad()
def _batch(family: ModelFamily) -> DenoiseBatch:
    """Guided samples at different steps, with prompts of two lengths, of the default size or a smaller one."""
    defaults, side = family.defaults, _side(family)
    short, long = (family.encode_prompt(p, defaults.max_sequence_length) for p in ("a", "a b c"))
    conditioning = tuple(Conditioning((short, long)[i % 2], short, 2.0 + i) for i in range(SAMPLES))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(SAMPLES, *family.latent_shape(side, side), generator=generator)
    timesteps = torch.linspace(900, 100, SAMPLES)
    return DenoiseBatch(latents.to(family.device, family.dtype), timesteps.to(family.device), conditioning, side, side)
