"""The loop: generate, reward, put the engine to sleep, train, wake it, refit it, and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from engine_control.errors import InvalidRequestError
from llm_runtime.client import LLMClient

from .policy import Policy
from .rollouts import evaluate, generate_groups
from .settings import Places, Settings, differing
from .update import Trained, advantages_of, train


@dataclass(frozen=True)
class Iteration:
    """What one iteration found: means over its answers, and seconds by phase. Its gaps are those of `Trained`."""

    iteration: int
    weight_version: str
    reward: float
    correct: float
    taught: float
    answers: int
    tokens: int
    largest_log_prob_gap: float
    mean_log_prob_gap: float
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
    answers: int = 0
    seconds: float = 0.0
    iterations: list[dict[str, Any]] = field(default_factory=list)
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


def evaluations_of(client: LLMClient, policy: Policy, settings: Settings) -> dict[str, dict[str, float]]:
    """On held-out questions: `sampled`, at the training's temperature, and `greedy`. Nothing, if none are held out."""
    if not settings.held_out:
        return {}
    return {
        "sampled": evaluate(client, policy.tokenizer, settings, temperature=settings.temperature),
        "greedy": evaluate(client, policy.tokenizer, settings, temperature=0.0),
    }


def one_iteration(client: LLMClient, policy: Policy, settings: Settings, state: Run) -> tuple[Iteration, int]:
    """Generates, trains and refits; also returns how many optimizer steps that took. Afterwards the engine has the
    policy's weights, under the iteration's number.

    The engine gives back weights and KV cache while the trainer works. The KV cache, which is of no use to a refit, is
    taken again after it, so that the new weights come while memory is still free.
    """
    number, watch = state.done + 1, Stopwatch()
    groups = generate_groups(client, policy.tokenizer, settings, number)
    watch.lap("generate")
    with asleep(client):
        watch.lap("release")
        rewards = torch.tensor([[answer.reward for answer in group] for group in groups])
        trained = train(policy, settings, number, groups, advantages_of(settings, number, rewards))
        watch.lap("train")
    watch.lap("resume")
    client.refit(policy.engine_weights(), weight_version=str(number))
    watch.lap("refit")
    client.resume_memory_occupation()
    watch.lap("resume")
    return _iteration_of(number, rewards, trained, watch), len(trained.gradient_norms)


@contextmanager
def asleep(client: LLMClient) -> Iterator[None]:
    """Inside, the engine has given its memory back; afterwards its weights lie there again, and after an error all."""
    client.release_memory_occupation()
    try:
        yield
    except BaseException:
        client.resume_memory_occupation()
        raise
    client.resume_memory_occupation(["weights"])


def run(
    client: LLMClient,
    policy: Policy,
    settings: Settings,
    places: Places,
    *,
    after_iteration: Callable[[Iteration], None] = lambda iteration: None,
    evaluating: Callable[[Run], None] = lambda run: None,
) -> Run:
    """The whole run, from its checkpoint if it is resumed; `after_iteration` is called with each that is done, and
    `evaluating` before each of the two evaluations.

    Raises:
        InvalidRequestError: the checkpoint is of a run with other settings, or there is none.
    """
    state = _resumed(policy, settings, places) if places.resume else Run(asdict(settings))
    client.refit(policy.engine_weights(), weight_version=str(state.done))  # whatever the service had before
    if "before" not in state.evaluations:
        evaluating(state)
        state.evaluations["before"] = evaluations_of(client, policy, settings)
    began, before = time.perf_counter(), state.seconds
    for number in range(state.done + 1, settings.iterations + 1):
        if settings.minutes and state.seconds > 60 * settings.minutes:
            break
        result, steps = one_iteration(client, policy, settings, state)
        state.done = number
        state.answers += result.answers
        state.optimizer_steps += steps
        state.seconds = before + time.perf_counter() - began
        state.iterations.append(asdict(result))
        policy.save(places.folder / "checkpoint.safetensors", asdict(state))
        after_iteration(result)
    evaluating(state)
    state.evaluations["after"] = evaluations_of(client, policy, settings)
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

    return Run(**{**policy.load(path, check), "settings": asdict(settings)})


def _iteration_of(number: int, rewards: torch.Tensor, trained: Trained, watch: Stopwatch) -> Iteration:
    return Iteration(
        iteration=number,
        weight_version=str(number),
        reward=float(rewards.mean()),
        correct=float((rewards == 1.0).float().mean()),
        taught=trained.taught / len(rewards),
        answers=rewards.numel(),
        tokens=trained.tokens,
        largest_log_prob_gap=trained.largest_gap,
        mean_log_prob_gap=trained.mean_gap,
        clipped=_mean(trained.clipped),
        kl=_mean(trained.kl),
        gradient_norm=_mean(trained.gradient_norms),
        seconds={name: round(seconds, 3) for name, seconds in watch.seconds.items()},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
