"""At start-up: compiles the transformer, certifies that its graphs are exact, and says whether replay can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from diffusion_rl.batch import DenoiseBatch
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.compiled import CompiledForward
from diffusion_rl.models.runner import eager
from diffusion_rl.parallel.layout import Layout
from diffusion_rl.rollout.certification import probe_batches
from engine_control.errors import InvalidRequestError, NotExactError
from rl_kernels.certify import Exactness, Verdict

logger = logging.getLogger(__name__)

HINT = "Start without --enable-torch-compile, or with another --torch-compile-rows."


def compiled_rows(rows: int | None, max_batch_size: int) -> int:
    """The rows of every compiled forward: those asked for, or what a full guided batch brings, and at most 8.

    From 8 rows on a GPU is busy with one piece; more would only make small batches compute more copies.

    Raises:
        InvalidRequestError: fewer than one.
    """
    if rows is None:
        return min(2 * max_batch_size, 8)
    if rows < 1:
        raise InvalidRequestError("must be at least 1", field="torch_compile_rows", value=rows, hint="8 is usual.")
    return rows


def refuse_compiled_ranks(layout: Layout) -> None:
    """Refuses compilation on several ranks, whose exchanges are no part of a graph."""
    if layout.ranks > 1:
        name, value = layout.field
        raise InvalidRequestError(
            f"a compiled transformer can't be shared by {layout.ranks} ranks",
            field=name,
            value=value,
            hint="Leave out --enable-torch-compile, or --tp-size, --sp-degree and --enable-cfg-parallel.",
        )


def compile_family(
    family: ModelFamily,
    exactness: Exactness,
    *,
    rows: int,
    wanted: str,
    backend: str | Callable[..., Any] = "inductor",
) -> Exactness:
    """Has compiled graphs run the family's forwards without gradients, and adds what was found to the table.

    Without exact mode graphs are taken untried: nothing was promised. The probe is made at every start, since its graph
    must be compiled anyway. wanted: as for `make_exact`; where graphs aren't exact, `auto` leaves the eager forward.

    Raises:
        InvalidRequestError: the family's transformers have no shape to compile for.
        NotExactError: `on`, and the transformer can't be compiled so that bits don't depend on the batch.
    """
    if not family.compiles:
        raise InvalidRequestError(
            f"a {type(family.transformer).__name__} isn't compiled: it takes each prompt at its own length, so a graph "
            "would be one of a mixture of prompts",
            field="enable_torch_compile",
            value=True,
            hint="Leave out --enable-torch-compile.",
        )
    before, family.runner = family.choices, eager
    family.choices = replace(before, fused=False)  # a graph fuses the stock blocks in its own way
    batches = probe_batches(family)
    texts = {len(c.positive.prompt_embeds) for c in batches[0].conditioning}
    found = exactness.enabled and exactness.certificate is not None
    runner = CompiledForward(rows, family.choices, differing_texts=len(texts) > 1, tries=found, backend=backend)
    family.runner = runner
    if not found or exactness.certificate is None:
        return exactness
    failed = next((found for batch in batches if (found := _dependent(family, batch)) is not None), None)  # compiles
    failed = runner.refused[0] if runner.refused else failed
    name = type(family.transformer).__name__
    if failed is None:
        verdicts = [Verdict(f"compiled {name}, {rows} rows", "torch.compile", ("torch.compile", "eager"))]
        verdicts.append(_replay_verdict(name, runner))
    else:
        family.choices, family.runner = before, eager
        verdicts = [_refused(name, rows, failed, wanted)]
    certificate = replace(exactness.certificate, verdicts=(*exactness.certificate.verdicts, *verdicts))
    return replace(exactness, certificate=certificate)


@torch.no_grad()
def _dependent(family: ModelFamily, batch: DenoiseBatch) -> str | None:
    """The samples whose prediction depends on those beside them or on their place; None: there are none."""
    whole, count = family.predict(batch), len(batch.latents)
    backwards = list(reversed(range(count)))
    for samples in (backwards, [0], [1, 2], [count - 1, 0, 0], backwards[:-1]):
        if not torch.equal(family.predict(picked(batch, samples)), whole[samples]):
            return f"samples {samples} in one batch"
    return None


def picked(batch: DenoiseBatch, samples: Sequence[int]) -> DenoiseBatch:
    """Those samples of a batch, in that order."""
    return replace(
        batch,
        latents=batch.latents[list(samples)],
        timesteps=batch.timesteps[list(samples)],
        conditioning=tuple(batch.conditioning[i] for i in samples),
    )


def _replay_verdict(name: str, runner: CompiledForward) -> Verdict:
    operation, tried = f"replay of compiled {name}", ("exact", "other bits")
    if not runner.other_bits:
        return Verdict(operation, "exact", tried)
    logger.warning(
        "with --enable-torch-compile the rollout has other bits than a forward with gradients: a sample's bits still "
        "don't depend on its batch, but a trainer's ratios won't be exactly 1 at equal weights"
    )
    return Verdict(operation, "other bits", tried, f"exact: {runner.other_bits} elements differ from the eager forward")


def _refused(name: str, rows: int, failed: str, wanted: str) -> Verdict:
    if wanted == "on":
        raise NotExactError(
            f"compiled {name} is not exact: {failed}", field="enable_torch_compile", value=True, hint=HINT
        )
    logger.warning("--enable-torch-compile is left out, because compiled %s is not exact: %s", name, failed)
    return Verdict(f"compiled {name}, {rows} rows", "eager", ("torch.compile", "eager"), f"torch.compile: {failed}")
