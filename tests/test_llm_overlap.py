"""Decoding ahead of the host: what is in flight when something else happens is neither lost nor seen twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llms import make_tiny_llm

from engine_control.engine import Finished
from llm_runtime import LLM, GenerateRequest, LLMConfig, SamplingParams
from llm_runtime.engine.engine import LLMEngine

PROMPT = tuple(range(20, 41))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "qwen3")


def engine_of(folder: Path, overlap: str = "on", **fields: object) -> LLMEngine:
    config = {"max_total_tokens": 1024, "overlap_schedule": overlap, **fields}
    return LLM(config=LLMConfig(str(folder), **config)).engine  # type: ignore[arg-type]


def request(seed: int = 0, prompt: tuple[int, ...] = PROMPT, **fields: object) -> GenerateRequest:
    asked = {"max_new_tokens": 12, "temperature": 0.9, "ignore_eos": True, **fields}
    others = {name: asked.pop(name) for name in ("top_logprobs_num", "token_ids_logprob") if name in asked}
    sampling = SamplingParams(**asked)  # type: ignore[arg-type]
    return GenerateRequest(input_ids=prompt, sampling=sampling, seed=seed, return_logprob=True, **others)  # type: ignore[arg-type]


def results(engine: LLMEngine) -> dict[str, list[int]]:
    """What is finished from now on, each once."""
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for item in engine.step():
            assert isinstance(item, Finished)
            assert item.request_id not in found
            assert item.result is not None, item.error
            found[item.request_id] = item.result.output_ids
    engine.check_integrity()
    return found


def in_flight(engine: LLMEngine) -> int:
    return 0 if engine._run is None else engine._run.in_flight


def test_a_step_is_in_flight_while_its_forerunner_is_read_and_stops_are_seen_one_step_late(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add_request("free", request())
    free = results(engine)["free"]
    stop = free[5]
    engine.add_request("a", request(stop_token_ids=(stop,)))
    engine.add_request("b", request(seed=1))
    seen = set()
    for _ in range(4):
        engine.step()
        seen.add(in_flight(engine))
    assert seen == {0, 1}
    found = results(engine)
    assert found["a"] == free[: free.index(stop) + 1]
    assert len(found["b"]) == 12
    assert engine.stats()["tokens_in_use"] == 0


def test_the_rows_of_a_run_begin_with_the_longest_context(folder: Path) -> None:
    engine = engine_of(folder)
    for name, length in (("short", 3), ("long", 21), ("middle", 9)):
        engine.add_request(name, request(prompt=PROMPT[:length]))
    while in_flight(engine) == 0:
        engine.step()
    assert engine._run is not None
    assert [sequence.num_prompt for sequence in engine._run._sequences] == [21, 9, 3]
    found = results(engine)
    for name, length in (("short", 3), ("long", 21), ("middle", 9)):
        engine.add_request(name, request(prompt=PROMPT[:length]))
        assert results(engine)[name] == found[name]


def test_what_lands_because_of_a_command_is_handed_out_once(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add_request("a", request(max_new_tokens=4))
    engine.add_request("b", request(seed=1))
    for _ in range(3):
        assert not engine.step()
    assert in_flight(engine) == 1
    assert engine.abort_request("b")  # waits for the step in flight, which finishes a
    assert in_flight(engine) == 0
    assert engine.running_requests() == engine.request_ids() == ["a"]
    partial = engine.partial_result("a")
    assert partial is not None
    assert len(partial.output_ids) == 4
    assert engine.has_unfinished_requests()
    assert results(engine) == {"a": partial.output_ids}
    assert not engine.abort_request("a")


def test_an_abort_takes_back_what_has_landed(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add_request("a", request(max_new_tokens=4))
    for _ in range(3):
        engine.step()
    assert engine.partial_result("a") is not None  # it lands
    assert engine.abort_request("a")
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.check_integrity()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.8},
        {"top_k": 3},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 5},
        {"top_logprobs_num": 2},
        {"token_ids_logprob": (3, 4)},
    ],
    ids=str,
)
def test_what_needs_earlier_tokens_or_whole_rows_is_not_run_ahead(folder: Path, fields: dict[str, object]) -> None:
    found = {}
    for overlap in ("on", "off"):
        engine = engine_of(folder, overlap)
        engine.add_request("plain", request(max_new_tokens=20))
        engine.add_request("other", request(seed=1, **fields))
        engine.step()
        engine.step()
        assert in_flight(engine) == 0
        found[overlap] = results(engine)
    assert found["on"] == found["off"]


def test_who_arrives_begins_after_the_step_in_flight(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add_request("a", request(max_new_tokens=30))
    for _ in range(5):
        engine.step()
    engine.add_request("b", request(seed=1))
    engine.step()
    assert in_flight(engine) == 0
    engine.step()
    assert engine.running_requests() == ["a", "b"]
    alone = engine_of(folder, "off")
    alone.add_request("b", request(seed=1))
    assert results(engine)["b"] == results(alone)["b"]


def test_rows_that_are_left_go_on_when_others_are_finished_and_when_pages_run_out(folder: Path) -> None:
    lengths = [3, 40, 17, 5, 29, 33]
    found = {}
    for overlap, room in (("on", 1024), ("on", 144), ("off", 1024)):
        engine = engine_of(folder, overlap, max_total_tokens=room, page_size=4, disable_radix_cache=True)
        for i, length in enumerate(lengths):
            engine.add_request(str(i), request(seed=i, max_new_tokens=length))
        found[overlap, room] = results(engine)
        assert (engine.stats()["requests_retracted"] > 0) == (room == 144)
    assert found["on", 1024] == found["on", 144] == found["off", 1024]


def test_a_failed_step_leaves_nothing_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(config=LLMConfig(str(folder), max_total_tokens=1024, overlap_schedule="on"))
    engine = llm.engine
    engine.add_request("a", request())
    for _ in range(3):
        engine.step()
    steps = engine.runner.steps
    monkeypatch.setattr(steps, "compute", lambda run: 1 / 0)
    answer = llm._loop.submit("b", request(seed=1))
    llm._loop.run_until_idle()
    monkeypatch.undo()
    assert answer.exception() is not None
    assert not engine.has_unfinished_requests()
    engine.check_integrity()
    engine.add_request("c", request(seed=1))
    assert len(results(engine)["c"]) == 12


def test_a_sequence_may_end_where_its_page_table_does(tmp_path: Path) -> None:
    folder = make_tiny_llm(tmp_path / "long", layers=1, context_length=2048)
    found = {}
    for overlap in ("on", "off"):
        engine = engine_of(folder, overlap, max_total_tokens=2048)
        engine.add_request("a", request(prompt=(7,) * 1020, max_new_tokens=5))  # 1025, the last of them not computed
        engine.add_request("b", request(seed=1))
        found[overlap] = results(engine)
    assert found["on"] == found["off"]


def test_a_run_reads_the_pages_that_its_sequences_hold_though_others_hold_the_same_tokens(folder: Path) -> None:
    found = {}
    for overlap in ("on", "off"):
        engine = engine_of(folder, overlap, page_size=4)
        for name in "abc":
            engine.add_request(name, request(max_new_tokens=30))
        found[overlap] = results(engine)
    assert found["on"] == found["off"]
    assert found["on"]["a"] == found["on"]["b"] == found["on"]["c"]


def test_tokens_are_counted_alike(folder: Path) -> None:
    counts = []
    for overlap in ("on", "off"):
        engine = engine_of(folder, overlap)
        engine.add_request("a", request(prompt=PROMPT[:17]))
        engine.step()
        engine.add_request("b", request(prompt=PROMPT[:17], seed=1))  # a page is there: it begins with its last token
        results(engine)
        counts.append({name: n for name, n in engine.stats().items() if name.startswith("tokens_")})
    assert counts[0] == counts[1]


def test_a_prompt_that_stands_half_computed_for_lack_of_pages_goes_on_as_soon_as_there_are_some(folder: Path) -> None:
    engine = engine_of(folder, max_prefill_tokens=16)
    engine.add_request("a", request(prompt=PROMPT[:1]))
    for _ in range(3):
        engine.step()
    engine.add_request("prompt", request(prompt=PROMPT * 2))
    prompt = engine.scheduler.find("prompt")
    assert prompt is not None
    while prompt.computed < 16:
        engine.step()
    others = engine._pool.allocate(engine._pool.free)
    for _ in range(2):
        engine.step()
    assert prompt.computed == 16
    engine._pool.let_go(others)
    engine.step()
    assert prompt.computed == 32
    assert len(results(engine)) == 2


def test_what_is_finished_is_no_reason_to_keep_the_cache(folder: Path) -> None:
    llm = LLM(config=LLMConfig(str(folder), max_total_tokens=1024, overlap_schedule="on"))
    llm.engine.add_request("a", request(max_new_tokens=4))
    for _ in range(3):
        llm.engine.step()
    llm.pause_generation(mode="retract")  # the step in flight finishes it
    assert llm.flush_cache()["success"]
    assert list(results(llm.engine)) == ["a"]
