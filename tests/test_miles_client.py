"""A trainer's client, written from what miles_diffusion sends and reads, against a service that is configured for it:
no Accept header, msgpack replies, full timesteps beside filtered latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import msgpack
import pytest
import safetensors.torch
import torch
from conftest import Service

GEOMETRY = {
    "generator_device": "cpu",
    "width": 64,
    "height": 64,
    "num_inference_steps": 8,
    "guidance_scale": 4.5,
    "true_cfg_scale": None,
    "num_frames": None,
    "fps": None,
}
STEPS = GEOMETRY["num_inference_steps"]


@dataclass
class Sample:
    """A sample of the trainer's group, before and after its rollout."""

    seed: int
    sde_step_indices: list[int] | None
    body: dict[str, Any] | None = None


def training_body(samples: list[Sample], sde_steps: list[int] | None, return_steps: list[int] | None) -> dict[str, Any]:
    return {
        "prompt": "a red square",
        "num_outputs_per_prompt": len(samples),
        "seed": samples[0].seed,
        **GEOMETRY,
        "rollout": True,
        "rollout_sde_type": "sde",
        "rollout_noise_level": 0.7,
        "rollout_log_prob_no_const": False,
        "rollout_debug_mode": True,
        "rollout_video_dtype": None,
        "rollout_return_denoising_env": True,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": sde_steps,
        "rollout_return_step_indices": return_steps,
        "extra_sampling_params": {},
    }


