"""Tensor parallel: real rank processes over gloo share every layer of a tiny model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llms import make_tiny_llm

from engine_control.config import ControlConfig
from engine_control.errors import EngineDiedError, InvalidRequestError
from llm_runtime import LLM, LLMConfig

PROMPTS = [[5, 9, 31, 7], list(range(20, 63)), [3], list(range(20, 60))]
SAMPLED = {"temperature": 0.9, "max_new_tokens": 9, "ignore_eos": True, "sampling_seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "qwen3")


def _config(folder: Path, tp_size: int) -> LLMConfig:
    control = ControlConfig(enable_memory_saver=True)
    return LLMConfig(str(folder), device="cpu", tp_size=tp_size, max_total_tokens=1024, control=control)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(config=_config(folder, 2)) as llm:
        yield llm


@pytest.fixture(scope="module")
def single(folder: Path) -> LLM:
    return LLM(config=_config(folder, 1))


def _found(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    outputs = [g.output for g in llm.generate(prompts, SAMPLED, return_logprob=True)]
    return [(o.output_ids, [value for value, _ in o.output_token_logprobs or []]) for o in outputs]


def test_two_ranks_say_what_one_says_and_no_bit_depends_on_the_batch(shared: LLM, single: LLM) -> None:
    assert shared.engine.exactness.enabled
    together = _found(shared, PROMPTS)
    for (tokens, log_probs), (wanted, reference) in zip(together, _found(single, PROMPTS), strict=True):
        assert tokens == wanted
        torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(reference), rtol=1e-4, atol=1e-4)
    assert [_found(shared, [prompt])[0] for prompt in reversed(PROMPTS)] == together[::-1]


def test_a_refit_and_a_sleep_reach_every_rank(shared: LLM, single: LLM, folder: Path, tmp_path: Path) -> None:
    before = _found(shared, PROMPTS)
    checksums = shared.get_weights_checksum()
    assert checksums == single.get_weights_checksum()
    other = make_tiny_llm(tmp_path / "other", seed=1)
    shared.update_weights_from_disk(str(other), weight_version="2")
    assert shared.get_weights_checksum() != checksums
    shared.release_memory_occupation()
    shared.resume_memory_occupation()
    with LLM(config=_config(other, 2)) as fresh:
        assert _found(shared, PROMPTS) == _found(fresh, PROMPTS) != before
    shared.update_weights_from_disk(str(folder), weight_version="3")
    assert _found(shared, PROMPTS) == before


def test_a_rank_that_dies_is_named(folder: Path) -> None:
    llm = LLM(config=_config(folder, 2))
    os.kill(llm.engine.ranks._followers.process_ids[0], signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(EngineDiedError, match="rank 1"):
        llm.generate(PROMPTS, {"max_new_tokens": 400, "ignore_eos": True})
    llm.close()


def test_what_does_not_divide_is_refused_with_its_numbers(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="3"):
        LLM(config=replace(_config(folder, 1), tp_size=3))
