"""The LLM engine: the same tokens and log-probs whatever happens around a sequence."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llms import make_tiny_llm

from engine_control.errors import EngineFaultError, InvalidRequestError
from llm_runtime import LLM, GenerateRequest, LLMConfig, SamplingParams, WeightVersionSpan
from llm_runtime.output import GenerateOutput

PROMPTS = [
    [5, 9, 31, 7],
    list(range(20, 63)),
    [5, 9, 31, 7, 8, 44],
    [3],
    [*range(20, 63), 11, 12],
    list(range(20, 63)),
]
SAMPLED = [{"temperature": 0.9, "max_new_tokens": 21, "sampling_seed": 7 + i, "ignore_eos": True} for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "qwen3")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[GenerateOutput]:
    """Each prompt by itself, nothing cached, step by step; all other tests decode ahead of the host."""
    llm = LLM(config=_config(folder, disable_radix_cache=True, overlap_schedule="off"))
    return [_run(llm, [i])[0] for i in range(len(PROMPTS))]


def _config(folder: Path, **fields: object) -> LLMConfig:
    return LLMConfig(
        **{"model_path": str(folder), "max_total_tokens": 2048, "random_seed": 0, "overlap_schedule": "on", **fields}
    )  # type: ignore[arg-type]


def _run(llm: LLM, which: list[int]) -> list[GenerateOutput]:
    found = llm.generate([PROMPTS[i] for i in which], [SAMPLED[i] for i in which], return_logprob=True)
    return [generated.output for generated in found]


def _same(found: GenerateOutput, wanted: GenerateOutput) -> None:
    assert found.output_ids == wanted.output_ids
    assert found.output_token_logprobs == wanted.output_token_logprobs
    assert found.finish_reason == wanted.finish_reason


def _request(index: int, **fields: object) -> GenerateRequest:
    params = SamplingParams(**SAMPLED[index])  # type: ignore[arg-type]
    request = GenerateRequest(input_ids=tuple(PROMPTS[index]), sampling=params, seed=7 + index, return_logprob=True)
    return replace(request, **fields)  # type: ignore[arg-type]


class TestTheSameBits:
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"disable_radix_cache": True},
            {"max_prefill_tokens": 5},
            {"max_running_requests": 2},
            {"context_length": 70},  # less than the certification's longest sequence
            {"page_size": 4},
            {"max_total_tokens": 112},  # less than the six need together
            {"max_total_tokens": 112, "page_size": 4, "max_prefill_tokens": 7},
        ],
        ids=str,
    )
    def test_in_any_batch_chunk_page_and_under_memory_pressure(
        self, folder: Path, alone: list[GenerateOutput], fields: dict[str, object]
    ) -> None:
        llm = LLM(config=_config(folder, **fields))
        assert llm.engine.exactness.enabled, llm.engine.exactness.describe()
        for found, wanted in zip(_run(llm, list(range(6))), alone, strict=True):
            _same(found, wanted)
        again = _run(llm, [4, 1, 0, 5])
        for found, index in zip(again, [4, 1, 0, 5], strict=True):
            _same(found, alone[index])
        if not fields.get("disable_radix_cache"):
            assert again[0].cached_tokens >= 32
        if fields.get("max_total_tokens"):
            assert llm.engine.stats()["requests_retracted"] > 0
        llm.engine.check_integrity()

    def test_a_group_computes_its_prompt_once(self, folder: Path, alone: list[GenerateOutput]) -> None:
        llm = LLM(config=_config(folder))
        found = llm.generate(PROMPTS[1], {**SAMPLED[1], "n": 4}, return_logprob=True)
        _same(found[0].output, alone[1])
        assert len({tuple(f.output_ids) for f in found}) == 4
        assert [f.output.cached_tokens for f in found] == [0, 32, 32, 32]
        assert llm.engine.stats()["tokens_prefilled"] == 43 + 3 * 11

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    def test_through_a_pause_at_every_token(self, folder: Path, alone: list[GenerateOutput], mode: str) -> None:
        llm = LLM(config=_config(folder))
        answers = [llm._loop.submit(str(i), _request(i)) for i in range(6)]

        def pause() -> None:
            llm._loop.call("pause_generation", {"mode": mode})
            llm._loop.call("continue_generation")

        llm._loop.run_until_idle(pause)
        for answer, wanted in zip(answers, alone, strict=True):
            _same(answer.result(), wanted)
            assert (answer.result().num_retractions > 0) == (mode == "retract")
        llm.engine.check_integrity()

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    def test_after_a_sleep_in_the_middle(self, folder: Path, alone: list[GenerateOutput], mode: str) -> None:
        config = _config(folder)
        llm = LLM(config=replace(config, control=replace(config.control, enable_memory_saver=True)))
        answers = [llm._loop.submit(str(i), _request(i)) for i in range(6)]
        steps = iter(range(1000))

        def sleep() -> None:
            if next(steps) == 9:
                llm._loop.call("pause_generation", {"mode": mode})
                llm._loop.call("release_memory_occupation")
                llm._loop.call("resume_memory_occupation")
                llm._loop.call("continue_generation")

        llm._loop.run_until_idle(sleep)
        for answer, wanted in zip(answers, alone, strict=True):
            _same(answer.result(), wanted)
        llm.engine.check_integrity()

    def test_a_scored_sequence_has_the_log_probs_that_it_was_drawn_with(
        self, folder: Path, alone: list[GenerateOutput]
    ) -> None:
        llm = LLM(config=_config(folder, max_prefill_tokens=9))
        for index, wanted in enumerate(alone):
            whole = [*PROMPTS[index], *wanted.output_ids]
            scored = llm.generate(
                [whole],
                {"max_new_tokens": 0, "temperature": 0.9},
                return_logprob=True,
                logprob_start_len=len(PROMPTS[index]),
            )[0].output
            assert scored.input_token_logprobs == wanted.output_token_logprobs
            assert scored.output_ids == []


class TestScores:
    def test_of_the_prompt_begin_where_asked_and_the_first_has_none(self, folder: Path) -> None:
        llm = LLM(config=_config(folder))
        every = llm.generate([PROMPTS[0]], {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)[0].output
        assert every.input_token_logprobs is not None
        assert [token for _, token in every.input_token_logprobs] == PROMPTS[0]
        assert every.input_token_logprobs[0][0] is None
        later = llm.generate([PROMPTS[0]], {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=2)[0].output
        assert later.input_token_logprobs == every.input_token_logprobs[2:]
        assert every.finish_reason is not None
        assert (every.finish_reason.type, every.finish_reason.length) == ("length", 0)

    def test_tops_and_named_tokens_are_of_the_same_distribution(self, folder: Path) -> None:
        llm = LLM(config=_config(folder))
        output = llm.generate(
            [PROMPTS[0]],
            {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=4,
            token_ids_logprob=[2, 5],
        )[0].output
        assert output.output_top_logprobs is not None
        assert output.output_token_logprobs is not None
        for chosen, tops in zip(output.output_token_logprobs, output.output_top_logprobs, strict=True):
            assert tops[0] == chosen  # greedy
            assert len(tops) == 4
            assert sorted(tops, key=lambda pair: -(pair[0] or 0.0)) == tops
        assert output.input_top_logprobs is not None
        assert output.input_top_logprobs[0] is None
        assert len(output.input_top_logprobs) == len(PROMPTS[0])
        assert output.output_token_ids_logprobs is not None
        assert [[token for _, token in position] for position in output.output_token_ids_logprobs] == [[2, 5]] * 3

    @pytest.mark.parametrize("length", [0, 2])
    def test_of_weights_that_are_no_numbers_there_are_none(self, folder: Path, length: int) -> None:
        llm = LLM(config=_config(folder, deterministic="off"))
        next(p for name, p in llm.engine.model.named_parameters() if name.endswith("norm.weight")).data.fill_(torch.nan)
        with pytest.raises(EngineFaultError, match="not finite"):
            llm.generate([PROMPTS[0]], {"max_new_tokens": length}, return_logprob=True, logprob_start_len=0)
        llm.engine.check_integrity()

    def test_greedy_tokens_and_log_probs_are_those_of_transformers(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        llm = LLM(config=_config(folder))
        found = llm.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}, return_logprob=True)
        for prompt, generated in zip(PROMPTS, found, strict=True):
            tokens = torch.tensor([[*prompt, *generated.output_ids]])
            with torch.no_grad():
                log_probs = theirs(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            assert log_probs.argmax(-1).tolist() == generated.output_ids
            ours = torch.tensor([value for value, _ in generated.output.output_token_logprobs or []])
            torch.testing.assert_close(ours, log_probs.max(-1).values, rtol=1e-4, atol=1e-4)


class TestWeights:
    def test_a_refit_in_the_middle_of_a_request_is_told_in_spans(self, folder: Path, tmp_path: Path) -> None:
        other = make_tiny_llm(tmp_path / "other", seed=1)
        llm = LLM(config=_config(folder, weight_version="v1"))
        answer = llm._loop.submit("0", _request(1))
        steps, updates = iter(range(1000)), []

        def refit() -> None:
            if next(steps) == 7:
                llm._loop.call("pause_generation", {"mode": "in_place"})
                update = {"transport": "disk", "info": {"model_path": str(other)}, "weight_version": "v2"}
                updates.append(llm._loop.call("update_weights", {**update, "flush_cache": False}))
                llm._loop.call("continue_generation")

        llm._loop.run_until_idle(refit)
        assert updates[0].result()["success"]
        output = answer.result()
        assert output.weight_versions == [
            WeightVersionSpan("v1", 0, 9),
            WeightVersionSpan("v2", 9, 21),
        ]  # one was in flight
        assert output.weight_version == "v2"
        fresh = LLM(config=_config(other))
        for found, wanted in zip(_run(llm, [1, 4]), _run(fresh, [1, 4]), strict=True):
            _same(found, wanted)
        assert _run(llm, [5])[0].cached_tokens == 32

    def test_after_a_refit_nothing_of_the_old_weights_is_used(self, folder: Path, tmp_path: Path) -> None:
        other = make_tiny_llm(tmp_path / "other", seed=1)
        llm, fresh = LLM(config=_config(folder)), LLM(config=_config(other))
        _run(llm, [1, 4])
        llm.update_weights_from_disk(str(other))
        found, wanted = _run(llm, [1])[0], _run(fresh, [1])[0]
        _same(found, wanted)
        assert found.cached_tokens == 0
        llm.engine.check_integrity()

    def test_a_disk_update_does_what_its_fields_say(self, folder: Path, tmp_path: Path) -> None:
        other = make_tiny_llm(tmp_path / "other", seed=1)
        llm = LLM(config=_config(folder))
        answer = llm._loop.submit("0", _request(1))
        steps, updates = iter(range(1000)), []
        fields = {"is_async": True, "keep_pause": True, "token_step": 41, "recapture_cuda_graph": True}

        def refit() -> None:
            if next(steps) == 4:
                info = {"model_path": str(other)}
                update = {
                    "transport": "disk",
                    "info": info,
                    "weight_version": "v2",
                    "torch_empty_cache": True,
                    **fields,
                }
                updates.append(llm._loop.call("update_weights", update))

        llm._loop.run_until_idle(refit)
        assert updates[0].result()["num_paused_requests"] == 0
        assert not answer.done()  # it came between two steps, and generation stayed paused
        assert llm.control_state()["paused"] == "in_place"
        assert llm.control_command("weight_info")["history"][-1]["token_step"] == 41
        again = llm.update_weights_from_disk(str(folder), weight_version="v3")
        assert again["num_paused_requests"] == 1
        llm.continue_generation()
        assert [span.version for span in answer.result().weight_versions] == ["default", "v3"]


class TestStopping:
    def test_at_an_end_token_a_stop_token_and_a_stop_string(self, folder: Path) -> None:
        llm = LLM(config=_config(folder))
        plain = llm.generate([PROMPTS[0]], {**SAMPLED[0]})[0]
        third = plain.output_ids[2]
        stopped = llm.generate([PROMPTS[0]], {**SAMPLED[0], "stop_token_ids": [third]})[0].output
        assert stopped.output_ids == plain.output_ids[: plain.output_ids.index(third) + 1]
        assert stopped.finish_reason is not None
        assert (stopped.finish_reason.type, stopped.finish_reason.matched) == ("stop", third)
        assert plain.text is not None
        string = plain.text[4:6]
        by_text = llm.generate([PROMPTS[0]], {**SAMPLED[0], "stop": string})[0]
        assert by_text.text == plain.text[: plain.text.index(string)]
        assert by_text.output.finish_reason is not None
        assert by_text.output.finish_reason.matched == string

    def test_not_before_the_minimal_length(self, folder: Path) -> None:
        llm = LLM(config=_config(folder))
        plain = llm.generate([PROMPTS[0]], SAMPLED[0])[0]
        later = llm.generate(
            [PROMPTS[0]], {**SAMPLED[0], "stop_token_ids": list(set(plain.output_ids)), "min_new_tokens": 6}
        )[0]
        assert len(later.output_ids) > 6
        assert not set(later.output_ids[:6]) & set(plain.output_ids)


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompt", "params", "field"),
        [
            ([], {}, "input_ids"),
            ([1, 99_999], {}, "input_ids"),
            ([-1], {}, "input_ids"),
            ([1] * 3000, {}, "input_ids"),
            ([1] * 10, {"max_new_tokens": 100_000}, "input_ids"),
            ([1], {"temperature": -0.1}, "sampling_params.temperature"),
            ([1], {"top_p": 0}, "sampling_params.top_p"),
            ([1], {"top_k": 0}, "sampling_params.top_k"),
            ([1], {"nosuch": 1}, "sampling_params.nosuch"),
            ([1], {"stop_token_ids": [99_999]}, "stop_token_ids"),
            ([1], {"logit_bias": {"99999": 1}}, "logit_bias"),
            ([1], {"min_new_tokens": 9, "max_new_tokens": 2}, "min_new_tokens"),
        ],
    )
    def test_is_refused_by_name_and_changes_nothing(
        self, folder: Path, prompt: list[int], params: dict[str, object], field: str
    ) -> None:
        llm = _shared(folder)
        with pytest.raises(InvalidRequestError) as refused:
            llm.generate([prompt], params)
        assert refused.value.field == field
        assert llm.engine.stats()["requests_waiting"] == 0

    @pytest.mark.parametrize("field", ["max_running_requests", "max_prefill_tokens", "page_size", "max_total_tokens"])
    def test_an_engine_with_room_for_nothing_is_refused(self, field: str) -> None:
        with pytest.raises(InvalidRequestError) as refused:
            LLMConfig(**{field: 0})  # type: ignore[arg-type]
        assert refused.value.field == field


_LLMS: dict[Path, LLM] = {}


def _shared(folder: Path) -> LLM:
    if folder not in _LLMS:
        _LLMS[folder] = LLM(config=_config(folder))
    return _LLMS[folder]


def test_ten_thousand_random_operations_leave_no_page_behind(folder: Path) -> None:
    llm = LLM(config=_config(folder, max_total_tokens=160, page_size=4, max_prefill_tokens=13, max_running_requests=5))
    engine, loop, dice = llm.engine, llm._loop, random.Random(0)
    answers, count = {}, 0

    def operate() -> None:
        nonlocal count
        for _ in range(8):
            count += 1
            match dice.choice(["submit", "submit", "submit", "abort", "retract", "in_place", "flush", "abort_all"]):
                case "submit" if len(answers) < 40:
                    prompt = tuple(range(dice.randrange(3), dice.randrange(4, 40)))
                    params = SamplingParams(max_new_tokens=dice.randrange(0, 12), ignore_eos=dice.random() < 0.5)
                    request = GenerateRequest(input_ids=prompt, sampling=params, seed=count)
                    answers[str(count)] = loop.submit(str(count), request)
                case "abort" if answers:
                    loop.abort(dice.choice(list(answers)))
                case "retract" | "in_place" as mode:
                    loop.call("pause_generation", {"mode": mode})
                    loop.call("continue_generation")
                case "flush" if dice.random() < 0.2:
                    engine.prefixes.reset()
                case "abort_all" if dice.random() < 0.05:
                    loop.call("abort_requests", {"abort_all": True})
        for request_id in [request_id for request_id, answer in answers.items() if answer.done()]:
            del answers[request_id]
        if count % 20 == 0:
            engine.check_integrity()

    while count < 10_000:
        operate()
        loop.run_until_idle(operate if count < 10_000 else None)
    loop.run_until_idle()
    engine.check_integrity()
    engine.prefixes.reset()
    assert engine._pool.free == engine._pool.usable
