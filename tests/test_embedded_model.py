"""The model in the package is small, real, and draws what its captions say, though not always."""

from __future__ import annotations

import json

import pytest
from equality import assert_same_bits

from diffusion_rl import RolloutPipeline
from diffusion_rl.assets import embedded_model_path
from diffusion_rl.shapes import check, held_out_captions


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return RolloutPipeline.from_pretrained("embedded", device="cpu")


def test_its_files_are_small() -> None:
    files = [f for f in embedded_model_path().parent.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 16 * 2**20


def test_it_can_be_split_over_ranks_and_every_width_suits_the_row_invariant_operations(
    pipeline: RolloutPipeline,
) -> None:
    config = pipeline.transformer.config
    assert config.num_attention_heads % 8 == 0
    for width in (config.num_attention_heads * config.attention_head_dim, config.joint_attention_dim):
        assert width % 64 == 0
    channels, height, width = pipeline.engine.family.latent_shape(64, 64)
    assert (height // config.patch_size) * (width // config.patch_size) >= 64
    assert channels * height * width % 64 == 0
    assert pipeline.engine.family.pipeline.tokenizer_max_length <= 32
    assert pipeline.engine.family.defaults.max_sequence_length == 8


def test_between_55_and_85_percent_of_held_out_captions_are_drawn_right(pipeline: RolloutPipeline) -> None:
    captions = held_out_captions()
    assert len(captions) == len(set(captions)) == 200
    samples = pipeline(captions, seed=0, rollout=False, num_inference_steps=10)
    right = sum(check(s.generated_output, s.prompt).correct for s in samples)
    assert 0.55 <= right / len(captions) <= 0.85


def test_its_defaults_are_those_of_its_folder(pipeline: RolloutPipeline) -> None:
    written = json.loads((embedded_model_path() / "rollout_defaults.json").read_text())
    sample = pipeline(held_out_captions()[0], seed=0, rollout=False)[0]
    assert sample.guidance_scale == written["guidance_scale"]
    assert len(sample.rollout_step_kinds) == written["num_inference_steps"]
    assert (sample.height, sample.width) == (64, 64)


def test_its_pictures_have_the_same_bits_decoded_together_and_alone(pipeline: RolloutPipeline) -> None:
    caption = held_out_captions()[3]
    group = pipeline(caption, seed=10, num_outputs_per_prompt=11)
    for index in (0, 5, 10):
        assert_same_bits(group[index], pipeline(caption, seed=10 + index)[0])
