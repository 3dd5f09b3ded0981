"""The engine's half, over HTTP: groups of answers for training, answers for evaluation, and the service itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from llm_runtime.arithmetic import check, held_out_prompts, reward, training_prompts
from llm_runtime.client import LLMClient
from llm_runtime.output import Generated

from .settings import Places, Settings

SEED_STRIDE = 2**12  # more than a group has answers: seeds of two groups don't meet
EVALUATION_SEED = 1000


class MismatchError(AssertionError):
    """Trainer and engine don't have the same weights, though they should."""


@dataclass(frozen=True)
class Answer:
    """One answer as the trainer needs it: tokens of question and answer, and the engine's log-prob of each of the
    answer's, under the temperature that it was drawn at."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reward: float


def questions_of(settings: Settings, iteration: int) -> list[str]:
    """The iteration's questions: a function of seed and iteration, so the same in a resumed run."""
    if not settings.pool:
        return training_prompts(settings.prompts, seed=settings.seed << 32 | iteration)
    pool = training_prompts(settings.pool, seed=settings.seed << 32)
    first = (iteration - 1) * settings.prompts
    return [pool[index % settings.pool] for index in range(first, first + settings.prompts)]


def group_seed(settings: Settings, iteration: int, index: int) -> int:
    """The seed of a group's first answer; the others count on from it."""
    digest = hashlib.sha256(f"{settings.seed}/{iteration}/{index}".encode()).digest()
    return int.from_bytes(digest[:6], "big") * SEED_STRIDE


def generate_groups(
    client: LLMClient, tokenizer: PreTrainedTokenizerBase, settings: Settings, iteration: int
) -> list[list[Answer]]:
    """The iteration's groups, in the order of its questions; one request, which the engine batches as it likes.

    Raises:
        MismatchError: a token was computed by other weights than those of the last refit.
    """
    questions = questions_of(settings, iteration)
    rows = [list(tokenizer(question).input_ids) for question in questions]
    common = {"temperature": settings.temperature, "max_new_tokens": settings.max_new_tokens, "n": settings.group}
    sampling = [{**common, "sampling_seed": group_seed(settings, iteration, i)} for i in range(len(rows))]
    samples = client.generate(rows, sampling, return_logprob=True)
    require_version(samples, str(iteration - 1))
    groups = [samples[at : at + settings.group] for at in range(0, len(samples), settings.group)]
    return [
        [_answer(question, row, sample) for sample in group]
        for question, row, group in zip(questions, rows, groups, strict=True)
    ]


def require_version(samples: Sequence[Generated], version: str) -> None:
    """Every token of every sample was computed with the weights that the trainer has.

    Raises:
        MismatchError: one wasn't.
    """
    for sample in samples:
        spans = sample.output.weight_versions
        found = [(span.version, span.start, span.end) for span in spans]
        if found != [(version, 0, len(sample.output_ids))]:
            raise MismatchError(
                f"the {len(sample.output_ids)} tokens of {sample.output.request_id!r} were computed with weights "
                f"{found}, the trainer has {version!r}"
            )


def evaluate(
    client: LLMClient, tokenizer: PreTrainedTokenizerBase, settings: Settings, *, temperature: float
) -> dict[str, float]:
    """Over held-out questions, one answer each: `correct`, the share with the right number, `steps`, whose steps are
    right too, and `reward`. The same questions and seeds at every call."""
    questions = held_out_prompts(settings.held_out)
    rows = [list(tokenizer(question).input_ids) for question in questions]
    common = {"temperature": temperature, "max_new_tokens": settings.max_new_tokens}
    sampling = [{**common, "sampling_seed": EVALUATION_SEED + index} for index in range(len(rows))]
    samples = client.generate(rows, sampling)
    texts = [_whole_text(sample) for sample in samples]
    found = [check(question, text) for question, text in zip(questions, texts, strict=True)]
    rewards = [reward(question, text) for question, text in zip(questions, texts, strict=True)]
    return {
        "questions": len(found),
        "correct": sum(result.correct for result in found) / len(found),
        "steps": sum(result.steps for result in found) / len(found),
        "reward": sum(rewards) / len(found),
    }


@contextmanager
def service_of(places: Places) -> Iterator[str]:
    """The address of a service: the one that was named, or, while the block runs, one of our own."""
    if places.url is not None:
        yield places.url
        return
    from llm_runtime.cli.service_process import running_service

    log, arguments = places.folder / "service.log", ["--enable-memory-saver"]
    with running_service("embedded", port=0, log=log, arguments=arguments) as service:
        service.wait_ready()
        yield service.url


def _answer(question: str, row: list[int], sample: Generated) -> Answer:
    pairs: list[Any] = sample.output.output_token_logprobs or []
    return Answer(
        prompt_ids=tuple(row),
        output_ids=tuple(sample.output_ids),
        log_probs=tuple(log_prob for log_prob, _ in pairs),
        reward=reward(question, _whole_text(sample)),
    )


def _whole_text(sample: Generated) -> str:
    """What the sample says, and nothing if it was cut: an answer that doesn't end is none."""
    reason = sample.output.finish_reason
    return (sample.text or "") if reason is not None and reason.type == "stop" else ""
