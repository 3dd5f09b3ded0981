"""A judge of pictures by rules alone: it reads colours, shapes, places and sizes off the pixels, with no model."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from diffusion_rl.shapes.drawing import ANCHORS, PALETTE, PICTURE_SIZE, RADII, coverage
from diffusion_rl.shapes.grammar import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, Scene, parse

_PALETTE_TOLERANCE = 60.0
"""The largest distance, in 8-bit RGB, at which a colour still counts as a colour of the palette."""
_FAINTEST_SHAPE = 55.0
_SMALLEST_SHAPE = 14.0
"""Specks that cover fewer pixels than this are noise, not shapes."""
_LARGE_FROM = 100.0
"""The area in pixels that parts large shapes from small ones."""
_AREA_RANGE = (32.0, 260.0)
_SHAPE_MATCH = 0.74
_POSITION_TOLERANCE = 9.0
_TICKS = np.arange(PICTURE_SIZE, dtype=np.float32) + 0.5


@dataclass(frozen=True)
class FoundShape:
    """One connected spot of a picture: `colour`, `shape` and `size` are None where no rule applies."""

    colour: str | None
    shape: str | None
    size: str | None
    area: float
    x: float
    y: float


@dataclass(frozen=True)
class Reading:
    """What a picture shows; `position` is None where the shapes' middle lies near no anchor."""

    background: str | None
    position: str | None
    found: tuple[FoundShape, ...]


@dataclass(frozen=True)
class CheckResult:
    """Which attributes of a scene a picture shows; `score` is the fraction of the six that it does."""

    colour: bool
    shape: bool
    count: bool
    position: bool
    size: bool
    background: bool

    @property
    def correct(self) -> bool:
        """Whether the picture shows all six attributes."""
        return all(getattr(self, field.name) for field in fields(self))

    @property
    def score(self) -> float:
        """The fraction of the six attributes that the picture shows, in [0, 1]."""
        return sum(bool(getattr(self, field.name)) for field in fields(self)) / len(fields(self))


def check(image: Any, scene_or_caption: Scene | str) -> CheckResult:
    """Judge a picture against a scene, or against the scene of a caption.

    `image` is uint8 [64, 64, 3], or floating point [3, 64, 64] in [0, 1]: a numpy array or a torch tensor.
    Raises `CaptionError` for a caption outside the grammar and `ValueError` for an array of another form.
    """
    scene = parse(scene_or_caption) if isinstance(scene_or_caption, str) else scene_or_caption
    reading = read_picture(image)
    found = reading.found
    return CheckResult(
        colour=bool(found) and all(spot.colour == scene.colour for spot in found),
        shape=bool(found) and all(spot.shape == scene.shape for spot in found),
        count=len(found) == scene.count,
        position=reading.position == scene.position,
        size=bool(found) and all(spot.size == scene.size for spot in found),
        background=reading.background == scene.background,
    )


def read_picture(image: Any) -> Reading:
    """Read a picture, in a form that `check` takes, with no caption at hand."""
    pixels = _pixels(image)
    ring = np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3)])
    ring = np.concatenate([ring, pixels[:, -2:].reshape(-1, 3)])
    paper = np.median(ring, axis=0)
    contrast = np.sqrt(((pixels - paper) ** 2).sum(-1))
    found = tuple(
        spot
        for mask in _sharp_masks(contrast)
        if (spot := _read_shape(pixels, contrast, mask, paper)).area >= _SMALLEST_SHAPE
    )
    return Reading(_nearest_colour(paper, BACKGROUNDS), _position(found), found)


def label_spots(mask: np.ndarray) -> list[np.ndarray]:
    """Return a boolean mask for each 4-connected spot of a boolean [height, width] mask, in reading order."""
    height, width = mask.shape
    outside = height * width
    labels = np.full((height + 2, width + 2), outside)
    labels[1:-1, 1:-1] = np.where(mask, np.arange(outside).reshape(height, width), outside)
    while True:
        inner = labels[1:-1, 1:-1]
        around = np.minimum(np.minimum(labels[:-2, 1:-1], labels[2:, 1:-1]), labels[1:-1, :-2])
        lowest = np.where(mask, np.minimum(np.minimum(around, labels[1:-1, 2:]), inner), outside)
        jumped = np.append(lowest.ravel(), outside)[lowest]
        if np.array_equal(jumped, inner):
            return [inner == label for label in np.unique(inner[mask])]
        labels[1:-1, 1:-1] = jumped


