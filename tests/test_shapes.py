"""The shapes world: its grammar, its pictures, and the checker that reads them."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from diffusion_rl.shapes import (
    CaptionError,
    CheckResult,
    Scene,
    all_scenes,
    caption,
    check,
    draw,
    draw_batch,
    held_out_captions,
    parse,
    read_picture,
    training_captions,
)

ATTRIBUTES = tuple(field.name for field in fields(CheckResult))
SCENE = Scene(2, "small", "red", "circle", "left", "blue")
SWAPS = {
    "count": 3,
    "size": "large",
    "colour": "yellow",
    "shape": "square",
    "position": "bottom",
    "background": "black",
}


def blurred(picture: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Return a uint8 picture after a small blur and noise of this standard deviation, in 8-bit steps."""
    padded = np.pad(picture.astype(np.float32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    soft = (4.0 * padded[1:-1, 1:-1] + around) / 8.0 + rng.normal(0.0, noise, picture.shape)
    return np.clip(np.round(soft), 0, 255).astype(np.uint8)


def wrong_attributes(result: CheckResult) -> list[str]:
    return [name for name in ATTRIBUTES if not getattr(result, name)]


def test_a_caption_says_every_attribute_of_its_scene() -> None:
    assert caption(SCENE) == "two small red circles on the left, blue background"
    assert caption(replace(SCENE, count=1, position="center")) == "one small red circle in the center, blue background"


def test_every_caption_parses_back_to_its_scene_and_no_two_are_equal() -> None:
    scenes = all_scenes()
    assert [parse(caption(scene)) for scene in scenes] == list(scenes)
    assert len({caption(scene) for scene in scenes}) == len(scenes) == 3240


def test_parsing_ignores_case_and_spacing() -> None:
    assert parse("  Two small RED circles on the  left ,blue background") == SCENE


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "does not read"),
        ("a photograph of a cat", "does not read"),
        ("four small red circles on the left, blue background", "count 'four'"),
        ("two small red circle on the left, blue background", "shape 'circle'"),
        ("two small pink circles on the left, blue background", "colour 'pink'"),
        ("two huge red circles on the left, blue background", "size 'huge'"),
        ("two small red circles at the left, blue background", "place 'at the left'"),
        ("two small blue circles on the left, blue background", "cannot be seen"),
    ],
)
def test_a_caption_outside_the_grammar_is_refused_by_the_part_at_fault(text: str, named: str) -> None:
    with pytest.raises(CaptionError, match=named):
        parse(text)


def test_the_held_out_captions_are_200_and_never_used_in_training() -> None:
    held_out, training = held_out_captions(), training_captions()
    assert len(held_out) == len(set(held_out)) == 200
    assert not set(held_out) & set(training)
    assert len(held_out) + len(training) == len(all_scenes())


def test_the_held_out_captions_are_the_same_on_every_machine() -> None:
    assert held_out_captions()[:2] == [
        "one small blue circle on the right, green background",
        "two large green circles at the top, blue background",
    ]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_the_held_out_captions_spread_over_all_values_of(attribute: str) -> None:
    values = Counter(getattr(scene, attribute) for scene in all_scenes())
    held_out = Counter(getattr(parse(text), attribute) for text in held_out_captions())
    for value, number in values.items():
        assert held_out[value] >= 0.5 * 200 * number / len(all_scenes())


def test_the_same_seed_draws_the_same_picture_and_another_seed_a_different_one() -> None:
    first, again, other = (draw(SCENE, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (64, 64, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_drawn_pictures_of_every_scene_pass_the_checker() -> None:
    rng = np.random.default_rng(0)
    for scene in all_scenes()[::7]:
        result = check(draw(scene, rng), scene)
        assert result.score == 1.0, (caption(scene), wrong_attributes(result))
        assert result.correct


def test_pictures_drawn_in_a_batch_pass_the_checker() -> None:
    scenes = all_scenes()[3::29]
    pictures = draw_batch(torch.tensor([scene.attributes() for scene in scenes]), torch.Generator().manual_seed(0))
    assert pictures.shape == (len(scenes), 3, 64, 64)
    assert pictures.dtype == torch.float32
    assert pictures.min() >= 0.0
    assert pictures.max() <= 1.0
    for picture, scene in zip(pictures, scenes, strict=True):
        assert check(picture, caption(scene)).correct, caption(scene)


def test_blurred_and_noisy_pictures_nearly_always_pass_the_checker() -> None:
    rng = np.random.default_rng(0)
    scenes = all_scenes()[::11]
    passed = [check(blurred(draw(scene, rng), 6.0, rng), scene).correct for scene in scenes]
    assert np.mean(passed) >= 0.98


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_one_wrong_attribute_fails_alone(attribute: str) -> None:
    for seed in range(5):
        picture = draw(replace(SCENE, **{attribute: SWAPS[attribute]}), np.random.default_rng(seed))
        result = check(picture, SCENE)
        assert wrong_attributes(result) == [attribute]
        assert not result.correct
        assert result.score == pytest.approx(5 / 6)


def test_random_pairs_of_scenes_disagree_in_exactly_the_attributes_that_differ() -> None:
    rng = np.random.default_rng(0)
    scenes = all_scenes()
    for _ in range(150):
        drawn, asked = (scenes[index] for index in rng.choice(len(scenes), size=2, replace=False))
        differing = {name for name in ATTRIBUTES if getattr(drawn, name) != getattr(asked, name)}
        assert set(wrong_attributes(check(draw(drawn, rng), asked))) == differing, (drawn, asked)


def test_an_empty_picture_has_only_its_background_right() -> None:
    picture = np.zeros((64, 64, 3), dtype=np.uint8) + np.array([40, 80, 220], dtype=np.uint8)
    assert wrong_attributes(check(picture, SCENE)) == ["colour", "shape", "count", "position", "size"]


def test_noise_is_never_correct() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        assert not check(rng.random((3, 64, 64)), SCENE).correct


def test_a_picture_that_is_not_finite_is_judged_and_found_wrong() -> None:
    assert not check(np.full((3, 64, 64), np.nan), SCENE).correct


def test_both_picture_forms_and_torch_tensors_read_alike() -> None:
    picture = draw(SCENE, np.random.default_rng(0))
    channels_first = picture.transpose(2, 0, 1).astype(np.float32) / 255.0
    forms = [picture, torch.from_numpy(picture), channels_first, torch.from_numpy(channels_first)]
    assert all(check(form, SCENE).correct for form in forms)
    assert read_picture(torch.from_numpy(channels_first).bfloat16()).position == "left"


@pytest.mark.parametrize("form", [np.zeros((64, 64), np.uint8), np.zeros((3, 32, 32), np.float32), np.zeros(7)])
def test_an_array_of_another_form_is_refused(form: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a picture is"):
        check(form, SCENE)
