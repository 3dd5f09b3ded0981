"""The two promises that are checked in front of the user: a sample's bits don't depend on its batch, and replaying a
rollout under unchanged weights gives ratios of exactly 1.0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.rollout.replay import stochastic_steps
from diffusion_rl.sample import RolloutSample


@dataclass(frozen=True)
class Comparison:
    """Two renderings of one sample. `compared` names the tensors that both have; `different` those with other bits."""

    compared: tuple[str, ...]
    different: tuple[str, ...]

    @property
    def same_bits(self) -> bool:
        return bool(self.compared) and not self.different


def compare_bits(one: RolloutSample, other: RolloutSample) -> Comparison:
    """Compares pictures, log-probs, latents and states of two samples, bit for bit."""
    pairs = {
        "picture": (one.generated_output, other.generated_output),
        "final latent": (one.generated_latents, other.generated_latents),
        "log-probs": (one.rollout_log_probs, other.rollout_log_probs),
    }
    if one.dit_trajectory is not None and other.dit_trajectory is not None:
        pairs["states"] = (one.dit_trajectory.latents, other.dit_trajectory.latents)
    both = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    different = tuple(name for name, (a, b) in both.items() if not _same_bits(a, b))
    return Comparison(tuple(both), different)


@torch.no_grad()
def replay_ratios(pipeline: RolloutPipeline, samples: Sequence[RolloutSample]) -> torch.Tensor:
    """exp(replayed log-prob - returned log-prob) `[n, stochastic steps]`, under the pipeline's own weights."""
    steps = stochastic_steps(samples[0])
    returned = torch.stack([s.rollout_log_probs[steps] for s in samples if s.rollout_log_probs is not None])
    return torch.exp(pipeline.replay(samples, steps=steps).cpu() - returned)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also tells 0.0 from -0.0, and finds equal NaN equal."""
    return one.dtype == other.dtype and one.shape == other.shape and _bytes(one).equal(_bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
