"""What `/rollout/generate` returns, and the faults that an endpoint of this kind once had."""

from __future__ import annotations

import threading

import msgpack
import pytest
import torch
from conftest import Service
from tiny_models import sd3_pipeline

from diffusion_rl.client import decode_json, decode_msgpack, decode_safetensors
from diffusion_rl.config import EngineConfig
from diffusion_rl.params import RolloutParams
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import RolloutSample
from diffusion_rl.server.rows import response_rows
from engine_control.errors import RequestAbortedError

SMALL = {"width": 64, "height": 64, "num_inference_steps": 4, "seed": 11}
FULL = {
    **SMALL,
    "num_outputs_per_prompt": 3,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "output_type": "both",
}


@pytest.fixture(scope="module")
def samples(service: Service) -> list[RolloutSample]:
    return service.client().generate("a red square", **FULL)


def same_bits(left: RolloutSample, right: RolloutSample) -> None:
    assert torch.equal(left.generated_output, right.generated_output)
    assert torch.equal(left.generated_latents, right.generated_latents)
    assert torch.equal(left.rollout_log_probs, right.rollout_log_probs)
    assert torch.equal(left.dit_trajectory.latents, right.dit_trajectory.latents)
    for name, tensor in vars(left.rollout_debug_tensors).items():
        assert torch.equal(tensor, getattr(right.rollout_debug_tensors, name)), name


def test_the_service_returns_the_bits_that_the_pipeline_computes(samples: list[RolloutSample]) -> None:
    pipeline = RolloutPipeline(sd3_pipeline(), config=EngineConfig())
    for ours, theirs in zip(samples, pipeline("a red square", **FULL), strict=True):
        same_bits(ours, theirs)


@pytest.mark.parametrize("wire", ["json", "msgpack"])
def test_every_encoding_carries_the_same_bits(service: Service, samples: list[RolloutSample], wire: str) -> None:
    for left, right in zip(samples, service.client(wire).generate("a red square", **FULL), strict=True):
        same_bits(left, right)
        assert left.denoising_env.pos_cond_kwargs.keys() == right.denoising_env.pos_cond_kwargs.keys()


def test_a_row_has_every_documented_key(service: Service) -> None:
    row = service.generate({"prompt": "x", **FULL}).json()[0]
    assert set(row) == {
        *("request_id", "prompt", "seed", "sample_seed", "request_seed", "sample_index", "generated_output"),
        *("generated_latents", "rollout_log_probs", "rollout_step_kinds", "rollout_debug_tensors", "denoising_env"),
        *("dit_trajectory", "sigma_max", "num_elements", "noise_level", "sde_type", "log_prob_no_const"),
        *("guidance_scale", "embedded_guidance", "height", "width", "weight_versions", "weight_version"),
        "num_evaluations",
        *("generator_device", "inference_time_s", "timings", "peak_memory_mb"),
        *("num_steps_done", "finish_reason", "resume_state"),
    }
    assert set(row["dit_trajectory"]) == {"latents", "timesteps", "sigmas", "latent_step_indices"}
    assert set(row["denoising_env"]) == {"image_kwargs", "pos_cond_kwargs", "neg_cond_kwargs", "guidance"}
    assert len(row["rollout_debug_tensors"]) == 4
    assert row["rollout_step_kinds"] == ["sde"] * 4
    assert row["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert row["weight_version"] == "default"
    assert (row["finish_reason"], row["num_steps_done"], row["resume_state"]) == ({"type": "stop"}, 4, None)
    assert row["inference_time_s"] == row["timings"]["inference_time_s"] > 0


def test_what_is_not_asked_for_is_not_sent(service: Service) -> None:
    row = service.generate({"prompt": "x", **SMALL, "rollout_debug_mode": False}).json()[0]
    assert (row["rollout_debug_tensors"], row["denoising_env"], row["dit_trajectory"]) == (None, None, None)
    assert "generated_latents" not in row
    row = service.generate({"prompt": "x", **SMALL, "rollout": False}).json()[0]
    assert not {"rollout_log_probs", "rollout_debug_tensors", "denoising_env", "dit_trajectory"} & set(row)
    assert row["generated_output"]["shape"] == [3, 64, 64]


def test_content_length_is_exact_and_the_content_type_is_the_chosen_one(service: Service) -> None:
    for accept, decode in (
        ("application/json", decode_json),
        ("application/msgpack", decode_msgpack),
        ("application/vnd.safetensors", decode_safetensors),
    ):
        reply = service.generate({"prompt": "x", **SMALL}, accept=accept)
        assert reply.headers["content-type"] == accept
        assert int(reply.headers["content-length"]) == len(reply.content)
        assert "transfer-encoding" not in reply.headers
        assert len(decode(reply.content)) == 1


def test_null_means_left_out_and_extra_sampling_params_come_last(service: Service) -> None:
    body = {
        "prompt": "x",
        **SMALL,
        "num_outputs_per_prompt": None,
        "negative_prompt": None,
        "num_frames": 1,
        "fps": 16,
        "image_path": None,
        "suppress_logs": True,
        "rollout_video_dtype": "uint8",
        "rollout_noise_level": 0.1,
        "extra_sampling_params": {"rollout_noise_level": 0.5, "quality": "exact", "flow_shift": 2.0, "seed": None},
    }
    (row,) = service.generate(body).json()
    assert row["noise_level"] == 0.5
    assert row["generated_output"]["dtype"] == "torch.uint8"
    assert (row["seed"], row["request_seed"]) == (11, 11)


def test_seeds_may_be_given_one_by_one_and_samples_keep_their_own(service: Service) -> None:
    body = {"prompt": "x", **SMALL, "seed": None, "num_outputs_per_prompt": 2}
    body["extra_sampling_params"] = {"seed": [7, 11]}
    rows = decode_json(service.generate(body).content)
    assert [row["seed"] for row in rows] == [7, 11]
    assert [row["request_seed"] for row in rows] == [7, 7]
    (alone,) = decode_json(service.generate({"prompt": "x", **SMALL}).content)
    assert torch.equal(rows[1]["generated_output"], alone["generated_output"])


def test_an_abort_call_ends_the_request_with_an_error_of_its_own(service: Service) -> None:
    errors: list[BaseException] = []

    def roll_out() -> None:
        try:
            service.client().generate("x", rid="to-abort", **{**SMALL, "num_inference_steps": 1000})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=roll_out)
    thread.start()
    service.wait_until(lambda: service.stats()["samples_running"] > 0)
    assert service.client().abort("to-abort") is True
    thread.join(30)
    assert isinstance(errors[0], RequestAbortedError)
    assert service.client().abort("to-abort") is False


