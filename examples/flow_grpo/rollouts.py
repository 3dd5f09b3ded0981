"""The rollout half, over HTTP: groups for training, pictures for evaluation, and the service itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_rl.client import RolloutClient
from diffusion_rl.sample import RolloutSample
from diffusion_rl.shapes import held_out_captions, parse, training_captions
from diffusion_rl.training import GroupKey, group_seed, iteration_generator

from .reward import Reward, reward_of
from .settings import Places, Settings

AT_ONCE = 16  # requests in flight; the engine batches them step by step
EVALUATION_SEED = 1000
FIRST_GUESS = 0.6  # of a success nothing is known about
NEW_SHARE = 0.3  # what a new group counts in the mean of its kind
LEAST_CHANCE = 0.1  # of a kind that always succeeds, beside 1.1 of one that never does


@dataclass(frozen=True)
class Plan:
    """What one epoch rolls out: a function of seed, epoch and the successes so far, so the same in a resumed run."""

    epoch: int
    captions: tuple[str, ...]
    sde_steps: tuple[int, ...]


def plan_of(settings: Settings, epoch: int, successes: Mapping[str, float] | None = None) -> Plan:
    """Captions without replacement, and the window of stochastic steps, drawn once for all requests of the epoch.

    `successes` are shares of right pictures by kind of caption, as `updated` keeps them.
    """
    captions = _with_words(training_captions(), settings.captions)
    known = successes or {}
    chances = [1 + LEAST_CHANCE - known.get(kind_of(c), FIRST_GUESS) if settings.focus else 1.0 for c in captions]
    generator = iteration_generator(settings.seed, epoch, "captions")
    drawn = torch.multinomial(torch.tensor(chances), settings.prompts, generator=generator)
    generator = iteration_generator(settings.seed, epoch, "stochastic steps")
    first = int(torch.randint(settings.sde_from, settings.sde_to + 1, (1,), generator=generator))
    chosen = tuple(captions[index] for index in drawn.tolist())
    return Plan(epoch, chosen, tuple(range(first, first + settings.sde_steps)))


def kind_of(caption: str) -> str:
    """Size and shape of a caption: what decides how often the base model succeeds."""
    scene = parse(caption)
    return f"{scene.size} {scene.shape}"


def updated(successes: Mapping[str, float], caption: str, share: float) -> dict[str, float]:
    """The successes after a group of that caption, of which `share` was right: means that forget."""
    kind = kind_of(caption)
    before = successes.get(kind, FIRST_GUESS)
    return {**successes, kind: before + NEW_SHARE * (share - before)}


def roll_out(client: RolloutClient, settings: Settings, plan: Plan) -> list[list[RolloutSample]]:
    """The epoch's groups, in the order of its captions; their requests are in flight together."""
    states = [*plan.sde_steps, plan.sde_steps[-1] + 1]
    fields: dict[str, Any] = {
        "num_outputs_per_prompt": settings.group,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance,
        "rollout_noise_level": settings.noise_level,
        "rollout_sde_step_indices": plan.sde_steps,
        "rollout_return_step_indices": states,
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
        "rollout_debug_mode": False,
        "init_same_noise": settings.same_noise,
    }

    def group(index: int) -> list[RolloutSample]:
        seed = group_seed(GroupKey(run=settings.seed, epoch=plan.epoch, prompt=index))
        return client.generate(plan.captions[index], seed=seed, **fields)

    return _together(group, len(plan.captions))


def evaluate(client: RolloutClient, settings: Settings, fields: dict[str, Any]) -> dict[str, float]:
    """Means over held-out captions, of pictures by ODE steps: `correct`, the share that the checker finds right in
    every attribute, and `reward`. The same captions and seeds at every call."""
    chosen = _with_words(held_out_captions(), settings.captions)[: settings.held_out]

    def judged(index: int) -> Reward:
        (sample,) = client.generate(chosen[index], seed=EVALUATION_SEED + index, rollout=False, **fields)
        assert sample.generated_output is not None
        return reward_of(sample.generated_output, sample.prompt)

    found = _together(judged, len(chosen))
    return {
        "captions": len(found),
        "correct": sum(reward.correct for reward in found) / len(found),
        "reward": sum(reward.value for reward in found) / len(found),
    }


@contextmanager
def service_of(places: Places) -> Iterator[str]:
    """The address of a service: the one that was named, or, while the block runs, one of our own."""
    if places.url is not None:
        yield places.url
        return
    from diffusion_rl.cli.service_process import running_service

    log = places.folder / "service.log"
    with running_service("embedded", port=0, log=log, arguments=["--enable-memory-saver"]) as service:
        service.wait_ready()
        yield service.url


def _with_words(captions: list[str], words: str) -> list[str]:
    return [caption for caption in captions if all(word in caption for word in words.split())]


def _together(function: Any, count: int) -> list[Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, range(count)))


def pictures_of(groups: Sequence[Sequence[RolloutSample]]) -> list[tuple[torch.Tensor, str]]:
    """Picture and caption of every sample, group by group."""
    return [(s.generated_output, s.prompt) for group in groups for s in group if s.generated_output is not None]
