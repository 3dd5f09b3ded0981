"""The loop: roll out, reward, put the engine to sleep, train, wake it, refit it, and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from diffusion_rl.client import RolloutClient
from diffusion_rl.sample import RolloutSample
from engine_control.errors import InvalidRequestError

from .policy import Policy
from .reward import reward_of
from .rollouts import Plan, evaluate, pictures_of, plan_of, roll_out, updated
from .settings import Places, Settings, differing
from .update import NotExactError, Trained, advantages_of, train


@dataclass(frozen=True)
class Epoch:
    """What one epoch found: means over its samples, and seconds by phase."""

    epoch: int
    weight_version: str
    reward: float
    correct: float
    group_std: float
    sde_steps: tuple[int, ...]
    samples: int
    ratios: int
    ratios_exactly_one: int
    largest_ratio_gap: float
    clipped: float
    kl: float
    gradient_norm: float
    seconds: dict[str, float]


@dataclass
class Run:
    """The state of a run, as it goes into the checkpoint."""

    settings: dict[str, Any]
    done: int = 0
    optimizer_steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    successes: dict[str, float] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """What has passed since the last call belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def evaluations_of(client: RolloutClient, settings: Settings) -> dict[str, dict[str, float]]:
    """On held-out captions: `own`, with the training's steps and guidance, but without noise; and `guided`, as the base
    model is measured in the README (10 steps, guidance 3)."""
    own = {"num_inference_steps": settings.steps, "guidance_scale": settings.guidance}
    return {
        "own": evaluate(client, settings, own),
        "guided": evaluate(client, settings, {"num_inference_steps": 10, "guidance_scale": 3.0}),
    }


def one_epoch(client: RolloutClient, policy: Policy, settings: Settings, state: Run) -> Epoch:
    """Rolls out, trains and refits. Afterwards the engine has the policy's weights, under the epoch's number."""
    epoch = state.done + 1
    watch, plan = Stopwatch(), plan_of(settings, epoch, state.successes)
    groups = roll_out(client, settings, plan)
    _require_version(groups, str(epoch - 1))
    watch.lap("rollout")
    found = [reward_of(picture, caption) for picture, caption in pictures_of(groups)]
    rewards = torch.tensor([reward.value for reward in found]).view(len(groups), settings.group)
    correct = torch.tensor([float(reward.correct) for reward in found]).view_as(rewards)
    for caption, share in zip(plan.captions, correct.mean(dim=1).tolist(), strict=True):
        state.successes = updated(state.successes, caption, share)
    watch.lap("reward")
    client.release_memory_occupation()
    watch.lap("release")
    trained = train(policy, settings, plan, groups, advantages_of(settings, plan, rewards))
    watch.lap("train")
    client.resume_memory_occupation()
    watch.lap("resume")
    client.refit(policy.engine_weights(), weight_version=str(epoch))
    watch.lap("refit")
    return _epoch_of(plan, rewards, float(correct.mean()), trained, watch)


def run(
    client: RolloutClient,
    policy: Policy,
    settings: Settings,
    places: Places,
    *,
    after_epoch: Callable[[Epoch], None] = lambda epoch: None,
    evaluating: Callable[[Run], None] = lambda run: None,
) -> Run:
    """The whole run, from its checkpoint if it is resumed; `after_epoch` is called with each epoch that is done, and
    `evaluating` before each of the two evaluations.

    Raises:
        InvalidRequestError: the checkpoint is of a run with other settings, or there is none.
    """
    state = _resumed(policy, settings, places) if places.resume else Run(asdict(settings))
    client.refit(policy.engine_weights(), weight_version=str(state.done))  # whatever the service had before
    if "before" not in state.evaluations:
        evaluating(state)
        state.evaluations["before"] = evaluations_of(client, settings)
    began, before = time.perf_counter(), state.seconds
    for epoch in range(state.done + 1, settings.epochs + 1):
        if settings.minutes and state.seconds > 60 * settings.minutes:
            break
        result = one_epoch(client, policy, settings, state)
        state.done = epoch
        state.samples += result.samples
        state.optimizer_steps += settings.updates
        state.seconds = before + time.perf_counter() - began
        state.epochs.append(asdict(result))
        policy.save(places.folder / "checkpoint.safetensors", asdict(state))
        after_epoch(result)
    evaluating(state)
    state.evaluations["after"] = evaluations_of(client, settings)
    return state


def _resumed(policy: Policy, settings: Settings, places: Places) -> Run:
    path = places.folder / "checkpoint.safetensors"
    if not path.is_file():
        raise InvalidRequestError("there is no checkpoint", field="resume", value=str(path), hint="Leave out --resume.")

    def check(state: dict[str, Any]) -> None:
        other = differing(state["settings"], asdict(settings))
        if other:
            raise InvalidRequestError(
                "the checkpoint's run has other settings",
                field="resume",
                value=str({name: before for name, (before, _) in other.items()}),
                hint="Give the same options, or another folder.",
            )

    return Run(**policy.load(path, check))


def _require_version(groups: list[list[RolloutSample]], version: str) -> None:
    """Every step of every sample was computed with the weights that the trainer has."""
    seen = {v for group in groups for sample in group for v in sample.weight_versions}
    if seen != {version}:
        raise NotExactError(f"the rollout was computed with weights {sorted(seen)}, the trainer has {version}")


def _epoch_of(plan: Plan, rewards: torch.Tensor, correct: float, trained: Trained, watch: Stopwatch) -> Epoch:
    return Epoch(
        epoch=plan.epoch,
        weight_version=str(plan.epoch),
        reward=float(rewards.mean()),
        correct=correct,
        group_std=float(rewards.std(dim=1, correction=0).mean()),
        sde_steps=plan.sde_steps,
        samples=rewards.numel(),
        ratios=trained.ratios,
        ratios_exactly_one=trained.exactly_one,
        largest_ratio_gap=trained.largest_gap,
        clipped=_mean(trained.clipped),
        kl=_mean(trained.kl),
        gradient_norm=_mean(trained.gradient_norms),
        seconds={name: round(seconds, 3) for name, seconds in watch.seconds.items()},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