def test_timesteps_can_be_filtered_like_the_latents() -> None:
    pipeline = RolloutPipeline(sd3_pipeline(), config=EngineConfig())
    fields = {"seed": 1, "width": 64, "height": 64, "num_inference_steps": 3, "rollout_return_step_indices": [1, 3]}
    results = pipeline("x", num_outputs_per_prompt=2, rollout_return_dit_trajectory=True, **fields)
    params = RolloutParams(prompt="x")
    full = response_rows(results, params, timesteps="full")
    filtered = response_rows(results, params, timesteps="filtered")
    assert full[0]["dit_trajectory"]["timesteps"].shape == (4,)
    kept = full[0]["dit_trajectory"]["timesteps"][[1, 3]]
    assert torch.equal(filtered[0]["dit_trajectory"]["timesteps"], kept)
    assert filtered[0]["dit_trajectory"]["sigmas"].shape == (4,)


# Faults that such an endpoint once had.


def test_the_final_latent_is_part_of_the_trajectory(samples: list[RolloutSample]) -> None:
    for sample in samples:
        assert sample.dit_trajectory.latent_step_indices.tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(sample.dit_trajectory.latents[-1], sample.generated_latents)


def test_latents_are_captured_as_the_transformer_consumed_them_not_after_the_decoders_scaling(
    samples: list[RolloutSample],
) -> None:
    for sample in samples:
        trajectory, debug = sample.dit_trajectory, sample.rollout_debug_tensors
        noises, stds = debug.rollout_variance_noises, debug.rollout_noise_std_devs
        following = debug.rollout_prev_sample_means + stds.reshape(-1, 1, 1, 1) * noises
        torch.testing.assert_close(trajectory.latents[1:], following, rtol=1e-5, atol=1e-5)


def test_debug_noise_is_not_a_view_of_a_buffer_that_the_next_step_overwrites(samples: list[RolloutSample]) -> None:
    noises = torch.cat([sample.rollout_debug_tensors.rollout_variance_noises for sample in samples])
    for i in range(len(noises)):
        for j in range(i):
            assert not torch.equal(noises[i], noises[j])


def test_the_samples_of_a_group_carry_their_own_trajectories_and_seeds(samples: list[RolloutSample]) -> None:
    assert [sample.seed for sample in samples] == [11, 12, 13]
    assert [sample.sample_index for sample in samples] == [0, 1, 2]
    for i in range(3):
        for j in range(i):
            left, right = samples[i], samples[j]
            assert not torch.equal(left.dit_trajectory.latents, right.dit_trajectory.latents)
            assert not torch.equal(left.rollout_log_probs, right.rollout_log_probs)
            assert not torch.equal(left.generated_output, right.generated_output)


def test_a_sample_is_the_same_alone_and_in_its_group(service: Service, samples: list[RolloutSample]) -> None:
    (alone,) = service.client().generate("a red square", **{**FULL, "seed": 12, "num_outputs_per_prompt": 1})
    same_bits(alone, samples[1])


def test_a_request_without_a_seed_gets_one_that_reproduces_it(service: Service) -> None:
    fields = {key: value for key, value in FULL.items() if key != "seed"}
    first, *others = service.client().generate("x", **fields)
    assert [sample.seed for sample in others] == [first.seed + 1, first.seed + 2]
    assert 0 <= first.seed < 2**31
    again = service.client().generate("x", **fields, seed=first.seed)
    same_bits(again[0], first)
    assert service.client().generate("x", **fields)[0].seed != first.seed


def test_defaults_of_a_request_come_from_the_request_not_from_the_service(service: Service) -> None:
    """SGLang's defaults: the debug tensors are on, the noise level is 0.7, every step is stochastic."""
    reply = service.http.post("/rollout/generate", json={"prompt": "x", "num_inference_steps": 2, "seed": 1})
    (row,) = msgpack.unpackb(reply.content, raw=False)
    assert row["rollout_debug_tensors"] is not None
    assert (row["noise_level"], row["sde_type"], row["rollout_step_kinds"]) == (0.7, "sde", ["sde", "sde"])
    assert (row["width"], row["height"]) == (64, 64)
    assert row["denoising_env"] is None
