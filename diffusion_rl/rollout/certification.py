"""At start-up: does this model, on this device, give a sample the same bits in any batch? By name, what doesn't?"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from diffusion_rl.models import ModelFamily
from diffusion_rl.models.base import Conditioning, DenoiseBatch
from engine_control.errors import EngineError
from rl_kernels.certify import Certificate, Verdict, certify, record
from rl_kernels.mode import LIBRARY

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
        family.choices = LIBRARY
        return Exactness(False, None)
    if family.certificate is None or family.choices is LIBRARY:
        family.decodes_together = _decodes_together(family)
        family.certificate = certify_family(family)
    certificate = family.certificate
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
    family.choices = LIBRARY
    return Exactness(False, certificate)


def certify_family(family: ModelFamily) -> Certificate:
    """Probes each operation that a guided forward of the transformer runs, then the whole transformer."""
    batch = _batch(family)
    certificate = certify(record(lambda: family.predict(batch)), family.device)
    if not certificate.exact:
        return certificate
    before, family.choices = family.choices, certificate.choices
    try:
        verdict = _whole_transformer(family, batch)
    finally:
        family.choices = before
    return Certificate(certificate.device, (*certificate.verdicts, verdict), certificate.choices)


@torch.no_grad()
def _whole_transformer(family: ModelFamily, batch: DenoiseBatch) -> Verdict:
    whole = family.predict(batch)
    name = f"transformer {type(family.transformer).__name__}"
    for start, end in SLICES:
        part = DenoiseBatch(
            batch.latents[start:end],
            batch.timesteps[start:end],
            batch.conditioning[start:end],
            batch.height,
            batch.width,
        )
        if not torch.equal(family.predict(part), whole[start:end]):
            return Verdict(name, None, ("chosen operations",), f"samples {start} to {end - 1} of {SAMPLES}")
    return Verdict(name, "chosen operations", ("chosen operations",))


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
