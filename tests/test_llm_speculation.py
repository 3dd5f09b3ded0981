"""Speculative decoding: a draft model changes the time, and no token or log-prob."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llms import make_tiny_llm

from engine_control.config import ControlConfig
from engine_control.errors import InvalidRequestError, NotExactError
from llm_runtime import LLM, LLMConfig
from llm_runtime.engine import model_runner

PROMPTS = [[5, 9, 31, 7], list(range(20, 63)), [3], [*range(20, 63), 4, 4]]
PARAMS = [
    {"temperature": 0.0, "max_new_tokens": 23, "ignore_eos": True},
    {"temperature": 0.8, "max_new_tokens": 30, "sampling_seed": 3, "top_p": 0.9, "frequency_penalty": 0.4},
    {"temperature": 1.0, "max_new_tokens": 17, "sampling_seed": 9, "min_new_tokens": 5, "logit_bias": {"258": 3.0}},
    {"temperature": 0.5, "max_new_tokens": 19, "sampling_seed": 1, "ignore_eos": True, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, a draft that knows nothing, and one that knows it all."""
    base = tmp_path_factory.mktemp("llm")
    target = make_tiny_llm(base / "target", layers=2)
    return {"target": target, "poor": make_tiny_llm(base / "draft", layers=1, seed=5), "perfect": target}


def _config(folder: Path, **fields: object) -> LLMConfig:
    control = ControlConfig(enable_memory_saver=True)
    return LLMConfig(str(folder), device="cpu", control=control, **{"max_total_tokens": 1024, **fields})  # type: ignore[arg-type]


def _found(llm: LLM) -> list[tuple[object, ...]]:
    outputs = [g.output for g in llm.generate(PROMPTS, PARAMS, return_logprob=True, top_logprobs_num=2)]
    llm.engine.check_integrity()
    return [(o.output_ids, o.output_token_logprobs, o.output_top_logprobs, o.finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> list[tuple[object, ...]]:
    return _found(LLM(config=_config(folders["target"])))


@pytest.mark.parametrize("draft", ["poor", "perfect"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"speculative_num_steps": 1}, {"max_total_tokens": 128, "page_size": 4, "max_prefill_tokens": 9}],
    ids=str,
)
def test_every_bit_is_as_without_a_draft(
    folders: dict[str, Path], wanted: list[tuple[object, ...]], draft: str, fields: dict[str, object]
) -> None:
    llm = LLM(config=_config(folders["target"], speculative_draft_model_path=str(folders[draft]), **fields))
    assert _found(llm) == wanted
    assert _found(llm) == wanted  # from the prefix cache
    stats = llm.engine.stats()
    share = stats["guesses_accepted"] / stats["guesses"]
    assert share > 0.9 if draft == "perfect" else share < 0.5
    if draft == "perfect" and not fields:
        assert stats["steps"] < 30


def test_rows_of_one_sequence_may_lie_in_two_pieces_of_logits(
    folders: dict[str, Path], wanted: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "LOGIT_ROWS", 3)  # as 640 rows in pieces of 512
    llm = LLM(config=_config(folders["target"], speculative_draft_model_path=str(folders["perfect"])))
    assert _found(llm) == wanted
    stats = llm.engine.stats()
    assert stats["guesses_accepted"] > 0.9 * stats["guesses"]


def test_a_refit_is_of_the_target_the_draft_or_one_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    other = make_tiny_llm(tmp_path / "other", layers=2, seed=7)
    llm = LLM(config=_config(folders["target"], speculative_draft_model_path=str(folders["perfect"])))
    sums = llm.get_weights_checksum()
    assert sums["model"] == sums["draft"]
    llm.update_weights_from_disk(str(other), selector="target")
    assert _found(llm) == _found(LLM(config=_config(other)))
    after = llm.get_weights_checksum()
    assert after["draft"] == sums["draft"] != after["model"]
    llm.update_weights_from_disk(str(other), selector="draft")
    before = llm.engine.stats()
    _found(llm)
    stats = llm.engine.stats()
    assert stats["guesses_accepted"] - before["guesses_accepted"] > 0.9 * (stats["guesses"] - before["guesses"])
    llm.release_memory_occupation()
    llm.resume_memory_occupation()
    assert llm.get_weights_checksum()["draft"] == after["model"]
    llm.update_weights_from_disk(str(folders["target"]))
    assert llm.get_weights_checksum() == {"model": sums["model"], "draft": after["model"]}


def test_a_draft_that_can_not_judge_or_speak_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    config = _config(folders["target"], speculative_draft_model_path=str(folders["poor"]))
    with pytest.raises(NotExactError, match="exact mode"):
        LLM(config=replace(config, deterministic="off"))
    other = make_tiny_llm(tmp_path / "words", layers=1, vocab_size=384)
    with pytest.raises(InvalidRequestError, match="384 tokens"):
        LLM(config=replace(config, speculative_draft_model_path=str(other)))
    short = make_tiny_llm(tmp_path / "short", layers=1, context_length=128)
    shorter = replace(config, speculative_draft_model_path=str(short))
    with pytest.raises(InvalidRequestError, match="128 tokens long, and the model's 512"):
        LLM(config=shorter)
    assert LLM(config=replace(shorter, context_length=128)).generate([PROMPTS[0]], PARAMS[0])
    with pytest.raises(InvalidRequestError, match="no 'draft' model"):
        LLM(config=_config(folders["target"])).begin_weight_update("draft")
