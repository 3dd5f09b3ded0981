"""Pictures of the shapes world, drawn with anti-aliased edges: one in numpy, or a batch on any torch device."""

from types import ModuleType
from typing import Any

import numpy as np
import torch

from diffusion_rl.shapes.grammar import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, Scene

PICTURE_SIZE = 64
"""Height and width of a picture in pixels."""

PALETTE = {
    "red": (220, 40, 40),
    "green": (40, 165, 75),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 185),
    "white": (242, 242, 242),
    "black": (18, 18, 18),
    "gray": (128, 128, 128),
}
"""The exact colour of each colour word, 8 bits for red, green and blue."""

ANCHORS = {"left": (16.0, 32.0), "right": (48.0, 32.0), "top": (32.0, 16.0), "bottom": (32.0, 48.0), "center": (32, 32)}
"""Where the middle of a scene's shapes lies for each position word: x, y in pixels before jitter."""

RADII = {"small": 4.4, "large": 7.6}
"""The radius in pixels of a circle of each size before jitter; the other shapes have about a circle's area."""

JITTER_COUNT = 11
"""How many numbers in [-1, 1] fix all that a scene leaves open: 2 for the group, then 2 places and a size a shape."""

_REACH = {"circle": 1.0, "square": 0.9, "triangle": 1.15, "cross": 1.15}
_ARM = 0.36
_PITCH = 21.0
_GROUP_JITTER = 2.0
_ROW_JITTER = (3.0, 3.0, 0.5)
_SHAPE_JITTER = 0.75
_SIZE_JITTER = 0.05


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return one picture of the scene as uint8 [64, 64, 3]; `rng` fixes exact places and sizes."""
    jitter = rng.uniform(-1.0, 1.0, size=(1, JITTER_COUNT)).astype(np.float32)
    picture = _paint(np, np.array([scene.attributes()]), jitter)[0]
    return np.round(picture.transpose(1, 2, 0) * 255.0).astype(np.uint8)


def draw_batch(attributes: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return pictures as float32 [batch, 3, 64, 64] in [0, 1], on the device of `attributes`.

    `attributes` is int64 [batch, 6], a row being `Scene.attributes()`. The generator lies on the same device.
    """
    size = (attributes.shape[0], JITTER_COUNT)
    jitter = torch.rand(size, generator=generator, device=attributes.device) * 2.0 - 1.0
    return _paint(torch, attributes, jitter)


def coverage(xp: ModuleType, shape: str, dx: Any, dy: Any, radius: Any) -> Any:
    """Return how much of each pixel a shape covers, in [0, 1], for offsets in pixels from the shape's middle.

    `xp` is numpy or torch; `dx`, `dy` and `radius` are its arrays and broadcast.
    """
    reach = radius * _REACH[shape]
    x, y = xp.abs(dx), xp.abs(dy)
    if shape == "circle":
        distance = xp.sqrt(dx * dx + dy * dy) - reach
    elif shape == "square":
        distance = xp.maximum(x, y) - reach
    elif shape == "triangle":
        distance = xp.maximum((2.0 * x - dy - reach) / 5.0**0.5, dy - reach)
    else:
        arm = reach * _ARM
        distance = xp.minimum(xp.maximum(x - reach, y - arm), xp.maximum(x - arm, y - reach))
    return xp.clip(0.5 - distance, 0.0, 1.0)


def _paint(xp: ModuleType, attributes: Any, jitter: Any) -> Any:
    """Return pictures [batch, 3, 64, 64] in [0, 1] as arrays of `xp`."""
    count, size, colour, shape, position, background = (attributes[:, column] for column in range(6))
    x, y, radius = _layout(xp, count, size, position, jitter)
    ticks = _table(xp, [pixel + 0.5 for pixel in range(PICTURE_SIZE)], attributes)
    dx = ticks[None, None, None, :] - x[:, :, None, None]
    dy = ticks[None, None, :, None] - y[:, :, None, None]
    covered = 0.0
    for number, name in enumerate(SHAPES):
        chosen = 1.0 * (shape == number)[:, None, None, None]
        covered = covered + chosen * coverage(xp, name, dx, dy, radius[:, :, None, None])
    present = 1.0 * (_table(xp, [0.0, 1.0, 2.0], attributes)[None, :] <= count[:, None])
    covered = xp.clip((covered * present[:, :, None, None]).sum(1), 0.0, 1.0)[:, None]
    ink = _table(xp, [PALETTE[name] for name in COLOURS], attributes)[colour][:, :, None, None]
    paper = _table(xp, [PALETTE[name] for name in BACKGROUNDS], attributes)[background][:, :, None, None]
    return (paper + covered * (ink - paper)) / 255.0


def _layout(xp: ModuleType, count: Any, size: Any, position: Any, jitter: Any) -> tuple[Any, Any, Any]:
    """Return x, y and radius in pixels, each [batch, 3]: a row, or for left and right a column, around the anchor."""
    anchor = _table(xp, [ANCHORS[name] for name in POSITIONS], count)[position]
    upright = _table(xp, [1.0, 1.0, 0.0, 0.0, 0.0], count)[position][:, None]
    along = _PITCH * (_table(xp, [0.0, 1.0, 2.0], count)[None, :] - 0.5 * count[:, None])
    along = along + _table(xp, _ROW_JITTER, count)[count][:, None] * jitter[:, 0:1]
    across = _GROUP_JITTER * jitter[:, 1:2]
    x = anchor[:, 0:1] + upright * across + (1.0 - upright) * along + _SHAPE_JITTER * jitter[:, 2:5]
    y = anchor[:, 1:2] + upright * along + (1.0 - upright) * across + _SHAPE_JITTER * jitter[:, 5:8]
    radius = _table(xp, [RADII["small"], RADII["large"]], count)[size][:, None]
    return x, y, radius * (1.0 + _SIZE_JITTER * jitter[:, 8:11])


def _table(xp: ModuleType, values: Any, like: Any) -> Any:
    if xp is torch:
        return torch.tensor(values, dtype=torch.float32, device=like.device)
    return np.asarray(values, dtype=np.float32)
