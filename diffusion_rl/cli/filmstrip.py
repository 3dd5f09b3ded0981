"""Filmstrips: how one sample's states turn into its picture, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_rl.models import ModelFamily
from diffusion_rl.pictures import SheetRow, Tile, draw_sheet, false_colour
from diffusion_rl.sample import RolloutSample
from engine_control.errors import InvalidRequestError
from rl_kernels import exact_mode

MOST_STATES = 11  # of a longer trajectory, evenly spaced ones are shown


@dataclass(frozen=True)
class Filmstrip:
    """States of one sample in order, as rows of pictures, and the sentence that says what they show."""

    caption: str
    rows: tuple[SheetRow, ...]

    def save(self, path: Path) -> Path:
        """Writes the strip as a PNG and returns the path."""
        return draw_sheet(self.rows, path, title=self.caption, side=96)


@torch.no_grad()
def decoded_filmstrip(family: ModelFamily, sample: RolloutSample) -> Filmstrip:
    """The states as the VAE decodes them, and below, if debug tensors came along, the model's prediction at each."""

    def decode(latent: torch.Tensor) -> torch.Tensor:
        with exact_mode():
            return family.pictures(latent.to(family.device)[None], *sample.size)[0].cpu()

    return _filmstrip(sample, decode, "decoded by the VAE")


def false_colour_filmstrip(sample: RolloutSample) -> Filmstrip:
    """The states without a VAE: the first three channels of the latents, in false colour."""
    aspect = sample.height / sample.width
    return _filmstrip(
        sample, lambda latent: false_colour(latent, aspect=aspect), "latents in false colour, no VAE here"
    )


def _filmstrip(sample: RolloutSample, draw: Callable[[torch.Tensor], torch.Tensor], how: str) -> Filmstrip:
    trajectory, debug = sample.dit_trajectory, sample.rollout_debug_tensors
    if trajectory is None:
        raise InvalidRequestError(
            "a filmstrip needs the states of the sample",
            field="rollout_return_dit_trajectory",
            value=False,
            hint="Roll out with rollout_return_dit_trajectory=true.",
        )
    indices, sigmas = trajectory.latent_step_indices.tolist(), trajectory.sigmas
    slots = _spread(len(indices))
    notes = [f"{indices[slot]}: sigma {float(sigmas[indices[slot]]):.2f}" for slot in slots]
    states = [Tile(draw(trajectory.latents[slot]), note) for slot, note in zip(slots, notes, strict=True)]
    rows = [SheetRow("state x_t", tuple(states))]
    if debug is not None:
        predictions = []
        for slot, note in zip(slots, notes, strict=True):
            latent, step = trajectory.latents[slot], indices[slot]
            if step < len(sample.rollout_step_kinds):  # the final state is its own prediction
                latent = latent - sigmas[step] * debug.rollout_model_outputs[step]
            predictions.append(Tile(draw(latent), note))
        rows.append(SheetRow("the model's prediction of the final state, x_t - sigma v", tuple(predictions)))
    return Filmstrip(f"{sample.prompt} (seed {sample.seed}; {how})", tuple(rows))


def _spread(count: int) -> list[int]:
    """At most `MOST_STATES` of 0..count - 1, evenly spaced, first and last included."""
    shown = min(count, MOST_STATES)
    return [round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)]
