"""Keeps the steps and tensors of one sample that its request asked for, and nothing else."""

from __future__ import annotations

import torch

from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.schedule import Schedule
from diffusion_rl.sample import DiTTrajectory, RolloutDebugTensors
from diffusion_rl.transfer import HostCopies


class Recorder:
    """One sample's memory. Each tensor is allocated once, in its final size, and is never shared with another sample.

    Latents are those that the transformer consumes and the scheduler wrote, before any VAE scaling; state 0 is the
    initial latent and state T the final one. Of steps that are not taken there are zeros.
    """

    def __init__(
        self,
        params: RolloutParams,
        schedule: Schedule,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        first_state: int = 0,
    ) -> None:
        """`first_state` is the first that will be recorded: later than 0 for a sample that is resumed."""
        steps = schedule.steps
        self._schedule = schedule
        self.log_probs = torch.zeros(steps, device=device) if params.rollout else None
        kept = params.rollout_return_step_indices
        wanted = sorted(kept) if kept is not None else range(steps + 1)
        self._kept = [state for state in wanted if state >= first_state]
        self._slot = {state: slot for slot, state in enumerate(self._kept)}
        with_latents = params.rollout and params.rollout_return_dit_trajectory
        self.latents = torch.empty(len(self._kept), *shape, device=device) if with_latents else None
        self.debug = params.rollout and params.rollout_debug_mode
        if self.debug:
            self.noises = torch.zeros(steps, *shape, device=device)
            self.means = torch.zeros(steps, *shape, device=device)
            self.model_outputs = torch.zeros(steps, *shape, device=device)

    def fork(self) -> Recorder:
        """A copy with memory of its own, for a sample that goes on from here by itself."""
        twin = object.__new__(Recorder)
        twin.__dict__ = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.__dict__.items()}
        return twin

    def record_state(self, state: int, latents: torch.Tensor) -> None:
        """Copies state number `state` (0..T), if it is one that was asked for."""
        if self.latents is not None and state in self._slot:
            self.latents[self._slot[state]].copy_(latents)

    def record_step(
        self,
        step: int,
        log_prob: torch.Tensor,
        noise: torch.Tensor | None,
        mean: torch.Tensor,
        model_output: torch.Tensor,
    ) -> None:
        """Copies one step's log-prob and, in debug mode, its noise (None: none was drawn), mean and model output."""
        if self.log_probs is not None:
            self.log_probs[step] = log_prob
        if self.debug:
            if noise is not None:
                self.noises[step].copy_(noise)
            self.means[step].copy_(mean)
            self.model_outputs[step].copy_(model_output)

    def trajectory(
        self, clocks: tuple[torch.Tensor, torch.Tensor], last_state: int, copies: HostCopies
    ) -> DiTTrajectory | None:
        """What was kept of the states up to `last_state`, on its way to the CPU; `clocks` are the `(timesteps, sigmas)`
        that the whole group shares."""
        if self.latents is None:
            return None
        kept = [state for state in self._kept if state <= last_state]
        whole = len(kept) == len(self._kept)
        return DiTTrajectory(
            latents=copies.take(self.latents) if whole else copies.copy(self.latents[: len(kept)]),
            latent_step_indices=torch.tensor(kept, dtype=torch.int64),
            timesteps=clocks[0],
            sigmas=clocks[1],
        )

    def debug_tensors(self, noise_std: torch.Tensor, copies: HostCopies) -> RolloutDebugTensors | None:
        """The four debug tensors, on their way to the CPU; noise_std `[T]` comes from the schedule."""
        if not self.debug:
            return None
        return RolloutDebugTensors(
            rollout_variance_noises=copies.take(self.noises),
            rollout_prev_sample_means=copies.take(self.means),
            rollout_noise_std_devs=noise_std[:, None].clone(),
            rollout_model_outputs=copies.take(self.model_outputs),
        )
