"""The engine: batching, selection, storage, sharing, aborting, on a tiny SD3."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from equality import assert_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import sd3_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import family_for
from diffusion_rl.params import Limits, RolloutParams
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.sample import RolloutSample
from diffusion_rl.schedulers.base import StepTerms
from engine_control.engine import Finished
from engine_control.errors import EngineFaultError, InvalidRequestError, NonFiniteOutputError, QueueFullError

SMALL: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 4, "output_type": "latent"}
FULL = {**SMALL, "rollout_return_dit_trajectory": True}


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return RolloutPipeline(sd3_pipeline())


def run(engine: RolloutEngine) -> dict[str, list[RolloutSample]]:
    results = {}
    while engine.has_unfinished_requests():
        for finished in engine.step():
            assert finished.error is None
            results[finished.request_id] = finished.result or []
    return results


def request(**fields: Any) -> RolloutParams:
    return RolloutParams(**{"prompt": "a red ball", "seed": 1, **FULL, **fields})


# --- batching --------------------------------------------------------------------------------------------------------


def test_requests_of_other_prompts_kinds_steps_and_guidance_scales_share_a_forward(
    pipeline: RolloutPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusion_rl.rollout.engine.WORK_BUDGET_S", 60.0)  # on a busy machine five prompts take long
    engine = RolloutEngine(pipeline.engine.family)
    requests = {
        "a": request(prompt="cat", seed=3),
        "b": request(rollout_sde_type="cps", rollout_log_prob_no_const=True, seed=3),
        "c": request(rollout_sde_type="ode", num_inference_steps=6, guidance_scale=2.0),
        "d": request(rollout_sde_type="dance", rollout_noise_level=0.3, negative_prompt="dog"),
        "e": request(rollout=False),
    }
    for name, params in requests.items():
        engine.add_request(name, params)
    together = run(engine)
    assert engine.stats()["steps"] == 6
    assert engine.stats()["evaluations"] == 4 * 4 + 6
    for name, params in requests.items():
        alone = RolloutEngine(pipeline.engine.family)
        alone.add_request(name, params)
        assert_same_bits(together[name][0], run(alone)[name][0])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms(use_true_random=False), max_batch=st.integers(1, 6))
def test_whatever_joins_leaves_or_is_aborted_beside_it_a_sample_keeps_its_bits(
    pipeline: RolloutPipeline, order: random.Random, max_batch: int
) -> None:
    engine = RolloutEngine(pipeline.engine.family, EngineConfig(max_batch_size=max_batch))
    probe = request(seed=77, prompt="probe")
    reference = RolloutEngine(pipeline.engine.family)
    reference.add_request("probe", probe)
    expected = run(reference)["probe"][0]
    arrivals = [("probe", probe)] + [
        (f"n{i}", request(seed=i, prompt=order.choice(["cat", "dog"]), num_outputs_per_prompt=order.randint(1, 3)))
        for i in range(3)
    ]
    order.shuffle(arrivals)
    found: list[RolloutSample] = []
    while arrivals or engine.has_unfinished_requests():
        if arrivals and (order.random() < 0.5 or not engine.has_unfinished_requests()):
            engine.add_request(*arrivals.pop())
        if order.random() < 0.1:
            engine.abort_request(f"n{order.randint(0, 2)}")
        found += [s for f in engine.step() if f.request_id == "probe" for s in f.result or []]
    assert_same_bits(found[0], expected)


def test_samples_of_another_size_or_without_guidance_run_in_a_batch_of_their_own(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family)
    for index, fields in enumerate([{}, {"height": 64}, {"guidance_scale": 1.0}]):
        engine.add_request(str(index), request(**fields))
    run(engine)
    assert engine.stats()["steps"] == 12


def test_an_urgent_request_is_finished_first_and_equals_keep_their_order(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family, EngineConfig(max_batch_size=1))
    for name, priority in (("first", 0), ("second", 0), ("urgent", 5)):
        engine.add_request(name, request(priority=priority, num_inference_steps=2))
    assert list(run(engine)) == ["urgent", "first", "second"]


def test_a_group_larger_than_the_batch_is_finished_whole(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family, EngineConfig(max_batch_size=2))
    engine.add_request("big", request(num_outputs_per_prompt=5, rollout_return_denoising_env=True))
    samples = run(engine)["big"]
    assert [s.sample_index for s in samples] == [0, 1, 2, 3, 4]
    for sample in samples:
        assert_same_bits(sample, pipeline(sample.prompt, **{**FULL, "seed": sample.seed})[0])
        assert sample.denoising_env is samples[0].denoising_env
        assert sample.dit_trajectory is not None
        assert samples[0].dit_trajectory is not None
        assert sample.dit_trajectory.sigmas is samples[0].dit_trajectory.sigmas


# --- what is stochastic, what is returned ----------------------------------------------------------------------------


def test_steps_outside_the_named_ones_run_ode_and_do_not_change_the_noise_of_the_others(
    pipeline: RolloutPipeline,
) -> None:
    whole = pipeline("cat", seed=4, **FULL)[0]
    some = pipeline("cat", seed=4, rollout_sde_step_indices=[1, 3], **FULL)[0]
    assert some.rollout_step_kinds == ("ode", "sde", "ode", "sde")
    assert some.rollout_log_probs is not None
    assert (some.rollout_log_probs != 0).tolist() == [False, True, False, True]
    assert some.rollout_debug_tensors is not None
    assert whole.rollout_debug_tensors is not None
    ours, theirs = (
        some.rollout_debug_tensors.rollout_variance_noises,
        whole.rollout_debug_tensors.rollout_variance_noises,
    )
    assert torch.equal(ours[[1, 3]], theirs[[1, 3]])
    assert ours[[0, 2]].abs().sum() == 0
    assert some.rollout_debug_tensors.rollout_noise_std_devs[:, 0].gt(0).tolist() == [False, True, False, True]


def test_a_filtered_trajectory_is_the_full_one_sliced_with_its_indices_and_full_clocks(
    pipeline: RolloutPipeline,
) -> None:
    whole = pipeline("cat", seed=4, **FULL)[0].dit_trajectory
    some = pipeline("cat", seed=4, rollout_return_step_indices=[4, 1, 2], **FULL)[0].dit_trajectory
    assert whole is not None
    assert some is not None
    assert whole.latent_step_indices.tolist() == [0, 1, 2, 3, 4]
    assert some.latent_step_indices.tolist() == [1, 2, 4]
    assert torch.equal(some.latents, whole.latents[[1, 2, 4]])
    assert len(some.timesteps) == len(some.sigmas) == 5


def test_the_final_latent_is_the_last_state_and_the_first_state_is_the_initial_noise(pipeline: RolloutPipeline) -> None:
    sample = pipeline("cat", seed=4, **FULL)[0]
    assert sample.dit_trajectory is not None
    assert torch.equal(sample.dit_trajectory.latents[-1], sample.generated_latents)  # type: ignore[arg-type]
    debug = sample.rollout_debug_tensors
    assert debug is not None
    rebuilt = (
        debug.rollout_prev_sample_means + debug.rollout_noise_std_devs[..., None, None] * debug.rollout_variance_noises
    )
    assert torch.equal(rebuilt, sample.dit_trajectory.latents[1:])


def test_a_window_is_contiguous_inside_its_range_and_drawn_from_the_groups_seed(pipeline: RolloutPipeline) -> None:
    fields = {**FULL, "num_inference_steps": 8, "rollout_sde_window_size": 2, "rollout_sde_window_range": [1, 6]}
    starts = set()
    for seed in range(12):
        group = pipeline("cat", seed=seed, num_outputs_per_prompt=2, **fields)
        assert group[0].rollout_step_kinds == group[1].rollout_step_kinds
        stochastic = [i for i, k in enumerate(group[0].rollout_step_kinds) if k == "sde"]
        assert stochastic == [stochastic[0], stochastic[0] + 1]
        assert 1 <= stochastic[0] <= 4
        starts.add(stochastic[0])
    assert len(starts) > 1
    default = pipeline("cat", seed=1, **{**fields, "rollout_sde_window_range": None})[0]
    assert default.rollout_step_kinds[-1] == "ode"


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_level_0_is_the_ode_to_the_bit_and_says_so(kind: str, dtype: torch.dtype) -> None:
    pipeline = RolloutPipeline(sd3_pipeline(dtype))
    still = pipeline("cat", seed=4, rollout_sde_type=kind, rollout_noise_level=0, **FULL)[0]
    ode = pipeline("cat", seed=4, rollout_sde_type="ode", **FULL)[0]
    assert_same_bits(still, ode)
    assert still.rollout_step_kinds == ("ode",) * 4
    assert still.rollout_log_probs is not None
    assert still.rollout_log_probs.abs().sum() == 0


@pytest.mark.parametrize("kind", ["sde", "cps", "dance", "ode"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("no_const", [True, False])
def test_nothing_is_nan_at_any_number_of_steps(
    pipeline: RolloutPipeline, kind: str, steps: int, no_const: bool
) -> None:
    fields = {**FULL, "num_inference_steps": steps, "rollout_log_prob_no_const": no_const}
    sample = pipeline("cat", seed=4, rollout_sde_type=kind, **fields)[0]
    for name, tensor in (("log_probs", sample.rollout_log_probs), ("latents", sample.generated_latents)):
        assert tensor is not None
        assert tensor.isfinite().all(), name
    if kind == "cps":
        assert sample.rollout_step_kinds[-1] == "ode"


def test_an_affine_request_takes_the_coefficients_it_sends_and_can_be_the_sde(pipeline: RolloutPipeline) -> None:
    sde = pipeline("cat", seed=4, **FULL)[0]
    assert sde.dit_trajectory is not None
    terms = _terms("sde", sde.dit_trajectory.sigmas)
    rows = []
    for step in range(4):
        sigma, std = terms.sigma[step].item(), terms.std_dev_t[step].item()
        dt = terms.sigma_next[step].item() - sigma
        a, b = 1 + std**2 / (2 * sigma) * dt, (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        rows.append([a, b, 0.0, terms.noise_std[step].item()])
    affine = pipeline("cat", seed=4, rollout_sde_type="affine", affine_coefficients=rows, **FULL)[0]
    assert affine.rollout_step_kinds == ("affine",) * 4
    torch.testing.assert_close(affine.generated_latents, sde.generated_latents, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(affine.rollout_log_probs, sde.rollout_log_probs, atol=1e-4, rtol=1e-4)


def test_an_affine_step_reads_the_step_befores_prediction(pipeline: RolloutPipeline) -> None:
    rows = [[1.0, -0.1, 0.5, 0.1], [0.9, -0.2, 0.25, 0.0], [0.8, -0.1, 0.125, 0.2], [1.0, -0.1, 0.0, 0.3]]
    fields = {**FULL, "rollout_sde_type": "affine", "affine_coefficients": rows}
    sample = pipeline("cat", seed=4, rollout_return_denoising_env=True, **fields)[0]
    trajectory, debug = sample.dit_trajectory, sample.rollout_debug_tensors
    assert trajectory is not None
    assert debug is not None
    x0 = torch.zeros_like(trajectory.latents[0])
    for step, (a, b, c, _) in enumerate(rows):
        x, v = trajectory.latents[step], debug.rollout_model_outputs[step]
        torch.testing.assert_close(debug.rollout_prev_sample_means[step], a * x + b * v + c * x0, atol=1e-5, rtol=1e-5)
        x0 = x - trajectory.sigmas[step] * v
    assert sample.rollout_step_kinds == ("affine", "ode", "affine", "affine")
    assert sample.rollout_log_probs is not None
    assert torch.equal(pipeline.replay([sample])[0].detach(), sample.rollout_log_probs[[0, 2, 3]])


def _terms(kind: str, sigmas: torch.Tensor) -> StepTerms:
    from diffusion_rl.schedulers import step_kinds

    return step_kinds.get(kind).schedule_terms(sigmas, noise_level=0.7)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_a_rounded_state_is_scored_and_read_as_it_is_stored(pipeline: RolloutPipeline, storage: str) -> None:
    fields = {**FULL, "rollout_latents_dtype": storage, "rollout_return_denoising_env": True}
    sample = pipeline("cat", seed=4, **fields)[0]
    assert sample.dit_trajectory is not None
    latents = sample.dit_trajectory.latents
    assert torch.equal(latents, latents.to(getattr(torch, storage)).float())
    assert sample.rollout_log_probs is not None
    assert torch.equal(pipeline.replay([sample])[0].detach(), sample.rollout_log_probs)
    exact = pipeline("cat", seed=4, **FULL)[0]
    assert exact.rollout_log_probs is not None
    assert not torch.equal(sample.rollout_log_probs, exact.rollout_log_probs)


# --- schedules and seeds ---------------------------------------------------------------------------------------------


def test_sigmas_without_a_final_0_are_shifted_by_the_scheduler_and_with_it_used_as_they_stand(
    pipeline: RolloutPipeline,
) -> None:
    fields = {k: v for k, v in FULL.items() if k != "num_inference_steps"}
    shifted = pipeline("cat", seed=4, sigmas=[1.0, 0.75, 0.5, 0.25], **fields)[0].dit_trajectory
    verbatim = pipeline("cat", seed=4, sigmas=[1.0, 0.75, 0.5, 0.25, 0.0], **fields)[0].dit_trajectory
    unshifted = pipeline("cat", seed=4, sigmas=[1.0, 0.75, 0.5, 0.25], flow_shift=1.0, **fields)[0].dit_trajectory
    assert shifted is not None
    assert verbatim is not None
    assert unshifted is not None
    torch.testing.assert_close(shifted.sigmas, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))
    assert verbatim.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert verbatim.timesteps.tolist() == [1000.0, 750.0, 500.0, 250.0, 0.0]
    assert torch.equal(unshifted.latents, verbatim.latents)


def test_the_group_can_share_its_initial_noise_and_name_its_seed(pipeline: RolloutPipeline) -> None:
    def initial(**fields: Any) -> torch.Tensor:
        samples = pipeline("cat", seed=4, num_outputs_per_prompt=3, **FULL, **fields)
        return torch.stack([s.dit_trajectory.latents[0] for s in samples if s.dit_trajectory is not None])

    own, same, named = initial(), initial(init_same_noise=True), initial(initial_noise_seed=50)
    named_same = initial(initial_noise_seed=50, init_same_noise=True)
    assert torch.equal(same, own[:1].expand_as(same))
    assert torch.equal(named_same, named[:1].expand_as(named))
    assert not torch.equal(own[0], own[1])
    assert not torch.equal(own[0], named[0])


def test_the_initial_noise_seed_does_not_change_the_noise_of_the_steps(pipeline: RolloutPipeline) -> None:
    a, b = (pipeline("cat", seed=4, **FULL, **f)[0].rollout_debug_tensors for f in ({}, {"initial_noise_seed": 9}))
    assert a is not None
    assert b is not None
    assert torch.equal(a.rollout_variance_noises, b.rollout_variance_noises)


def test_seeds_can_be_named_one_by_one_and_all_64_bits_count(pipeline: RolloutPipeline) -> None:
    samples = pipeline("cat", seeds=[2**64 - 1, 7, 7 + 2**32], num_outputs_per_prompt=3, **FULL)
    assert [s.seed for s in samples] == [2**64 - 1, 7, 7 + 2**32]
    assert_same_bits(samples[1], pipeline("cat", seed=7, **FULL)[0])
    assert not torch.equal(samples[1].generated_latents, samples[2].generated_latents)  # type: ignore[arg-type]


def test_a_missing_seed_is_chosen_at_random_and_returned(pipeline: RolloutPipeline) -> None:
    first, second = pipeline("cat", **FULL)[0], pipeline("cat", **FULL)[0]
    assert first.seed != second.seed
    assert_same_bits(first, pipeline("cat", seed=first.seed, **FULL)[0])


# --- prefix sharing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 3, 4])
@pytest.mark.parametrize("max_batch", [2, 32])
def test_a_shared_prefix_costs_k_plus_g_times_the_rest_and_gives_the_same_bits(
    pipeline: RolloutPipeline, first: int, max_batch: int
) -> None:
    steps, group = 4, 5
    indices = tuple(range(first, steps))
    fields = {"num_outputs_per_prompt": group, "init_same_noise": True, "rollout_sde_step_indices": indices}
    results = {}
    for shared in (True, False):
        engine = RolloutEngine(pipeline.engine.family, EngineConfig(max_batch_size=max_batch))
        engine.add_request("g", request(rollout_share_prefix=shared, **fields))
        results[shared] = run(engine)["g"]
        expected = first + group * (steps - first) if shared else group * steps
        assert engine.stats()["evaluations"] == expected
        assert results[shared][0].num_evaluations == expected
    for ours, theirs in zip(results[True], results[False], strict=True):
        assert_same_bits(ours, theirs)
        assert ours.weight_versions == ("default",) * steps


def test_samples_that_parted_from_a_trunk_share_no_memory(pipeline: RolloutPipeline) -> None:
    group = pipeline(
        "cat", seed=4, num_outputs_per_prompt=2, init_same_noise=True, rollout_sde_step_indices=[2], **FULL
    )
    first, second = group
    assert first.dit_trajectory is not None
    assert second.dit_trajectory is not None
    before = second.dit_trajectory.latents.clone()
    first.dit_trajectory.latents.zero_()
    assert torch.equal(second.dit_trajectory.latents, before)


# --- lifetime --------------------------------------------------------------------------------------------------------


def test_the_first_request_and_the_thousandth_have_the_same_bits(pipeline: RolloutPipeline) -> None:
    tiny = {"height": 16, "width": 16, "num_inference_steps": 1, "guidance_scale": 1.0, "output_type": "latent"}
    first = pipeline("cat", seed=7, **tiny)[0]
    for number in range(20):
        pipeline(["dog", "a bird"] * 25, seed=100 * number, **tiny)  # fifty requests at a time
    assert_same_bits(pipeline("cat", seed=7, **tiny)[0], first)


def test_an_aborted_request_leaves_the_batch_at_once(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family)
    engine.add_request("stays", request())
    engine.add_request("goes", request(num_outputs_per_prompt=8))
    engine.step()
    assert engine.stats()["samples_running"] == 9
    assert engine.abort_request("goes")
    assert not engine.abort_request("goes")
    before = engine.stats()["evaluations"]
    finished = run(engine)
    assert list(finished) == ["stays"]
    assert engine.stats()["evaluations"] - before == 3


def run_both(
    engine: RolloutEngine, bad: RolloutParams, good: RolloutParams, *, failures: int = 1
) -> Finished[list[RolloutSample]]:
    """Runs a request that fails beside one that doesn't; returns the failure, after checking the other one's bits."""
    engine.add_request("good", good)
    engine.add_request("bad", bad)
    results = {}
    while engine.has_unfinished_requests():
        for finished in engine.step():
            assert finished.request_id not in results
            results[finished.request_id] = finished
    assert results["good"].result is not None
    alone = RolloutEngine(family_for(sd3_pipeline()))
    alone.add_request("good", good)
    assert_same_bits(results["good"].result[0], run(alone)["good"][0])
    assert results["bad"].result is None
    assert engine.stats()["requests_failed"] == failures
    return results["bad"]


def test_a_non_finite_sample_fails_its_request_alone() -> None:
    bad = request(
        rollout_sde_type="affine", affine_coefficients=((1e6, 1e6, 0.0, 1e6),) * 8, num_inference_steps=8, seed=3
    )
    failed = run_both(RolloutEngine(family_for(sd3_pipeline())), bad, request())
    assert isinstance(failed.error, NonFiniteOutputError)


def test_a_picture_that_is_not_finite_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_for(sd3_pipeline())
    decode = family.decode
    monkeypatch.setattr(family, "decode", lambda x, h, w: decode(x, h, w) * (float("nan") if h == 64 else 1))
    failed = run_both(RolloutEngine(family), request(height=64, output_type="image"), request(output_type="image"))
    assert isinstance(failed.error, NonFiniteOutputError)


def test_a_fault_while_encoding_or_decoding_one_request_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = family_for(sd3_pipeline())
    encode, decode = family.encode_prompt, family.decode

    def no_memory_for(condition: bool) -> None:
        if condition:
            raise MemoryError("no room")

    engine = RolloutEngine(family)
    monkeypatch.setattr(family, "encode_prompt", lambda p, n: no_memory_for(p == "bad") or encode(p, n))
    monkeypatch.setattr(family, "decode", lambda x, h, w: no_memory_for(h == 64) or decode(x, h, w))
    bads = (request(prompt="bad"), request(height=64, output_type="image", num_outputs_per_prompt=3))
    for count, bad in enumerate(bads, start=1):
        failed = run_both(engine, bad, request(output_type="image"), failures=count)
        assert isinstance(failed.error, EngineFaultError)
        assert "MemoryError: no room" in str(failed.error)


@pytest.mark.parametrize("together", [True, False])
def test_a_picture_that_breaks_its_batch_fails_alone(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    family = family_for(sd3_pipeline())
    engine, decode = RolloutEngine(family), family.decode
    monkeypatch.setattr(family, "decodes_together", (32, 32) if together else None)
    bad_latents: list[torch.Tensor] = []

    def decode_or_break(latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        if any(torch.equal(x, y) for x in latents for y in bad_latents):
            raise MemoryError("no room")
        return decode(latents, height, width)

    bad_latents.append(RolloutPipeline(sd3_pipeline())("cat", seed=5, **FULL)[0].generated_latents)  # type: ignore[arg-type]
    monkeypatch.setattr(family, "decode", decode_or_break)
    failed = run_both(engine, request(prompt="cat", seed=5, output_type="image"), request(output_type="image"))
    assert isinstance(failed.error, EngineFaultError)


def test_the_callers_autocast_changes_no_bit(pipeline: RolloutPipeline) -> None:
    fields = {**FULL, "rollout_return_denoising_env": True}
    expected = pipeline("cat", seed=1, **fields)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(pipeline("cat", seed=1, **fields)[0], expected[0])
        scored = pipeline.replay(expected)
    assert expected[0].rollout_log_probs is not None
    assert torch.equal(scored[0].detach(), expected[0].rollout_log_probs)


def test_no_more_requests_are_admitted_than_fill_two_batches(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family, EngineConfig(max_batch_size=2))
    for index in range(12):
        engine.add_request(str(index), request())
    engine.step()
    assert engine.stats()["samples_running"] == 4
    assert engine.stats()["samples_waiting"] == 8
    assert len(run(engine)) == 12


def test_an_interrupted_call_leaves_nothing_behind(pipeline: RolloutPipeline) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(["cat", "dog"], seed=1, progress=interrupt, **FULL)
    assert not pipeline.engine.has_unfinished_requests()
    calls: list[tuple[int, int]] = []
    pipeline("cat", seed=1, num_outputs_per_prompt=2, progress=lambda *a: calls.append(a), **FULL)
    assert calls[0] == (2, 8)
    assert calls[-1] == (8, 8)


def test_one_bad_prompt_among_several_computes_nothing(pipeline: RolloutPipeline) -> None:
    before = pipeline.engine.stats()["evaluations"]
    with pytest.raises(InvalidRequestError, match="tokens"):
        pipeline(["cat", "a prompt that is much too long for it"], seed=1, **FULL)
    assert pipeline.engine.stats()["evaluations"] == before


def test_failing_all_hands_each_request_out_once(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family)
    engine.add_request("running", request())
    engine.step()
    engine.add_request("waiting", request())
    failed = engine.fail_unfinished(EngineFaultError("down"))
    assert {f.request_id for f in failed} == {"running", "waiting"}
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_a_full_engine_refuses_and_takes_more_when_some_have_finished(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family, EngineConfig(limits=Limits(max_queued_samples=3)))
    engine.add_request("a", request(num_outputs_per_prompt=2))
    with pytest.raises(QueueFullError, match="2 samples are in the engine, at most 3"):
        engine.add_request("b", request(num_outputs_per_prompt=2))
    run(engine)
    engine.add_request("b", request(num_outputs_per_prompt=2))


def test_a_second_request_of_the_same_id_is_refused(pipeline: RolloutPipeline) -> None:
    engine = RolloutEngine(pipeline.engine.family)
    engine.add_request("a", request())
    with pytest.raises(InvalidRequestError, match="already"):
        engine.add_request("a", request())


def test_what_a_caller_does_to_its_results_changes_no_later_result(pipeline: RolloutPipeline) -> None:
    fields = {**FULL, "rollout_return_denoising_env": True}
    first = pipeline("cat", seed=4, **fields)[0]
    kept = pipeline("cat", seed=4, **fields)[0]
    assert first.denoising_env is not None
    for value in first.denoising_env.pos_cond_kwargs.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert first.dit_trajectory is not None
    first.dit_trajectory.sigmas.zero_()
    assert_same_bits(pipeline("cat", seed=4, **fields)[0], kept)


def test_opt_in_fields_are_absent_when_off(pipeline: RolloutPipeline) -> None:
    plain = pipeline("cat", seed=4, rollout_debug_mode=False, **SMALL)[0]
    assert plain.rollout_debug_tensors is None
    assert plain.dit_trajectory is None
    assert plain.denoising_env is None
    evaluation = pipeline("cat", seed=4, rollout=False, rollout_return_dit_trajectory=True, **SMALL)[0]
    assert evaluation.rollout_log_probs is None
    assert evaluation.dit_trajectory is None
    assert evaluation.rollout_debug_tensors is None


def test_a_wrapped_trainer_module_is_left_trainable() -> None:
    stock = sd3_pipeline()
    RolloutPipeline(stock)
    assert all(p.requires_grad for p in stock.transformer.parameters())
