"""When are two samples the same? When every bit of everything that depends on the model and the noise is."""

from __future__ import annotations

import torch

from diffusion_rl.sample import RolloutSample


def bits(sample: RolloutSample) -> dict[str, torch.Tensor | None]:
    """All that must agree between two runs of one sample, by name."""
    trajectory, debug = sample.dit_trajectory, sample.rollout_debug_tensors
    return {
        "generated_output": sample.generated_output,
        "generated_latents": sample.generated_latents,
        "rollout_log_probs": sample.rollout_log_probs,
        "latents": None if trajectory is None else trajectory.latents,
        "noises": None if debug is None else debug.rollout_variance_noises,
        "means": None if debug is None else debug.rollout_prev_sample_means,
        "stds": None if debug is None else debug.rollout_noise_std_devs,
        "model_outputs": None if debug is None else debug.rollout_model_outputs,
    }


def assert_same_bits(a: RolloutSample, b: RolloutSample) -> None:
    """Fails with the name of the first tensor that differs."""
    ours, theirs = bits(a), bits(b)
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor is None) == (other is None), f"{name} is there only once"
        if tensor is not None and other is not None:
            assert tensor.dtype == other.dtype, name
            assert torch.equal(tensor, other), f"{name} differs by {(tensor.float() - other.float()).abs().max()}"
    assert a.rollout_step_kinds == b.rollout_step_kinds
    assert a.seed == b.seed
