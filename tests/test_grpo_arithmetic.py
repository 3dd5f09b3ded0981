"""GRPO of the embedded language model: a trainer's arithmetic, and the example's whole loop against a real service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_control.errors import InvalidRequestError
from examples.grpo_arithmetic.loop import Iteration, run
from examples.grpo_arithmetic.policy import Policy
from examples.grpo_arithmetic.report import plot, report_of
from examples.grpo_arithmetic.rollouts import (
    SEED_STRIDE,
    MismatchError,
    group_seed,
    questions_of,
    require_version,
    service_of,
)
from examples.grpo_arithmetic.settings import Places, Settings
from examples.grpo_arithmetic.update import advantages_of, clipped_loss, reference_kl
from llm_runtime.arithmetic import is_held_out, parse
from llm_runtime.client import LLMClient

TINY = Settings(iterations=2, prompts=2, group=4, max_new_tokens=16, held_out=0, decay=False, kl=0.01)


def test_what_an_iteration_asks_is_a_function_of_seed_and_iteration_and_is_not_held_out() -> None:
    settings = Settings(prompts=32)
    asked = [questions_of(settings, iteration) for iteration in (1, 2)]
    assert asked[0] == questions_of(settings, 1)
    assert asked[0] != asked[1]
    assert asked[0] != questions_of(replace(settings, seed=1), 1)
    assert not any(is_held_out(parse(question)) for question in asked[0])
    pooled = replace(settings, pool=5, prompts=3)
    assert questions_of(pooled, 1) + questions_of(pooled, 2)[:2] == questions_of(replace(pooled, prompts=5), 1)
    seeds = [group_seed(settings, iteration, index) for iteration in range(20) for index in range(32)]
    assert len({seed // SEED_STRIDE for seed in seeds}) == len(seeds)
    assert all(seed % SEED_STRIDE == 0 for seed in seeds)


def test_advantages_compare_within_a_group_and_equal_rewards_teach_nothing() -> None:
    rewards = torch.tensor([[1.0, 0.1, 0.1, 1.0], [0.1, 0.1, 0.1, 0.1], [0.0, 1.0, 1.0, 1.0]])
    found = advantages_of(Settings(), 1, rewards)
    assert torch.allclose(found[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3)
    assert torch.equal(found[1], torch.zeros(4))
    assert torch.allclose(found.sum(dim=1), torch.zeros(3), atol=1e-5)
    shuffled = advantages_of(Settings(shuffle_rewards=True), 1, rewards)
    assert not torch.equal(shuffled, found)


def test_the_loss_is_reinforce_at_a_ratio_of_one_and_stops_where_the_clip_bites() -> None:
    ratios = torch.tensor([1.0, 1.0, 1.5, 0.5, 1.5, 0.5], requires_grad=True)
    advantages = torch.tensor([2.0, -2.0, 1.0, -1.0, -1.0, 1.0])
    clipped_loss(ratios, advantages, clip_range=0.2).sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.tolist() == [-2.0, 2.0, 0.0, 0.0, 1.0, -1.0]
    kl = reference_kl(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -0.5]))
    assert kl[0] == 0.0 < min(kl[1:])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMClient]:
    with service_of(Places(tmp_path_factory.mktemp("service"))) as url, LLMClient(url, timeout=120) as connected:
        yield connected


def test_a_short_training_raises_the_reward_and_trainer_and_engine_agree_to_rounding(
    client: LLMClient, tmp_path: Path
) -> None:
    settings = Settings(iterations=4, prompts=4, pool=4, group=24, lr=3e-4, updates=2, decay=False, held_out=8)
    seen: list[Iteration] = []
    done = run(client, Policy(settings), settings, Places(tmp_path), after_iteration=seen.append)
    assert [iteration.iteration for iteration in seen] == [1, 2, 3, 4]
    assert all(0.0 < iteration.largest_log_prob_gap < 1e-4 for iteration in seen)
    assert seen[-1].reward > seen[0].reward + 0.1  # with the loss turned round it falls
    assert (done.answers, done.optimizer_steps) == (4 * 4 * 24, 8)
    assert client.weight_version() == "4"
    report = report_of(done, note="a test")
    assert report["log_prob_gap"]["tokens"] > 20 * done.answers
    assert set(report["gain_points"]) == {"sampled", "greedy"}
    assert plot(done, tmp_path / "rewards.png")


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(client: LLMClient, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(client, Policy(TINY), TINY, Places(whole))
    run(client, Policy(TINY), replace(TINY, iterations=1), Places(parts))
    done = run(client, Policy(TINY), TINY, Places(parts, resume=True))
    assert (done.done, done.settings["iterations"]) == (2, 2)
    one, other = (load_file(folder / "checkpoint.safetensors") for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(InvalidRequestError, match="other settings"):
        run(client, Policy(TINY), replace(TINY, lr=1.0), Places(parts, resume=True))


def test_a_trainer_whose_weights_are_not_the_engines_is_stopped(client: LLMClient, tmp_path: Path) -> None:
    policy = Policy(TINY)
    sent = policy.engine_weights()
    name = "model.layers.0.self_attn.v_proj.weight"
    policy.engine_weights = lambda: {**sent, name: sent[name] * 1.01}  # type: ignore[method-assign]
    with pytest.raises(MismatchError, match="from the engine's"):
        run(client, policy, TINY, Places(tmp_path))
    assert not client.is_sleeping()
    samples = client.generate("1+2=", {"max_new_tokens": 3})
    require_version(samples, "0")
    client.update_weight_version("another")
    with pytest.raises(MismatchError, match="the trainer has '1'"):
        require_version(samples, "1")
