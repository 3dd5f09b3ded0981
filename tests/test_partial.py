"""Aborted rollouts are answered with what there is of them, and go on later to the bits that they would have had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import Service
from countdown_engine import CountdownEngine
from equality import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import qwen_image_pipeline, rollout_pipeline, sd3_pipeline

from diffusion_rl.client import RolloutClient
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.params import params_from_mapping
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import FinishReason, RolloutSample, merge_resumed, version_spans, versions_of_steps
from diffusion_rl.server.encoding import json_value
from engine_control.errors import (
    EngineError,
    EngineFaultError,
    InvalidRequestError,
    NonFiniteOutputError,
    RequestAbortedError,
)
from engine_control.step_loop import StepLoop

STEPS = 6
FIELDS: dict[str, Any] = {
    "prompt": "a red ball",
    "negative_prompt": "blurry",
    "guidance_scale": 3.0,
    "seed": 7,
    "height": 64,
    "width": 64,
    "num_inference_steps": STEPS,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "rollout_return_partial": True,
}
ROWS = [(1.0, -0.1 - 0.01 * i, 0.05, 0.02 * i) for i in range(STEPS)]
KINDS: dict[str, dict[str, Any]] = {
    "sde": {"rollout_sde_type": "sde"},
    "cps": {"rollout_sde_type": "cps"},
    "ode": {"rollout_sde_type": "ode"},
    "affine": {"rollout_sde_type": "affine", "affine_coefficients": ROWS},
}
LONG_STEPS = 100
LONG = {**FIELDS, "num_inference_steps": LONG_STEPS, "output_type": "latent", "rollout_debug_mode": False}


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return RolloutPipeline(sd3_pipeline())


def post(
    pipeline: RolloutPipeline, at: int, command: tuple[str, dict[str, Any]], *, then: Any = None, **fields: Any
) -> Any:
    """The future of one request, with a command run before its step `at`."""
    loop, engine = pipeline._loop, pipeline.engine
    answer, before, posted = loop.submit("request", params_from_mapping(fields)), engine.stats()["steps"], []

    def between() -> None:
        if engine.stats()["steps"] == before + at and not posted:
            posted.append(loop.call(*command))

    if at == 0:
        posted.append(loop.call(*command))
    loop.run_until_idle(between)
    return answer


def aborted(pipeline: RolloutPipeline, at: int, **fields: Any) -> list[RolloutSample]:
    """The samples of a request that was aborted after `at` steps of the engine."""
    samples: list[RolloutSample] = post(pipeline, at, ("abort_requests", {"abort_all": True}), **fields).result()
    assert not pipeline.engine.request_ids()
    return samples


def resumption(samples: list[RolloutSample]) -> dict[str, Any]:
    """The fields of a request that goes on with the samples that are not finished."""
    rest = [sample for sample in samples if sample.finish_reason.type == "abort"]
    return {
        "num_outputs_per_prompt": len(rest),
        "seeds": [sample.seed for sample in rest],
        "resume_from": [sample.resume_state for sample in rest],
    }


def merged(samples: list[RolloutSample], resumed: list[RolloutSample]) -> list[RolloutSample]:
    by_seed = {sample.seed: sample for sample in resumed}
    return [merge_resumed(s, by_seed[s.seed]) if s.finish_reason.type == "abort" else s for s in samples]


def assert_same(samples: list[RolloutSample], expected: list[RolloutSample]) -> None:
    for sample, other in zip(samples, expected, strict=True):
        assert_same_bits(sample, other)
        assert sample.dit_trajectory is not None
        assert other.dit_trajectory is not None
        for name in ("latent_step_indices", "timesteps", "sigmas"):
            assert torch.equal(getattr(sample.dit_trajectory, name), getattr(other.dit_trajectory, name)), name
        for name in ("sample_index", "weight_versions", "finish_reason", "num_steps_done", "resume_state"):
            assert getattr(sample, name) == getattr(other, name), name
        assert sample.denoising_env is not None


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_request_resumed_has_the_bits_of_an_uninterrupted_one(
    pipeline: RolloutPipeline, kind: str, count: int
) -> None:
    fields = {**FIELDS, **KINDS[kind], "num_outputs_per_prompt": count}
    expected = pipeline(**fields)
    for at in (1, 4):
        partial = aborted(pipeline, at, **fields)
        for sample, whole in zip(partial, expected, strict=True):
            assert sample.finish_reason == FinishReason("abort", "the request was aborted")
            assert sample.num_steps_done == len(sample.weight_versions) == at
            assert sample.generated_output is None
            assert sample.generated_latents is None
            assert torch.equal(sample.rollout_log_probs[:at], whole.rollout_log_probs[:at])
            assert not sample.rollout_log_probs[at:].any()
            assert sample.dit_trajectory.latent_step_indices.tolist() == list(range(at + 1))
            assert torch.equal(sample.dit_trajectory.latents, whole.dit_trajectory.latents[: at + 1])
            assert not sample.rollout_debug_tensors.rollout_model_outputs[at:].any()
            assert (sample.resume_state.previous_x0 is not None) == (kind == "affine")
        resumed = pipeline(**{**fields, **resumption(partial)})
        for sample in resumed:
            assert sample.finish_reason.type == "stop"
            assert sample.num_steps_done == len(sample.weight_versions) == STEPS
            assert not sample.rollout_log_probs[:at].any()
            assert sample.dit_trajectory.latent_step_indices.tolist() == list(range(at, STEPS + 1))
        assert_same(merged(partial, resumed), expected)


def test_half_precision_latents_and_pictures_alone_are_resumed_too() -> None:
    pipeline = rollout_pipeline(qwen_image_pipeline(torch.bfloat16))
    plain = {"rollout_debug_mode": False, "true_cfg_scale": 3.0, "guidance_scale": None}
    for extra in ({"rollout": False}, {"rollout_latents_dtype": "bfloat16"}, {"rollout_sde_type": "ode"}):
        fields = {**FIELDS, **plain, **extra}
        (expected,) = pipeline(**fields)
        (partial,) = aborted(pipeline, 3, **fields)
        ode = "rollout_latents_dtype" not in extra
        assert partial.resume_state.latents.dtype == (torch.bfloat16 if ode else torch.float32)
        (resumed,) = pipeline(**{**fields, **resumption([partial])})
        assert_same_bits(merge_resumed(partial, resumed), expected)


def test_a_request_that_waits_is_answered_too_and_begins_anew_to_the_same_bits(pipeline: RolloutPipeline) -> None:
    fields = {**FIELDS, "num_outputs_per_prompt": 3}
    expected = pipeline(**fields)
    waiting = aborted(pipeline, 0, **fields)
    for sample in waiting:
        assert sample.finish_reason == FinishReason("abort", "the request was aborted while it waited")
        assert (sample.num_steps_done, sample.resume_state, sample.weight_versions) == (0, None, ())
        assert sample.rollout_log_probs.tolist() == [0.0] * STEPS
        assert sample.dit_trajectory.latents.shape == (0, 16, 16, 16)
        assert sample.timings.queue_s >= 0 == sample.timings.inference_time_s
    assert_same(merged(waiting, pipeline(**{**fields, **resumption(waiting)})), expected)


def test_of_a_group_only_what_is_unfinished_is_computed_again() -> None:
    """Of three samples in batches of two, the first two are finished first; the third may not have begun."""
    pipeline = RolloutPipeline(sd3_pipeline(), config=EngineConfig(max_batch_size=2))
    drawn = {"init_same_noise": True, "rollout_sde_window_size": 2, "rollout_share_prefix": False}
    fields = {**FIELDS, **drawn, "num_outputs_per_prompt": 3}
    expected = pipeline(**fields)
    for at, done in ((4, 0), (STEPS, 0), (STEPS + 2, 2)):
        partial = aborted(pipeline, at, **fields)
        assert [sample.num_steps_done for sample in partial] == [min(at, STEPS)] * 2 + [done]
        assert [sample.finish_reason.type for sample in partial].count("stop") == (2 if at >= STEPS else 0)
        before = pipeline.engine.stats()["evaluations"]
        resumed = pipeline(**{**fields, **resumption(partial)})
        missing = sum(STEPS - sample.num_steps_done for sample in partial)
        assert pipeline.engine.stats()["evaluations"] - before == missing
        assert_same(merged(partial, resumed), expected)


def test_a_sample_named_by_seeds_shares_with_its_group_what_the_requests_seed_decides(
    pipeline: RolloutPipeline,
) -> None:
    fields = {**FIELDS, "init_same_noise": True, "rollout_sde_window_size": 2}
    group = pipeline(**fields, num_outputs_per_prompt=3)
    (alone,) = pipeline(**fields, seeds=[9])
    assert_same_bits(alone, group[2])


def test_a_trunk_is_handed_out_as_its_members(pipeline: RolloutPipeline) -> None:
    shared = {"init_same_noise": True, "rollout_sde_step_indices": [4], "num_outputs_per_prompt": 3}
    fields = {**FIELDS, **shared}
    expected = pipeline(**fields)
    partial = aborted(pipeline, 3, **fields)
    assert [sample.num_evaluations for sample in partial] == [3] * 3
    pointers = {tensor.data_ptr() for s in partial for tensor in (s.resume_state.latents, s.rollout_log_probs)}
    assert len(pointers) == 6
    resumed = pipeline(**{**fields, **resumption(partial)})
    assert resumed[0].num_evaluations == 9
    assert_same(merged(partial, resumed), expected)


def test_a_resumption_can_be_aborted_again_while_it_runs_and_while_it_waits(pipeline: RolloutPipeline) -> None:
    fields = {**FIELDS, **KINDS["affine"], "num_outputs_per_prompt": 2}
    expected = pipeline(**fields)
    first = aborted(pipeline, 2, **fields)
    waited = merged(first, aborted(pipeline, 0, **{**fields, **resumption(first)}))
    assert [sample.num_steps_done for sample in waited] == [2, 2]
    second = merged(waited, aborted(pipeline, 3, **{**fields, **resumption(waited)}))
    assert [sample.num_steps_done for sample in second] == [5, 5]
    assert second[0].dit_trajectory.latent_step_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert_same(merged(second, pipeline(**{**fields, **resumption(second)})), expected)


def test_a_pause_that_aborts_hands_out_partial_results_and_each_step_keeps_its_weight_version(
    pipeline: RolloutPipeline,
) -> None:
    partial = post(pipeline, 2, ("pause_generation", {"mode": "abort"}), **FIELDS).result()
    pipeline.continue_generation()
    pipeline.control_command("update_weight_version", new_version="next")
    resumed = pipeline(**{**FIELDS, **resumption(partial)})
    pipeline.control_command("update_weight_version", new_version="default")
    assert resumed[0].weight_versions == ("default",) * 2 + ("next",) * 4
    assert merged(partial, resumed)[0].weight_versions == resumed[0].weight_versions


def test_a_retracted_resumption_begins_again_where_it_stood(pipeline: RolloutPipeline) -> None:
    expected = pipeline(**FIELDS)
    partial = aborted(pipeline, 2, **FIELDS)
    answer = post(pipeline, 2, ("pause_generation", {"mode": "retract"}), **{**FIELDS, **resumption(partial)})
    pipeline.continue_generation()
    assert_same(merged(partial, answer.result()), expected)


def test_who_did_not_ask_for_partial_results_gets_the_error(pipeline: RolloutPipeline) -> None:
    with pytest.raises(RequestAbortedError):
        aborted(pipeline, 2, **{**FIELDS, "rollout_return_partial": False})


def test_states_that_are_no_states_of_the_request_are_refused_by_name(pipeline: RolloutPipeline) -> None:
    (partial,) = aborted(pipeline, 2, **FIELDS)
    state = partial.resume_state
    plain = {"step": 2, "latents": state.latents, "previous_x0": None, "weight_versions": ["default"] * 2}
    spans = version_spans(state.weight_versions)
    wrong: list[tuple[Any, str]] = [
        ([state, state], "1 samples, 2 entries"),
        ("x", "must be a list"),
        ([7], "must be an object or null"),
        ([{**plain, "steps": 2}], "unknown: steps"),
        ([{"step": 2}], "missing or unknown: latents"),
        ([{**plain, "step": True}], "step must be a whole number"),
        ([{**plain, "step": STEPS + 1}], r"outside 0\.\.6"),
        ([{**plain, "step": -1}], "outside"),
        ([{**plain, "step": 3}], "speak of 2 steps, 3 were taken"),
        ([{**plain, "weight_versions": [{"version": "a", "start": 1, "end": 2}]}], "does not follow step 0"),
        ([{**plain, "weight_versions": [{"version": "a", "start": 0, "end": 2**62}]}], "does not follow"),
        ([{**plain, "weight_versions": 4}], "weight_versions"),
        ([{**plain, "latents": state.latents[:-1]}], "latents has the wrong shape"),
        ([{**plain, "latents": state.latents.half()}], "latents has the wrong dtype"),
        ([{**plain, "latents": state.latents / 0}], "NaN or infinite"),
        ([{**plain, "latents": None}], "latents must be a tensor"),
        ([{**plain, "previous_x0": state.latents}], "previous_x0 belongs to affine"),
        ([replace(state, seed=8)], "of seed 8, the sample's seed is 7"),
    ]
    for entries, why in wrong:
        with pytest.raises(InvalidRequestError, match=why) as refused:
            pipeline(**FIELDS, resume_from=entries)
        assert refused.value.field == "resume_from"
    affine = {**FIELDS, **KINDS["affine"]}
    with pytest.raises(InvalidRequestError, match="previous_x0 belongs to affine"):
        pipeline(**affine, resume_from=[plain])
    good = pipeline(**FIELDS, resume_from=[{**plain, "weight_versions": spans}])
    assert_same(merged([partial], good), pipeline(**FIELDS))


def test_latents_that_are_not_finite_are_an_error_and_no_partial_result(pipeline: RolloutPipeline) -> None:
    loop, engine = pipeline._loop, pipeline.engine
    answer = loop.submit("request", params_from_mapping(FIELDS))

    def spoil() -> None:
        if engine.running_requests():
            engine._queue.samples[0].latents = engine._queue.samples[0].latents / 0
            loop.abort("request")

    loop.run_until_idle(spoil)
    with pytest.raises(NonFiniteOutputError):
        answer.result()
    assert not engine.request_ids()


def test_samples_that_are_not_two_parts_of_one_are_not_merged(pipeline: RolloutPipeline) -> None:
    one, other = aborted(pipeline, 2, **FIELDS, num_outputs_per_prompt=2)
    (resumed,) = pipeline(**{**FIELDS, **resumption([one])})
    (bare,) = pipeline(**{**FIELDS, **resumption([one]), "rollout_debug_mode": False})
    cases = [(other, resumed, "differ in seed"), (resumed, resumed, "6 and 6"), (one, bare, "both have rollout_debug")]
    cases.append((one, replace(resumed, weight_versions=("x",) * STEPS), "differ in weight_versions"))
    cases.append((one, replace(one, num_steps_done=1), "2 and 1 steps"))
    for partial, rest, why in cases:
        with pytest.raises(InvalidRequestError, match=why):
            merge_resumed(partial, rest)


@given(st.lists(st.sampled_from(["1", "2", "3"]), max_size=12))
def test_spans_are_contiguous_merged_and_undone(versions: list[str]) -> None:
    spans = version_spans(versions)
    assert versions_of_steps(spans) == tuple(versions) == versions_of_steps(versions)
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][: len(spans)]
    assert all(one["version"] != other["version"] for one, other in pairwise(spans))


def test_the_loop_answers_an_abort_with_what_the_engine_hands_out_unless_nobody_would_read_it() -> None:
    engine = CountdownEngine()
    loop: StepLoop[dict[str, object], dict[str, object]] = StepLoop(engine)
    asked = {"whole": False, "partial": True, "discarded": True, "broken": "broken"}
    answers = {name: loop.submit(name, {"steps": 5, "partial": partial}) for name, partial in asked.items()}
    aborts = []
    loop.submit("first", {"steps": 1}).add_done_callback(
        lambda done: aborts.extend(loop.abort(name, discard=name == "discarded") for name in asked)
    )
    loop.run_until_idle()
    assert [abort.result() for abort in aborts] == [True] * 4
    assert answers["partial"].result() == {"step": None, "left": 4}
    for name in ("whole", "discarded"):
        with pytest.raises(RequestAbortedError):
            answers[name].result()
    with pytest.raises(EngineFaultError, match="ZeroDivisionError"):
        answers["broken"].result()
    assert engine.steps == 1
    assert not engine.requests


# Over HTTP.


def abort_when_running(service: Service, fields: dict[str, Any], wire: str, how: str = "rid") -> list[RolloutSample]:
    """What a long request is answered with when it is aborted in the middle."""
    result: list[Any] = []

    def roll_out() -> None:
        try:
            result.append(service.client(wire).generate(**fields, rid="partial-1"))
        except EngineError as error:
            result.append(error)

    evaluations = service.stats()["evaluations"]
    thread = threading.Thread(target=roll_out)
    thread.start()
    service.wait_until(lambda: service.stats()["evaluations"] > evaluations + 8)
    bodies: dict[str, dict[str, Any]] = {
        "rid": {"rid": "partial-1"},
        "prefix": {"rid": "partial", "prefix": True},
        "all": {"abort_all": True},
    }
    if how == "pause":
        service.client().pause_generation("abort")
        service.client().continue_generation()
    else:
        assert service.http.post("/abort_request", json=bodies[how]).json()["aborted"] is True
    thread.join(30)
    (samples,) = result
    assert not isinstance(samples, EngineError), samples
    return list(samples)


@pytest.fixture(scope="module")
def long_fields() -> dict[str, Any]:
    return {**LONG, "num_outputs_per_prompt": 2, "rollout_return_step_indices": [0, 1, 2, LONG_STEPS // 2, LONG_STEPS]}


@pytest.fixture(scope="module")
def whole(pipeline: RolloutPipeline, long_fields: dict[str, Any]) -> list[RolloutSample]:
    return pipeline(**long_fields)


@pytest.mark.parametrize(("wire", "how"), [("json", "rid"), ("msgpack", "prefix"), ("safetensors", "pause")])
def test_over_http_an_abort_is_answered_with_200_and_resumed_to_the_same_bits(
    service: Service, long_fields: dict[str, Any], whole: list[RolloutSample], wire: str, how: str
) -> None:
    partial = abort_when_running(service, long_fields, wire, how)
    assert all(0 < sample.num_steps_done < LONG_STEPS for sample in partial)
    resumed = service.client(wire).generate(**{**long_fields, **resumption(partial)})
    assert_same(merged(partial, resumed), whole)


def test_a_row_of_an_aborted_sample_has_the_documented_keys_and_can_be_sent_back_as_it_is(service: Service) -> None:
    body = {**FIELDS, "rid": "waits"}
    service.client().pause_generation("in_place")
    rows: list[Any] = []
    thread = threading.Thread(target=lambda: rows.extend(service.generate(body).json()))
    thread.start()
    service.wait_until(lambda: service.stats()["samples_waiting"] > 0)
    service.http.post("/abort_request", json={"abort_all": True})
    thread.join(30)
    service.client().continue_generation()
    (row,) = rows
    reason = {"type": "abort", "message": "the request was aborted while it waited"}
    assert (row["finish_reason"], row["num_steps_done"], row["resume_state"]) == (reason, 0, None)
    assert (row["weight_versions"], row["weight_version"], row["generated_output"]) == ([], None, None)

    (partial,) = abort_when_running(service, LONG, "json")
    state = json_value(vars(partial.resume_state))
    state["weight_versions"] = version_spans(state["weight_versions"])
    assert set(state) == {"seed", "step", "latents", "previous_x0", "weight_versions"}
    reply = service.generate({**LONG, "resume_from": [state]})
    assert (reply.status_code, reply.json()[0]["num_steps_done"]) == (200, LONG_STEPS)
    for damaged, why in (
        ({**state["latents"], "data": "AAAA"}, "can't be read"),
        ({**state["latents"], "data": 5}, "can't be read"),
        ([0.5], "must be a tensor"),
    ):
        refused = service.generate({**LONG, "resume_from": [{**state, "latents": damaged}]})
        assert (refused.status_code, refused.json()["field"]) == (400, "resume_from")
        assert why in refused.text
    refused = service.generate({**LONG, "resume_from": [state, None]})
    assert (refused.status_code, refused.json()["field"]) == (400, "resume_from")


def test_a_client_that_leaves_gets_nothing_and_its_samples_leave_the_engine(service: Service) -> None:
    aborted_before = service.stats()["requests_aborted"]
    with RolloutClient(service.base_url, timeout=0.5) as client, pytest.raises(httpx.TimeoutException):
        client.generate(**{**LONG, "num_inference_steps": 1000})
    service.wait_until(lambda: service.stats()["requests_aborted"] == aborted_before + 1)
    assert service.stats()["samples_running"] == 0


# Over several ranks.


@pytest.fixture(scope="module")
def two_ranks(tiny_sd3_folder: Path) -> Iterator[RolloutPipeline]:
    config = EngineConfig(str(tiny_sd3_folder), device="cpu", parallel=ParallelConfig(sp_degree=2))
    with RolloutPipeline.from_config(config) as made:
        yield made


def test_several_ranks_resume_to_the_same_bits_and_forget_what_was_aborted(
    pipeline: RolloutPipeline, two_ranks: RolloutPipeline
) -> None:
    for kind, extra in KINDS.items():
        fields = {**FIELDS, **extra, "num_outputs_per_prompt": 3}
        expected = pipeline(**fields)
        partial = aborted(two_ranks, 3, **fields)
        assert_same(merged(partial, two_ranks(**{**fields, **resumption(partial)})), expected)
        assert_same(merged(partial, pipeline(**{**fields, **resumption(partial)})), expected), kind
    shared = {**FIELDS, "init_same_noise": True, "rollout_sde_step_indices": [4], "num_outputs_per_prompt": 3}
    partial = aborted(two_ranks, 2, **shared)
    assert_same(merged(partial, two_ranks(**{**shared, **resumption(partial)})), pipeline(**shared))
