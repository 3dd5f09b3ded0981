"""The reward: what the rule-based checker finds, made gradual where the base model fails.

The checker says yes or no to each attribute. A group whose pictures all fail in one attribute would teach nothing by
it, and so it is with the base model's small crosses, nearly all of which read as circles. So the shape is also graded:
by how much more the spots look like the shape that was asked for than like the next best one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from diffusion_rl.shapes import PICTURE_SIZE, Reading, check, parse, read_picture
from diffusion_rl.shapes.drawing import PALETTE, RADII, coverage
from diffusion_rl.shapes.grammar import SHAPES

GRADED_SHARE = 0.5
"""How much of the reward is graded; the rest is 0 or 1."""
STEEPNESS = 8.0
"""A margin of 1 / 8 in overlap is worth 0.73, none 0.5."""
_TICKS = np.arange(PICTURE_SIZE, dtype=np.float32) + 0.5
_SHIFTS = (-0.7, 0.0, 0.7)
_RISE = {"triangle": 1.15 / 3}
"""How far, in radii, a shape's box has its middle above the centre of its area."""


@dataclass(frozen=True)
class Reward:
    """`value` in [0, 1] is what training sees; `correct` is the checker's verdict on all attributes."""

    value: float
    correct: bool


def reward_of(picture: torch.Tensor, caption: str) -> Reward:
    """The reward of a picture `[3, 64, 64]` in [0, 1] for a caption of the shapes grammar."""
    verdict = check(picture, caption)
    others = (verdict.score * 6 - verdict.shape) / 5
    graded = others * shape_likeness(picture, caption)
    return Reward((1 - GRADED_SHARE) * verdict.correct + GRADED_SHARE * graded, verdict.correct)


def shape_likeness(picture: torch.Tensor, caption: str) -> float:
    """How much more the picture's spots look like the caption's shape than like another, in [0, 1]; 0 without spots."""
    scene, reading = parse(caption), read_picture(picture)
    if not reading.found:
        return 0.0
    paper, ink = (np.array(PALETTE[name], dtype=np.float32) for name in (scene.background, scene.colour))
    pixels = picture.detach().float().cpu().numpy().transpose(1, 2, 0) * 255.0
    covered = np.clip((pixels - paper) @ (ink - paper) / float((ink - paper) @ (ink - paper)), 0.0, 1.0)
    overlaps = {shape: _overlaps(covered, reading, shape) for shape in SHAPES}
    wanted = overlaps.pop(scene.shape)
    margins = wanted - np.max(list(overlaps.values()), axis=0)
    return float(np.mean(1.0 / (1.0 + np.exp(-STEEPNESS * margins))))


def _overlaps(covered: np.ndarray, reading: Reading, shape: str) -> np.ndarray:
    """For each spot the intersection over union with the shape, at the spot's middle and of its area."""
    unit = float(coverage(np, shape, (_TICKS - 32)[None, :], (_TICKS - 32)[:, None], RADII["large"]).sum())
    found = []
    for spot in reading.found:
        radius = RADII["large"] * (max(spot.area, 1.0) / unit) ** 0.5
        rows, columns = (np.abs(_TICKS - middle) < 2 * radius for middle in (spot.y, spot.x))
        here, best = covered[np.ix_(rows, columns)], 0.0
        for shift in _SHIFTS:
            middle = spot.y - _RISE.get(shape, 0.0) * radius + shift
            drawn = coverage(np, shape, (_TICKS[columns] - spot.x)[None, :], (_TICKS[rows] - middle)[:, None], radius)
            best = max(best, float(np.minimum(here, drawn).sum() / np.maximum(here, drawn).sum()))
        found.append(best)
    return np.array(found)
