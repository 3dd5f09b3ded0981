"""The trainer's half of a comparison: ratios of re-scored log-probs, all of which should be exactly 1.0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffusion_rl.rollout.replay import stochastic_steps
from diffusion_rl.sample import RolloutSample

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline


@dataclass(frozen=True)
class ReplayFinding:
    """One step of one sample, re-scored with autograd: exp(replayed log-prob - returned log-prob)."""

    request: int
    sample: int
    step: int
    ratio: float


def replay_findings(pipeline: RolloutPipeline, groups: Sequence[Sequence[RolloutSample]]) -> tuple[ReplayFinding, ...]:
    """Every stochastic step that came with all that scoring it again needs, one step of a group at a time."""
    findings = []
    for request, samples in enumerate(groups):
        for step in _scored_steps(samples[0]) if samples else ():
            with torch.enable_grad():
                replayed = pipeline.replay(samples, steps=[step])[:, 0].detach().cpu()
            returned = torch.stack([s.rollout_log_probs[step] for s in samples if s.rollout_log_probs is not None])
            for sample, ratio in enumerate(torch.exp(replayed - returned).tolist()):
                findings.append(ReplayFinding(request, sample, step, ratio))
    return tuple(findings)


def _scored_steps(sample: RolloutSample) -> list[int]:
    """The stochastic steps for which all that replaying needs was returned."""
    if sample.dit_trajectory is None or sample.denoising_env is None or sample.rollout_log_probs is None:
        return []
    states = set(sample.dit_trajectory.latent_step_indices.tolist())
    return [step for step in stochastic_steps(sample) if _states_read(sample, step) <= states]


def _states_read(sample: RolloutSample, step: int) -> set[int]:
    """The states that replaying a step reads; an unreachable one where it needs a model output that wasn't returned."""
    rows = sample.affine_coefficients
    if step == 0 or rows is None or rows[step][2] == 0:
        return {step, step + 1}
    return {step - 1, step, step + 1} if sample.rollout_debug_tensors is not None else {-1}