def _pixels(image: Any) -> np.ndarray:
    """Return float32 [64, 64, 3] in 0 to 255."""
    array = np.asarray(image.detach().float().cpu() if hasattr(image, "detach") else image)
    if getattr(image, "dtype", None) is not None and "uint8" in str(image.dtype):
        array = array.astype(np.uint8)
    side = PICTURE_SIZE
    if array.dtype == np.uint8 and array.shape == (side, side, 3):
        return array.astype(np.float32)
    if np.issubdtype(array.dtype, np.floating) and array.shape == (3, side, side):
        return np.clip(np.nan_to_num(array.astype(np.float32)), 0.0, 1.0).transpose(1, 2, 0) * 255.0
    raise ValueError(
        f"a picture is uint8 [{side}, {side}, 3] or floating point [3, {side}, {side}], "
        f"not {array.dtype} {list(array.shape)}"
    )


def _sharp_masks(contrast: np.ndarray) -> list[np.ndarray]:
    """Return the spots that stand out from the background, each cut at half of its own contrast."""
    sharp = np.zeros(contrast.shape, dtype=bool)
    for rough in label_spots(contrast > _FAINTEST_SHAPE):
        values = np.sort(contrast[rough])[-24:]
        sharp |= rough & (contrast > max(_FAINTEST_SHAPE, 0.5 * values.mean()))
    return [mask for mask in label_spots(sharp) if mask.sum() >= 0.5 * _SMALLEST_SHAPE]


def _read_shape(pixels: np.ndarray, contrast: np.ndarray, mask: np.ndarray, paper: np.ndarray) -> FoundShape:
    strength = contrast[mask]
    ink = pixels[mask][strength >= 0.85 * np.sort(strength)[-24:].mean()].mean(axis=0)
    grown = mask.copy()
    grown[1:] |= mask[:-1]
    grown[:-1] |= mask[1:]
    grown[:, 1:] |= mask[:, :-1]
    grown[:, :-1] |= mask[:, 1:]
    axis = ink - paper
    covered = np.clip((pixels - paper) @ axis / max(float(axis @ axis), 1.0), 0.0, 1.0) * grown
    area = float(covered.sum())
    x = float((covered.sum(0) * _TICKS).sum() / area)
    y = float((covered.sum(1) * _TICKS).sum() / area)
    size = ("large" if area >= _LARGE_FROM else "small") if _AREA_RANGE[0] <= area <= _AREA_RANGE[1] else None
    return FoundShape(_nearest_colour(ink, COLOURS), _nearest_shape(covered, mask, area), size, area, x, y)


def _nearest_shape(covered: np.ndarray, mask: np.ndarray, area: float) -> str | None:
    """Return the shape that, at the same place and area, overlaps best with the covered pixels; None below 0.74."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    middle_x, middle_y = (columns[0] + columns[-1] + 1) / 2.0, (rows[0] + rows[-1] + 1) / 2.0
    best, best_match = None, _SHAPE_MATCH
    for shape in SHAPES:
        unit = float(coverage(np, shape, *_offsets(32.0, 32.0), RADII["large"]).sum()) / RADII["large"] ** 2
        radius = (area / unit) ** 0.5
        for shift in (-0.7, 0.0, 0.7):
            template = coverage(np, shape, *_offsets(middle_x, middle_y + shift), radius)
            match = np.minimum(covered, template).sum() / np.maximum(covered, template).sum()
            if match > best_match:
                best, best_match = shape, match
    return best


def _offsets(x: float, y: float) -> tuple[np.ndarray, np.ndarray]:
    return (_TICKS - x)[None, :], (_TICKS - y)[:, None]


def _nearest_colour(colour: np.ndarray, names: tuple[str, ...]) -> str | None:
    """Return the palette's nearest colour word, or None where it is far off or is not one of `names`."""
    distances = {name: float(np.linalg.norm(colour - np.array(PALETTE[name]))) for name in PALETTE}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if nearest in names and distances[nearest] <= _PALETTE_TOLERANCE else None


def _position(found: tuple[FoundShape, ...]) -> str | None:
    if not found:
        return None
    x, y = np.mean([spot.x for spot in found]), np.mean([spot.y for spot in found])
    distances = {name: float(np.hypot(x - ANCHORS[name][0], y - ANCHORS[name][1])) for name in POSITIONS}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] <= _POSITION_TOLERANCE else None
