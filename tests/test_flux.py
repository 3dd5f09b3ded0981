"""What FLUX has that no other family has: embedded guidance beside true guidance, and text padding that is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from equality import assert_same_bits
from tiny_models import flux_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.params import params_from_mapping
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.server.rows import response_rows, sample_from_plain
from engine_control.errors import InvalidRequestError
from rl_kernels import exact_mode

SMALL: dict[str, Any] = {"height": 48, "width": 64, "num_inference_steps": 3, "max_sequence_length": 24}
FULL = {**SMALL, "rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True}
TRUE = {"true_cfg_scale": 3.0, "negative_prompt": "blurry"}


@pytest.fixture(scope="module")
def dev() -> RolloutPipeline:
    return RolloutPipeline(flux_pipeline())


@pytest.fixture(scope="module")
def schnell() -> RolloutPipeline:
    return RolloutPipeline(flux_pipeline(guidance_embeds=False))


@pytest.mark.parametrize("model", ["dev", "schnell"])
@pytest.mark.parametrize(
    ("fields", "scale", "embedded"),
    [
        ({}, 1.0, 3.5),
        ({"guidance_scale": 0.0}, 1.0, 0.0),
        (TRUE, 3.0, 3.5),
        ({**TRUE, "guidance_scale": 6.0}, 3.0, 6.0),
        ({"guidance_scale": 2.0, "true_cfg_scale": 3.0}, 1.0, 2.0),
        ({"negative_prompt": "blurry", "true_cfg_scale": 1.0}, 1.0, 3.5),
    ],
)
def test_each_mode_of_guidance_is_the_stock_pipelines_and_is_told_by_the_reply(
    model: str, fields: dict[str, Any], scale: float, embedded: float, request: pytest.FixtureRequest
) -> None:
    pipeline: RolloutPipeline = request.getfixturevalue(model)
    family = pipeline.engine.family
    ours = pipeline("a red ball", seed=5, rollout=False, output_type="latent", **SMALL, **fields)[0]
    assert (ours.guidance_scale, ours.embedded_guidance) == (scale, embedded if model == "dev" else None)
    latents = family.pack(normal_noise([5], NoiseStream.INITIAL_LATENT, [0], family.initial_noise_shape(48, 64)))
    with exact_mode():
        out = family.pipeline("a red ball", latents=latents, output_type="latent", **SMALL, **fields).images
    assert torch.equal(ours.generated_latents, out[0])  # type: ignore[arg-type]


def test_scales_and_text_lengths_may_differ_within_a_batch(dev: RolloutPipeline) -> None:
    requests = [
        {**FULL, "prompt": "a red ball", "seed": 1, "guidance_scale": 1.5},
        {**FULL, "prompt": "cat", "seed": 2, "max_sequence_length": 9, "rollout_sde_type": "cps"},
        {**FULL, "prompt": "cat", "seed": 3, "guidance_scale": 9.0, "height": 64, "width": 32},
        {**FULL, "prompt": "cat", "seed": 4, "max_sequence_length": 40, "guidance_scale": 9.0, **TRUE},
        {**FULL, "prompt": "dog", "seed": 5, "max_sequence_length": 17, **TRUE},
    ]
    loop = dev._loop
    answers = [loop.submit(f"r{i}", params_from_mapping(fields)) for i, fields in enumerate(requests)]
    loop.run_until_idle()
    together = [answer.result()[0] for answer in answers]
    for fields, sample in zip(requests, together, strict=True):
        assert_same_bits(dev(**fields)[0], sample)
    assert [len(s.denoising_env.pos_cond_kwargs["encoder_hidden_states"]) for s in together] == [24, 9, 24, 40, 17]  # type: ignore[union-attr, arg-type]


def test_replay_reads_each_samples_own_guidance_from_its_env(dev: RolloutPipeline) -> None:
    samples = [dev("cat", seed=i, guidance_scale=scale, **FULL, **TRUE)[0] for i, scale in enumerate((1.5, 8.0))]
    assert [s.denoising_env.guidance for s in samples if s.denoising_env is not None] == [1.5, 8.0]
    over_the_wire = [
        sample_from_plain(response_rows([s], params_from_mapping({"prompt": "cat"}), timesteps="full")[0])
        for s in samples
    ]
    rolled_out = torch.stack([s.rollout_log_probs[:3] for s in samples if s.rollout_log_probs is not None])
    with torch.no_grad():
        assert torch.equal(dev.replay(over_the_wire), rolled_out)
        told_otherwise = [replace(s, denoising_env=replace(s.denoising_env, guidance=4.0)) for s in samples]  # type: ignore[type-var]
        assert (dev.replay(told_otherwise) != rolled_out).any(dim=1).all()


def test_the_env_is_what_the_transformer_was_called_with(dev: RolloutPipeline) -> None:
    sample = dev("cat", seed=1, rollout_debug_mode=True, **FULL)[0]
    env, trajectory, debug = sample.denoising_env, sample.dit_trajectory, sample.rollout_debug_tensors
    assert env is not None
    assert trajectory is not None
    assert debug is not None
    kwargs: dict[str, Any] = dict(env.pos_cond_kwargs)
    cos, sin = kwargs.pop("freqs_cis")
    assert cos.shape == sin.shape == (24 + 3 * 4, 32)
    assert all(
        torch.equal(x, y)
        for x, y in zip(
            (cos, sin), dev.transformer.pos_embed(torch.cat([kwargs["txt_ids"], kwargs["img_ids"]])), strict=True
        )
    )  # type: ignore[operator]
    batched = {name: value if name.endswith("_ids") else value[None] for name, value in kwargs.items()}
    with torch.no_grad(), exact_mode():
        velocity = dev.transformer(
            hidden_states=trajectory.latents[1:2],
            timestep=trajectory.timesteps[1:2] / 1000,
            guidance=torch.tensor([env.guidance]),
            **batched,
            return_dict=False,
        )[0]
    assert torch.equal(velocity[0], debug.rollout_model_outputs[1])


def test_a_prompt_that_t5_would_cut_off_is_refused_and_so_is_a_text_longer_than_the_pipelines(
    dev: RolloutPipeline,
) -> None:
    family = dev.engine.family
    family.check_prompt("x" * 22, "prompt", 24)  # with the space before it and the end
    for name in ("prompt", "negative_prompt"):
        fields = {"prompt": "cat", **TRUE, **SMALL, name: "x" * 23}
        with pytest.raises(InvalidRequestError, match="25 tokens, but the text encoder reads at most 24") as refused:
            dev(seed=1, **fields)
        assert (refused.value.code, refused.value.field) == ("prompt_too_long", name)
    with pytest.raises(InvalidRequestError, match="at most 512 text tokens") as refused:
        dev("cat", seed=1, **{**SMALL, "max_sequence_length": 513})
    assert refused.value.field == "max_sequence_length"
