"""At start-up: does this model, on this device, give a sample the same bits in any batch? By name, what doesn't?"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import torch

from diffusion_rl.batch import Conditioning, DenoiseBatch, Size, size_of
from diffusion_rl.config import EngineConfig, kernel_settings
from diffusion_rl.models import ModelFamily
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.parallel.layout import Layout
from engine_control.errors import NotExactError
from rl_kernels.certify import Certificate, Exactness, Verdict, certify, record
from rl_kernels.certify_fused import STOCK, certify_fused, record_fused
from rl_kernels.fused import triton_is_installed
from rl_kernels.mode import LIBRARY, Choices
from rl_kernels.verdict_cache import Question, VerdictCache, digest, find_verdict, sources_digest, structure_digest

logger = logging.getLogger(__name__)

LARGEST_SIDE = 512  # pixels; larger pictures use the same kernels, on more rows
LARGEST_VIDEO_SIDE = 320  # pixels; then there are more tokens of video than of text
SAMPLES = 5
DECODE_TOGETHER = 8  # the most pictures that are ever decoded together
LARGEST_DECODED_SIDE = 128  # pixels; larger pictures gain nothing from company
SLICES = ((0, 1), (1, 3), (2, 5))  # of SAMPLES, for the whole transformer
CHOSEN = ("chosen operations",)  # what the whole transformer is tried with
PACKAGE = Path(__file__).parents[1]


def cache_of(config: EngineConfig) -> VerdictCache | None:
    """Where an engine of that configuration keeps its verdicts; None: nowhere."""
    return None if config.verdict_cache is None else VerdictCache(config.verdict_cache, conditions=kernel_settings())


def make_exact(family: ModelFamily, wanted: str, *, cache: VerdictCache | None = None) -> Exactness:
    """Certifies the family's transformer on its device and sets how the family computes.

    wanted: `auto` is exact where certified, `on` insists, `off` leaves the libraries as they are. A family is probed
    once; engines made of it later reuse what was found. What is in `cache` isn't probed, and what is probed goes there.

    Raises:
        NotExactError: `on`, and some operation depends on the batch whatever is tried; the message names it.
    """
    if wanted == "off":
        family.choices = _library(family)
        return Exactness(False, None)
    if family.certificate is not None and family.choices.exact:
        return _decide(family, family.certificate, wanted)
    family.certificate = certify_family(family, cache=cache)
    exactness = _decide(family, family.certificate, wanted)
    family.decodes_together = _decodes_together(family, cache)  # by what was chosen
    return exactness


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
    """The libraries as they are, around the fused kernels where those run, unless they were probed and refused."""
    refused = family.certificate is not None and not family.certificate.choices.fused
    return replace(LIBRARY, fused=True) if _can_fuse(family) and not refused else LIBRARY


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
    certificate, found = exactness.certificate, []
    if layout.tp_size > 1:
        found.append(_shared_weights(family, layout))
    if layout.ranks > layout.tp_size:
        found.append(_shared_prediction(family, arrangement, layout))
    verdicts = (*certificate.verdicts, *found)
    return _decide(family, Certificate(certificate.device, verdicts, family.choices), wanted)


def for_shards(choices: Choices, degree: int) -> Choices:
    """What was chosen for attention over all heads goes for each rank's share of them as well."""
    shares = {(heads // degree, width, dtype) for heads, width, dtype in choices.attention_per_sample}
    return replace(choices, attention_per_sample=choices.attention_per_sample | shares)


def _shared_weights(family: ModelFamily, layout: Layout) -> Verdict:
    """Ranks that share weights predict several samples together, and some of them. Probed at every start, too."""
    name = f"transformer {type(family.transformer).__name__}, weights over {layout.tp_size} ranks"
    failed_at = _first(_differing_part(family, batch) for batch in probe_batches(family))
    return Verdict(name, None if failed_at else CHOSEN[0], CHOSEN, failed_at)


@torch.no_grad()
def _shared_prediction(family: ModelFamily, arrangement: Arrangement, layout: Layout) -> Verdict:
    """The whole prediction, guided and not, of several samples and of one, by all ranks and by this one alone.

    Probed at every start: a rank that read the answer would not come to the collectives in which the others wait.
    """
    name = f"transformer {type(family.transformer).__name__}, {layout.sp_degree} x {layout.cfg_degree} ranks"
    for batch in probe_batches(family):
        unguided = replace(batch, conditioning=tuple(replace(c, negative=None) for c in batch.conditioning))
        for whole, what in ((batch, "guided"), (unguided, "unguided")):
            for start, end in ((0, SAMPLES), *SLICES[:1]):
                part = part_of(whole, start, end)
                if not torch.equal(family.predict(part, arrangement=arrangement), family.predict(part)):
                    return Verdict(name, None, CHOSEN, f"samples {start} to {end - 1} of {SAMPLES}, {what}")
    return Verdict(name, *CHOSEN, CHOSEN)


def certify_family(family: ModelFamily, *, cache: VerdictCache | None = None) -> Certificate:
    """Probes each operation that guided forwards of the transformers run, then each whole transformer."""
    batches, outputs = probe_batches(family), list[torch.Tensor]()
    recorded = record(lambda: outputs.extend(family.predict(batch) for batch in batches))
    certificate = certify(recorded, family.device, cache=cache)
    if not certificate.exact:
        return certificate
    before, family.choices = family.choices, certificate.choices
    try:
        details = [
            _details(family, batch, finite=bool(output.isfinite().all()))
            for batch, output in zip(batches, outputs, strict=True)
        ]
        whole = [_whole_transformer(family, b, d, cache) for b, d in zip(batches, details, strict=True)]
        verdicts = [*certificate.verdicts, *whole]
        if _can_fuse(family) and all(verdict.exact for verdict in whole):
            verdicts += _fused_blocks(family, batches, digest(details), cache)
        return Certificate(certificate.device, tuple(verdicts), family.choices)
    finally:
        family.choices = before


def _details(family: ModelFamily, batch: DenoiseBatch, *, finite: bool) -> str:
    """Stands for all that a verdict on the whole transformer depends on, beside the device and the libraries.

    Weights only count where they make the output non-finite: then nothing is equal to anything.
    """
    texts = [
        [len(c.positive.prompt_embeds), None if c.negative is None else len(c.negative.prompt_embeds)]
        for c in batch.conditioning
    ]
    structure, ours = structure_digest(family.transformers[batch.transformer]), sources_digest(PACKAGE)
    size = 1 if family.tensor is None else family.tensor.size
    return digest([structure, size, ours, list(batch.latents.shape), texts, _listed(family.choices), finite])


def _listed(choices: Choices) -> list[object]:
    """All of the choices as JSON has them, in one order."""
    values = [getattr(choices, f.name) for f in fields(choices)]
    values = [list(v.items()) if isinstance(v, Mapping) else v for v in values]
    return [sorted(map(str, v)) if isinstance(v, list | frozenset) else v for v in values]


def _whole_transformer(family: ModelFamily, batch: DenoiseBatch, details: str, cache: VerdictCache | None) -> Verdict:
    name = f"{batch.transformer} {type(family.transformer).__name__}"

    def probe() -> Verdict:
        failed_at = _differing_part(family, batch)
        return Verdict(name, None if failed_at else CHOSEN[0], CHOSEN, failed_at)

    with family.exact():
        return find_verdict(Question(name, CHOSEN, details), family.device, probe, cache=cache)


def _fused_blocks(
    family: ModelFamily, batches: list[DenoiseBatch], details: str, cache: VerdictCache | None
) -> list[Verdict]:
    """Takes the blocks' fused forwards if each fused operation passes, and then the whole, under autograd too.

    One that doesn't leaves the stock blocks, which stay certified. A verdict for each operation, then for the blocks.
    """
    name, tried, stock = f"blocks of {type(family.transformer).__name__}", ("fused", "stock"), family.choices

    def probe() -> Verdict:
        failed_at = _first(_differing_part(family, b) or _differing_under_autograd(family, b) for b in batches)
        return Verdict(name, "stock", tried, f"fused: {failed_at}") if failed_at else Verdict(name, "fused", tried)

    family.choices = replace(stock, fused=True)
    recorded = record_fused(lambda: [family.predict(batch) for batch in batches])
    verdicts = list(certify_fused(recorded, family.device, choices=stock, cache=cache))
    refused = "; ".join(v.operation for v in verdicts if v.implementation == STOCK)
    if refused:
        verdicts.append(Verdict(name, "stock", tried, f"fused: {refused}"))
    else:
        with family.exact():
            verdicts.append(find_verdict(Question(name, tried, details), family.device, probe, cache=cache))
    if verdicts[-1].implementation != "fused":
        family.choices = stock
    return verdicts


@torch.no_grad()
def _differing_part(family: ModelFamily, batch: DenoiseBatch) -> str | None:
    """The first samples whose prediction depends on those beside them; None: it is that of the whole batch."""
    whole = family.predict(batch)
    for start, end in SLICES:
        if not torch.equal(family.predict(part_of(batch, start, end)), whole[start:end]):
            return f"samples {start} to {end - 1} of {SAMPLES}"
    return None


def _first(failures: Iterable[str | None]) -> str | None:
    """The first that is one, and nothing behind it is looked at."""
    return next((failure for failure in failures if failure is not None), None)


def _differing_under_autograd(family: ModelFamily, batch: DenoiseBatch) -> str | None:
    with torch.no_grad():
        plain = family.predict(batch)
    with torch.enable_grad():
        same = torch.equal(family.predict(batch).detach(), plain)
    return None if same else "the forward under autograd"


def part_of(batch: DenoiseBatch, start: int, end: int) -> DenoiseBatch:
    """Samples [start, end) of a batch."""
    return replace(
        batch,
        latents=batch.latents[start:end],
        timesteps=batch.timesteps[start:end],
        conditioning=batch.conditioning[start:end],
    )


def _decodes_together(family: ModelFamily, cache: VerdictCache | None) -> Size | None:
    """The size at which pictures have the same bits decoded together, in any number, and one by one.

    None: at no size that was tried, so they are decoded one by one. A GPU isn't tried: its libraries choose a
    convolution by the batch size.
    """
    size = probe_size(family)
    if family.device.type != "cpu" or math.prod(size) > LARGEST_DECODED_SIDE**2:
        return None
    name, tried = f"decode {'x'.join(map(str, size))}", ("together",)

    def probe() -> Verdict:
        failed_at = _differing_pictures(family, size)
        return Verdict(name, None if failed_at else tried[0], tried, failed_at)

    vae = structure_digest(family.pipeline.vae)
    details = digest([vae, sources_digest(PACKAGE), _listed(family.choices)])
    with family.exact():
        verdict = find_verdict(Question(name, tried, details), family.device, probe, cache=cache)
    return size if verdict.exact else None


@torch.no_grad()
def _differing_pictures(family: ModelFamily, size: Size) -> str | None:
    """How many pictures, decoded together, have other bits than one by one; None: no number."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(DECODE_TOGETHER, *family.latent_shape(*size), generator=generator)
    alone = torch.cat([family.pictures(x[None], *size) for x in latents])
    for count in range(2, DECODE_TOGETHER + 1):
        first, last = slice(0, count), slice(DECODE_TOGETHER - count, None)
        for part in (first, last):
            if not torch.equal(family.pictures(latents[part], *size), alone[part]):
                return f"{count} pictures"
    return None


def probe_size(family: ModelFamily) -> Size:
    """Of a probe's samples: square, of the default size, or of `LARGEST_SIDE`; a video is smaller, and short."""
    multiple, frames, defaults = family.size_multiple, family.frame_multiple, family.defaults
    largest = LARGEST_SIDE if frames is None else LARGEST_VIDEO_SIDE
    side = min(defaults.height, defaults.width, max(largest // multiple * multiple, multiple))
    return size_of(side, side, None if frames is None else 1 + frames)


def probe_batches(family: ModelFamily) -> list[DenoiseBatch]:
    """A `probe_batch` for each transformer."""
    batch = probe_batch(family)
    return [replace(batch, transformer=name) for name in family.transformers]


@torch.no_grad()
def probe_batch(family: ModelFamily) -> DenoiseBatch:
    """Guided samples at different steps, with prompts of two lengths, of the default size or a smaller one."""
    defaults, size = family.defaults, probe_size(family)
    short, long = (family.encode_prompt(p, defaults.max_sequence_length) for p in family.probe_prompts)
    told = defaults.embedded_guidance
    conditioning = tuple(
        Conditioning(
            positive=(short, long)[i % 2],
            negative=short,
            guidance_scale=2.0 + i,
            embedded_guidance=None if told is None else told + i,
            image=family.probe_image(size),
        )
        for i in range(SAMPLES)
    )
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(SAMPLES, *family.latent_shape(*size), generator=generator)
    timesteps = torch.linspace(900, 100, SAMPLES)
    return DenoiseBatch(latents.to(family.device, family.dtype), timesteps.to(family.device), conditioning, *size)
