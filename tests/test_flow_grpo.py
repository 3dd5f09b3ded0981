"""FlowGRPO: a trainer's arithmetic, and the example's whole loop against a real service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from diffusion_rl import RolloutPipeline
from diffusion_rl.client import RolloutClient
from diffusion_rl.rollout.replay import replay_step
from diffusion_rl.shapes import check, draw, parse
from diffusion_rl.training import (
    GroupKey,
    clipped_objective,
    gaussian_kl,
    group_advantages,
    group_seed,
    importance_ratios,
    iteration_generator,
    transition_of,
    transitions_of,
)
from diffusion_rl.training.seeds import BITS, MAX_GROUP
from engine_control.errors import InvalidRequestError
from examples.flow_grpo.loop import Epoch, run
from examples.flow_grpo.policy import Policy
from examples.flow_grpo.report import plot, report_of
from examples.flow_grpo.reward import reward_of, shape_likeness
from examples.flow_grpo.rollouts import plan_of, service_of
from examples.flow_grpo.settings import Places, Settings
from examples.flow_grpo.update import NotExactError, advantages_of

TINY = Settings(epochs=2, prompts=2, group=4, steps=4, sde_from=1, sde_to=1, held_out=4, decay=False)
keys = st.builds(GroupKey, **{name: st.integers(0, 2**bits - 1) for name, bits in BITS.items()})


@given(keys, keys)
def test_groups_of_different_keys_share_no_seed(one: GroupKey, other: GroupKey) -> None:
    first, second = group_seed(one), group_seed(other)
    assert 0 <= first <= 2**64 - MAX_GROUP
    assert (first == second) == (one == other)
    assert one == other or abs(first - second) >= MAX_GROUP


@pytest.mark.parametrize("key", [GroupKey(0, 0, prompt=2**12), GroupKey(-1, 0), GroupKey(0, 0, worker=2**8)])
def test_a_key_that_would_run_into_its_neighbours_bits_is_refused(key: GroupKey) -> None:
    with pytest.raises(InvalidRequestError, match="bits"):
        group_seed(key)


def test_what_an_iteration_decides_is_a_function_of_run_epoch_and_purpose() -> None:
    def drawn(*key: object) -> list[int]:
        return torch.randint(2**60, (4,), generator=iteration_generator(*key)).tolist()  # type: ignore[arg-type]

    assert drawn(1, 2, "captions") == drawn(1, 2, "captions")
    others = [drawn(1, 2, "captions"), drawn(1, 3, "captions"), drawn(2, 2, "captions"), drawn(1, 2, "steps")]
    assert len({tuple(numbers) for numbers in others}) == 4


def test_a_transition_is_found_by_its_index_whichever_states_came() -> None:
    pipeline = RolloutPipeline(tiny_models.sd3_pipeline())
    fields = {"num_inference_steps": 5, "seed": 3, "rollout_sde_step_indices": [1, 3], "width": 32, "height": 32}
    keep = {"rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True}
    (whole,) = pipeline("a red square", **fields, **keep)
    (some,) = pipeline("a red square", **fields, **keep, rollout_return_step_indices=[3, 4])
    assert whole.dit_trajectory is not None
    transition, same = transition_of(whole, 3), transition_of(some, 3)
    assert [t.step for t in transitions_of(whole)] == [1, 3]
    assert torch.equal(transition.before, whole.dit_trajectory.latents[3])
    assert torch.equal(transition.after, whole.dit_trajectory.latents[4])
    assert torch.equal(same.before, transition.before)
    assert torch.equal(same.after, transition.after)
    assert transition.sigma == float(whole.dit_trajectory.sigmas[3]) > transition.next_sigma
    scored = replay_step(pipeline.engine.family, [some, whole], 3)
    assert torch.equal(importance_ratios(scored.log_probs, [some, whole], 3), torch.ones(2))
    with pytest.raises(InvalidRequestError, match="no variance"):
        transition_of(whole, 2)
    with pytest.raises(InvalidRequestError, match="came with states"):
        transition_of(some, 1)


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    rewards = torch.rand(5, 16, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(rewards, eps=0.0)
    assert torch.allclose(advantages.mean(dim=1), torch.zeros(5), atol=1e-6)
    assert torch.allclose(advantages.std(dim=1, correction=0), torch.ones(5))
    assert torch.allclose(group_advantages(rewards + 7, eps=0.0), advantages, atol=1e-4)
    shared = group_advantages(rewards, scale="batch", eps=0.0)
    assert torch.allclose(shared.pow(2).mean(), torch.tensor(1.0))
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    assert torch.allclose(shared / centred, (shared / centred)[0, 0].expand(5, 16))
    assert torch.allclose(group_advantages(rewards, scale="none"), centred, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(scale: str) -> None:
    rewards = torch.tensor([[0.1] * 3, [0.2, 0.4, 0.6]], dtype=torch.float64)
    advantages = group_advantages(rewards, scale=scale)  # type: ignore[arg-type]
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert advantages[1, 2] > 0


@pytest.mark.parametrize("rewards", [torch.zeros(3, 1), torch.zeros(4), torch.tensor([[1.0, float("nan")]])])
def test_rewards_that_cannot_be_compared_are_refused(rewards: torch.Tensor) -> None:
    with pytest.raises(InvalidRequestError, match=r"reward"):
        group_advantages(rewards)


def test_the_objective_pulls_at_ratio_one_and_not_beyond_the_clip() -> None:
    advantages = torch.tensor([2.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    ratios = torch.tensor([1.0, 1.0, 1.2, 0.8, 0.8, 1.2], requires_grad=True)
    loss = clipped_objective(ratios, advantages, clip_range=0.1)
    loss.loss.backward()
    assert ratios.grad is not None
    assert torch.allclose(ratios.grad, torch.tensor([-2.0, 1.0, 0.0, 0.0, -1.0, 1.0]) / 6)
    assert loss.clipped == pytest.approx(2 / 6)


def test_the_kl_is_that_of_two_gaussians_a_mean_over_elements() -> None:
    means, others = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    stds = torch.tensor([0.5, 1.0, 2.0])
    wide = stds.view(3, 1, 1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(means, wide), torch.distributions.Normal(others, wide)
    )
    assert torch.allclose(gaussian_kl(means, others, stds), exact.mean(dim=(1, 2)))


def test_the_reward_grades_shapes_where_the_checker_says_no_to_both() -> None:
    caption = "two small red crosses on the left, gray background"
    scene, rng = parse(caption), np.random.default_rng(0)
    cross, circle = (
        torch.from_numpy(draw(replace(scene, shape=shape), rng)).permute(2, 0, 1) / 255 for shape in ("cross", "circle")
    )
    between = [circle + weight * (cross - circle) for weight in (0.0, 0.3, 0.5)]
    assert not any(check(picture, caption).correct for picture in between[:2])
    assert reward_of(cross, caption).correct
    values = [reward_of(picture, caption).value for picture in [*between, cross]]
    assert values == sorted(values)
    assert values[-1] > values[0] + 0.5
    assert shape_likeness(torch.full((3, 64, 64), 0.5), caption) == 0.0


def test_the_control_run_shuffles_rewards_within_their_group() -> None:
    settings = Settings(shuffle_rewards=True)
    rewards = torch.rand(8, 16, generator=torch.Generator().manual_seed(1))
    plan = plan_of(settings, 1)
    shuffled, honest = (advantages_of(s, plan, rewards) for s in (settings, replace(settings, shuffle_rewards=False)))
    assert not torch.equal(shuffled, honest)
    assert torch.allclose(shuffled.sort(dim=1).values, honest.sort(dim=1).values, atol=1e-5)


@pytest.fixture(scope="module")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with service_of(Places(tmp_path_factory.mktemp("service"))) as url:
        yield url


@pytest.fixture
def client(service_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(service_url) as connected:
        yield connected


def test_a_short_training_raises_the_reward_and_every_ratio_begins_at_exactly_one(
    client: RolloutClient, tmp_path: Path
) -> None:
    settings = Settings(epochs=8, prompts=4, group=16, lr=1.5e-4, captions="small red square", decay=False)
    seen: list[Epoch] = []
    done = run(client, Policy(settings), settings, Places(tmp_path), after_epoch=seen.append)
    assert [epoch.epoch for epoch in seen] == list(range(1, 9))
    assert all(epoch.ratios_exactly_one == epoch.ratios == 4 * 16 * 2 for epoch in seen)
    assert seen[0].kl == 0.0 < seen[-1].kl  # the first policy is the reference
    before, after = (done.evaluations[when]["own"] for when in ("before", "after"))
    assert after["reward"] > before["reward"] + 0.08  # with the loss turned round it falls, for three seeds
    assert client.weight_version() == "8"
    report = report_of(done)
    assert report["ratios"] == {"before_first_step": 1024, "exactly_one": 1024}
    assert plot(done, tmp_path / "rewards.png")


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(client: RolloutClient, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(client, Policy(TINY), TINY, Places(whole))
    run(client, Policy(TINY), replace(TINY, epochs=1), Places(parts))
    run(client, Policy(TINY), TINY, Places(parts, resume=True))
    one, other = (load_file(folder / "checkpoint.safetensors") for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(InvalidRequestError, match="other settings"):
        run(client, Policy(TINY), replace(TINY, lr=1.0), Places(parts, resume=True))


def test_an_adapter_begins_exact_and_its_merge_gap_is_told(client: RolloutClient, tmp_path: Path) -> None:
    settings = replace(TINY, lora=4, lr=1e-3)
    seen: list[Epoch] = []
    run(client, Policy(settings), settings, Places(tmp_path), after_epoch=seen.append)
    assert seen[0].largest_ratio_gap == 0.0
    assert 0.0 < seen[1].largest_ratio_gap < 1e-4


def test_a_trainer_whose_weights_are_not_the_engines_is_stopped(client: RolloutClient, tmp_path: Path) -> None:
    policy = Policy(TINY)
    sent = policy.engine_weights()
    name = "transformer_blocks.0.attn.to_q.weight"
    policy.engine_weights = lambda: {**sent, name: sent[name] * 1.01}  # type: ignore[method-assign]
    with pytest.raises(NotExactError, match="ratios are not exactly"):
        run(client, policy, TINY, Places(tmp_path))