def post(service: Service, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.Client(timeout=None) as client:
        request = client.build_request("POST", f"{service.base_url}/rollout/generate", json=body)
        del request.headers["accept"]
        reply = client.send(request)
    assert reply.headers["content-type"] == "application/msgpack"
    rows: list[dict[str, Any]] = msgpack.unpackb(reply.content, raw=False)
    return rows


def tensor(value: dict[str, Any]) -> torch.Tensor:
    if not value.get("__tensor__"):
        raise TypeError(f"a tensor was expected, not {type(value)}")
    return safetensors.torch.load(value["data"])["t"]


def roll_out(service: Service, count: int, sde_steps: list[int] | None, return_steps: list[int] | None) -> list[Sample]:
    """One microgroup; the client numbers the seeds of its samples itself."""
    samples = [Sample(100, sde_steps) for _ in range(count)]
    rows = post(service, training_body(samples, sde_steps, return_steps))
    for j, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        sample.body = row
        sample.seed = samples[0].seed + j if j else samples[0].seed
    return samples


def train_pairs(sample: Sample) -> list[dict[str, torch.Tensor]]:
    """One pair a stochastic step: states by their provenance, clocks by absolute step."""
    body = sample.body
    assert body is not None
    trajectory = {name: tensor(value) for name, value in body["dit_trajectory"].items()}
    debug = {name: tensor(value) for name, value in body["rollout_debug_tensors"].items()}
    rows = {int(step): row for row, step in enumerate(trajectory["latent_step_indices"])}
    steps = range(STEPS) if sample.sde_step_indices is None else sample.sde_step_indices  # type: ignore[call-overload]
    missing = [s for s in steps if s not in rows or s + 1 not in rows]
    assert not missing, f"trajectory lacks latents for steps {missing}"
    return [
        {
            "latent": trajectory["latents"][rows[s]],
            "next_latent": trajectory["latents"][rows[s + 1]],
            "timestep": trajectory["timesteps"][s],
            "next_timestep": trajectory["timesteps"][s + 1],
            "sigma": trajectory["sigmas"][s],
            "next_sigma": trajectory["sigmas"][s + 1],
            "sigma_max": trajectory["sigmas"][1],
            "log_prob_old": tensor(body["rollout_log_probs"])[s],
            "mean": debug["rollout_prev_sample_means"][s],
            "std": debug["rollout_noise_std_devs"][s],
            "model_output": debug["rollout_model_outputs"][s],
        }
        for s in steps
    ]


def log_prob(pair: dict[str, torch.Tensor], eta: float = 0.7) -> torch.Tensor:
    """Flow-GRPO's density of the next state, in double precision from the returned state and velocity."""
    x, following, velocity = (pair[name].double() for name in ("latent", "next_latent", "model_output"))
    sigma, step = pair["sigma"].double(), (pair["next_sigma"] - pair["sigma"]).double()
    scale = torch.where(sigma == 1, pair["sigma_max"].double(), sigma)
    std_dev = torch.sqrt(sigma / (1 - scale)) * eta
    mean = x * (1 + std_dev**2 / (2 * sigma) * step) + velocity * (1 + std_dev**2 * (1 - sigma) / (2 * sigma)) * step
    std = std_dev * torch.sqrt(-step)
    density = -((following - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    return density.mean()


@pytest.mark.parametrize(
    ("sde_steps", "return_steps"), [(None, None), ([2, 3, 4], [2, 3, 4, 5]), ([1, 6], [1, 2, 6, 7])], ids=str
)
def test_train_pairs_can_be_built_and_their_log_probs_recomputed(
    service: Service, sde_steps: list[int] | None, return_steps: list[int] | None
) -> None:
    samples = roll_out(service, 4, sde_steps, return_steps)
    assert [sample.seed for sample in samples] == [100, 101, 102, 103]
    for sample in samples:
        assert sample.body is not None
        assert sample.body["seed"] == sample.seed
        pairs = train_pairs(sample)
        assert len(pairs) == len(sde_steps or range(8))
        for pair in pairs:
            assert pair["next_timestep"] < pair["timestep"]
            torch.testing.assert_close(pair["timestep"], pair["sigma"] * 1000, rtol=1e-5, atol=1e-3)
            torch.testing.assert_close(log_prob(pair).float(), pair["log_prob_old"], rtol=1e-4, atol=1e-4)
    log_probs = tensor(samples[0].body["rollout_log_probs"])  # type: ignore[index]
    assert log_probs.shape == (8,)
    assert all(log_probs[s] == 0 for s in range(8) if sde_steps is not None and s not in sde_steps)


def test_filtered_states_are_those_of_the_full_trajectory(service: Service) -> None:
    steps = [2, 3, 4]
    (full,), (some,) = roll_out(service, 1, steps, None), roll_out(service, 1, steps, [2, 3, 4, 5])
    assert full.body is not None
    assert some.body is not None
    kept = tensor(some.body["dit_trajectory"]["latent_step_indices"])
    whole = tensor(full.body["dit_trajectory"]["latents"])
    assert torch.equal(tensor(some.body["dit_trajectory"]["latents"]), whole[kept])
    for name in ("timesteps", "sigmas"):
        assert tensor(some.body["dit_trajectory"][name]).shape == (9,)


def test_microgroups_are_the_group(service: Service) -> None:
    group = roll_out(service, 4, None, None)
    body = training_body([Sample(102, None), Sample(103, None)], None, None)
    for part, whole in zip(post(service, body), group[2:], strict=True):
        assert whole.body is not None
        assert part["generated_output"] == whole.body["generated_output"]
        assert part["rollout_log_probs"] == whole.body["rollout_log_probs"]


def test_nft_reads_the_final_state_of_an_ode_rollout(service: Service) -> None:
    (sample,) = roll_out(service, 1, [], [8])
    assert sample.body is not None
    trajectory = {name: tensor(value) for name, value in sample.body["dit_trajectory"].items()}
    assert int(trajectory["latent_step_indices"][-1]) == len(trajectory["sigmas"]) - 1
    assert trajectory["latents"].shape == (1, 16, 16, 16)
    assert not tensor(sample.body["rollout_log_probs"]).any()


def test_the_conditioning_has_the_keys_that_the_trainer_reads(service: Service) -> None:
    (sample,) = roll_out(service, 1, None, None)
    assert sample.body is not None
    env = sample.body["denoising_env"]
    for side in ("pos_cond_kwargs", "neg_cond_kwargs"):
        assert tensor(env[side]["encoder_hidden_states"]).ndim == 2
        assert tensor(env[side]["pooled_projections"]).ndim == 1
    assert env["image_kwargs"] == {}
    assert env["guidance"] is None or isinstance(env["guidance"], float)


def test_an_evaluation_request_returns_images_alone(service: Service) -> None:
    body = {"prompt": "a red square", "num_outputs_per_prompt": 2, "seed": 3, **GEOMETRY, "rollout": False}
    rows = post(service, body)
    assert len(rows) == 2
    for row in rows:
        image = tensor(row["generated_output"])
        assert image.shape == (3, 64, 64)
        assert 0 <= float(image.min()) <= float(image.max()) <= 1
        assert isinstance(row["request_id"], str)
        assert isinstance(row["seed"], int)
        assert row["inference_time_s"] > 0
        assert row["peak_memory_mb"] is None or row["peak_memory_mb"] > 0
        assert "dit_trajectory" not in row
