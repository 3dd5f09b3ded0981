"""What can be refused without a model is, with the field and the way out, and without a crash."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_rl.params import BOOLEANS, SEQUENCES, Limits, RolloutParams, params_from_mapping
from diffusion_rl.schedulers import step_kinds
from engine_control.errors import InvalidRequestError, UnknownFieldError, from_message

KINDS = step_kinds.names()
AFFINE = {"rollout_sde_type": "affine"}


def check(**fields: Any) -> RolloutParams:
    params = params_from_mapping({"prompt": "a red ball", **fields})
    params.validate(Limits(), step_kinds=KINDS)
    return params


def test_the_defaults_are_those_of_the_protocol() -> None:
    params = check()
    assert params.rollout
    assert params.rollout_sde_type == "sde"
    assert params.rollout_noise_level == 0.7
    assert params.rollout_debug_mode
    assert not params.rollout_log_prob_no_const
    assert not params.rollout_return_denoising_env
    assert not params.rollout_return_dit_trajectory
    assert params.num_outputs_per_prompt == 1
    assert params.generator_device == "cuda"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "  \n"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "2"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seeds": [1, 2]}, "seeds"),
        ({"seeds": 5}, "seeds"),
        ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt"),
        ({"num_outputs_per_prompt": 65}, "num_outputs_per_prompt"),
        ({"num_outputs_per_prompt": "2"}, "num_outputs_per_prompt"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 201}, "num_inference_steps"),
        ({"width": 4096, "height": 4096}, "width"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": 1e39}, "guidance_scale"),
        ({"rollout_noise_level": -0.1}, "rollout_noise_level"),
        ({"rollout_noise_level": float("inf")}, "rollout_noise_level"),
        ({"rollout_noise_level": 1e30}, "rollout_noise_level"),
        ({"rollout_noise_level": 1.1, "rollout_sde_type": "cps"}, "rollout_noise_level"),
        ({"rollout_sde_type": "sdee"}, "rollout_sde_type"),
        ({"rollout": "no"}, "rollout"),
        ({"rollout_sde_step_indices": 1}, "rollout_sde_step_indices"),
        ({"rollout_sde_step_indices": [0, 10], "num_inference_steps": 10}, "rollout_sde_step_indices"),
        ({"rollout_sde_step_indices": [1, 1], "num_inference_steps": 10}, "rollout_sde_step_indices"),
        ({"rollout_return_step_indices": [11], "num_inference_steps": 10}, "rollout_return_step_indices"),
        ({"rollout_return_step_indices": [-1], "num_inference_steps": 10}, "rollout_return_step_indices"),
        ({"rollout_return_step_indices": [], "num_inference_steps": 10}, "rollout_return_step_indices"),
        ({"rollout_sde_window_size": 11, "num_inference_steps": 10}, "rollout_sde_window_size"),
        (
            {"rollout_sde_window_size": 3, "rollout_sde_window_range": [0, 2], "num_inference_steps": 10},
            "rollout_sde_window_range",
        ),
        ({"rollout_sde_window_range": [0, 2], "num_inference_steps": 10}, "rollout_sde_window_range"),
        (
            {"rollout_sde_window_size": 2, "rollout_sde_window_range": ["a", "b"], "num_inference_steps": 10},
            "rollout_sde_window_range",
        ),
        (
            {"rollout_sde_window_size": 2, "rollout_sde_step_indices": [1], "num_inference_steps": 10},
            "rollout_sde_window_size",
        ),
        ({"sigmas": []}, "sigmas"),
        ({"sigmas": [0.5, 0.9]}, "sigmas"),
        ({"sigmas": [1.5, 0.5]}, "sigmas"),
        ({"sigmas": [1.0, 0.0, 0.0]}, "sigmas"),
        ({"sigmas": [1.0, 0.5, 0.0], "num_inference_steps": 3}, "sigmas"),
        ({"sigmas": [1.0, 0.5, 0.0], "flow_shift": 3.0}, "flow_shift"),
        ({"sigmas": [1 - i / 300 for i in range(300)]}, "sigmas"),
        ({"flow_shift": 0}, "flow_shift"),
        (AFFINE, "affine_coefficients"),
        ({"affine_coefficients": [[1, 0, 0, 0]]}, "affine_coefficients"),
        ({**AFFINE, "affine_coefficients": [[1, 0, 0]]}, "affine_coefficients"),
        ({**AFFINE, "affine_coefficients": [[1, 0, 0, -1]]}, "affine_coefficients"),
        ({**AFFINE, "affine_coefficients": [[1e39, 0, 0, 1]]}, "affine_coefficients"),
        ({**AFFINE, "affine_coefficients": [[1, 0, 0, 1]], "num_inference_steps": 2}, "affine_coefficients"),
        ({"max_sequence_length": 4096}, "max_sequence_length"),
        ({"output_type": "video"}, "output_type"),
        ({"output_dtype": "int8"}, "output_dtype"),
        ({"rollout_latents_dtype": "fp8"}, "rollout_latents_dtype"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**fields)
    assert caught.value.field == field
    assert 400 <= caught.value.status < 500


def test_a_misspelt_field_is_refused_with_the_right_one() -> None:
    with pytest.raises(UnknownFieldError, match="Did you mean 'rollout_noise_level'"):
        params_from_mapping({"prompt": "x", "rollout_noise_levle": 1})
    with pytest.raises(InvalidRequestError, match="needs a prompt"):
        params_from_mapping({"seed": 1}).validate(Limits(), step_kinds=KINDS)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({*BOOLEANS, *SEQUENCES, "seed", "width", "prompt", "sigmas"})), anything))
def test_no_value_of_any_field_crashes_the_check(fields: dict[str, Any]) -> None:
    with suppress(InvalidRequestError):
        check(num_inference_steps=4, **fields)


def test_an_error_repeats_only_a_little_of_what_was_sent() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(rollout_sde_type="x" * 10**6)
    assert len(str(caught.value)) < 4000
    with pytest.raises(UnknownFieldError) as unknown:
        params_from_mapping({"prompt": "x", "y" * 10**6: 1})
    assert len(str(unknown.value)) < 4000


def test_an_error_crosses_a_process_and_stays_what_it_is() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(seed=-1)
    back = from_message(caught.value.to_message())
    assert type(back) is type(caught.value)
    assert back.to_message() == caught.value.to_message()
