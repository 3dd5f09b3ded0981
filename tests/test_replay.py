"""The trainer's half: gradients, other weights, and clear refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import flux_pipeline, qwen_image_pipeline, sd3_pipeline, z_image_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.rollout.replay import replay_step, stochastic_steps
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.training.transitions import transition_of
from engine_control.errors import InvalidRequestError

FULL: dict[str, Any] = {
    "height": 32,
    "width": 32,
    "num_inference_steps": 4,
    "output_type": "latent",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return RolloutPipeline(sd3_pipeline())


def test_a_policy_gradient_step_raises_the_log_probs_of_what_was_rewarded(pipeline: RolloutPipeline) -> None:
    samples = pipeline("cat", seed=1, num_outputs_per_prompt=4, **FULL)
    policy = copy.deepcopy(pipeline.transformer)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    before = pipeline.replay(samples, transformer=policy)
    old = before.detach()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    ratio = torch.exp(before - old)
    assert torch.equal(ratio.detach(), torch.ones_like(ratio))
    (-(advantages * ratio).mean()).backward()
    optimizer.step()
    with torch.no_grad():
        after = pipeline.replay(samples, transformer=policy)
    assert ((after - old) * advantages).mean() > 0


def test_gradients_are_those_of_the_same_formula_written_out(pipeline: RolloutPipeline) -> None:
    sample = pipeline("cat", seed=1, guidance_scale=1.0, rollout_sde_type="dance", **FULL)[0]
    assert sample.dit_trajectory is not None
    policy = copy.deepcopy(pipeline.transformer)
    pipeline.replay([sample], transformer=policy, steps=[1]).sum().backward()
    ours = policy.proj_out.weight.grad.clone()
    policy.zero_grad()
    env = sample.denoising_env
    assert env is not None
    t = sample.dit_trajectory
    sigma, dt = t.sigmas[1], t.sigmas[2] - t.sigmas[1]
    v = policy(
        hidden_states=t.latents[1:2],
        timestep=t.timesteps[1:2],
        encoder_hidden_states=env.pos_cond_kwargs["encoder_hidden_states"][None],  # type: ignore[index]
        pooled_projections=env.pos_cond_kwargs["pooled_projections"][None],  # type: ignore[index]
        return_dict=False,
    )[0]
    eta = sample.noise_level
    mean = t.latents[1:2] * (1 + eta**2 / (2 * sigma) * dt) + v * (1 + eta**2 * (1 - sigma) / (2 * sigma)) * dt
    density = torch.distributions.Normal(mean, eta * torch.sqrt(-dt))
    density.log_prob(t.latents[2:3]).mean().backward()
    torch.testing.assert_close(ours, policy.proj_out.weight.grad, atol=1e-5, rtol=1e-3)


def test_any_micro_batch_gives_the_same_log_probs(pipeline: RolloutPipeline) -> None:
    samples = pipeline(["cat", "dog"], seed=1, num_outputs_per_prompt=3, **FULL)
    with torch.no_grad():
        whole = pipeline.replay(samples)
        parts = [pipeline.replay(samples[a:b]) for a, b in ((0, 1), (1, 3), (3, 6))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("build", [sd3_pipeline, qwen_image_pipeline, z_image_pipeline, flux_pipeline])
def test_gradient_checkpointing_changes_no_bit_of_log_probs_or_gradients(build: Callable[[], Any]) -> None:
    pipeline = RolloutPipeline(build())
    guided = {"negative_prompt": "a longer one", "true_cfg_scale": 3.0}
    samples = pipeline(["cat", "two blue boxes"], seed=1, **FULL, **guided)
    gradients = []
    for checkpointing in (False, True):
        policy = copy.deepcopy(pipeline.transformer)
        policy.train()
        if checkpointing:
            policy.enable_gradient_checkpointing()
        scored = pipeline.replay(samples, transformer=policy, steps=[1, 2])
        scored.sum().backward()
        rolled_out = torch.stack([s.rollout_log_probs[1:3] for s in samples if s.rollout_log_probs is not None])
        assert torch.equal(scored.detach(), rolled_out)
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("filtered", [False, True])
def test_returned_states_of_the_stochastic_steps_are_enough(pipeline: RolloutPipeline, filtered: bool) -> None:
    fields = {
        **FULL,
        "rollout_sde_step_indices": [1],
        "rollout_return_step_indices": [1, 2],
        "rollout_debug_mode": False,
    }
    samples = pipeline("cat", seed=1, num_outputs_per_prompt=2, **fields)
    if filtered:  # as a service sends them with --dit-trajectory-timesteps filtered
        kept = [(s, s.dit_trajectory) for s in samples if s.dit_trajectory is not None]
        own = [(s, replace(t, timesteps=t.timesteps[t.latent_step_indices])) for s, t in kept]
        samples = [replace(s, dit_trajectory=t) for s, t in own]
    assert stochastic_steps(samples[0]) == [1]
    scored = replay_step(pipeline.engine.family, samples, 1)
    rolled_out = torch.stack([s.rollout_log_probs[1] for s in samples if s.rollout_log_probs is not None])
    assert torch.equal(scored.log_probs.detach(), rolled_out)
    assert scored.noise_stds.shape == (2,)
    assert samples[0].dit_trajectory is not None
    whole = pipeline.engine.family.scheduler(step_kinds.get("sde"), None)
    whole.set_timesteps(FULL["num_inference_steps"], device="cpu")
    assert transition_of(samples[0], 1).timestep == whole.timesteps[1]


@pytest.mark.parametrize(
    ("fields", "steps", "message"),
    [
        ({"rollout_return_dit_trajectory": False}, None, "rollout_return_dit_trajectory=true"),
        ({"rollout_return_denoising_env": False}, None, "rollout_return_denoising_env=true"),
        ({"rollout_sde_step_indices": [1]}, [0], r"step 0 has no variance.*\[1\]"),
        ({"rollout_return_step_indices": [0, 1]}, [1], "needs states 1 and 2"),
        ({"rollout_sde_type": "ode"}, None, "no stochastic step"),
        ({}, [9], "step 9"),
    ],
)
def test_what_was_not_returned_is_asked_for_by_name(
    pipeline: RolloutPipeline, fields: dict[str, Any], steps: list[int] | None, message: str
) -> None:
    samples = pipeline("cat", seed=1, **{**FULL, **fields})
    with pytest.raises(InvalidRequestError, match=message):
        pipeline.replay(samples, steps=steps)


def test_samples_that_do_not_fit_together_are_refused(pipeline: RolloutPipeline) -> None:
    mixed = [pipeline("cat", seed=1, **{**FULL, "rollout_sde_type": k})[0] for k in ("sde", "dance")]
    with pytest.raises(InvalidRequestError, match="must agree"):
        pipeline.replay(mixed)
    guided = [pipeline("cat", seed=1, guidance_scale=g, **FULL)[0] for g in (1.0, 4.0)]
    with pytest.raises(InvalidRequestError, match="guidance mode"):
        pipeline.replay(guided)
    with pytest.raises(InvalidRequestError, match="nothing to replay"):
        pipeline.replay([])
