"""The captions of the shapes world: what a scene holds, how it is said, and which captions no training sees."""

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeVar

T = TypeVar("T")

COUNTS = (1, 2, 3)
SIZES = ("small", "large")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "cross")
POSITIONS = ("left", "right", "top", "bottom", "center")
BACKGROUNDS = ("black", "white", "gray", "blue", "green")

HELD_OUT_COUNT = 200

_COUNT_WORDS = {1: "one", 2: "two", 3: "three"}
_PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
_PLACES = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "center": "in the center",
}
_ALLOWED = {
    "count": COUNTS,
    "size": SIZES,
    "colour": COLOURS,
    "shape": SHAPES,
    "position": POSITIONS,
    "background": BACKGROUNDS,
}


class CaptionError(ValueError):
    """A caption or a scene lies outside the grammar; the message names the part that does."""


@dataclass(frozen=True)
class Scene:
    """One to three equal shapes of one colour, somewhere on a plain background of another colour."""

    count: int
    size: str
    colour: str
    shape: str
    position: str
    background: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in _ALLOWED[field.name]:
                raise CaptionError(f"{field.name} {value!r} is none of {', '.join(map(str, _ALLOWED[field.name]))}")
        if self.colour == self.background:
            raise CaptionError(f"{self.colour} shapes cannot be seen on a {self.background} background")

    def attributes(self) -> tuple[int, ...]:
        """Return the index of each field's value among its allowed values, in the order of the fields."""
        return tuple(_ALLOWED[field.name].index(getattr(self, field.name)) for field in fields(self))


def caption(scene: Scene) -> str:
    """Return the one caption of a scene, such as `two small red circles on the left, blue background`."""
    noun = scene.shape if scene.count == 1 else _PLURALS[scene.shape]
    place = _PLACES[scene.position]
    return f"{_COUNT_WORDS[scene.count]} {scene.size} {scene.colour} {noun} {place}, {scene.background} background"


def parse(text: str) -> Scene:
    """Return the scene that a caption describes; case and spacing do not matter.

    Raises `CaptionError` for a text that is not the caption of any scene.
    """
    words = re.findall(r"[a-z]+|[^\sa-z]+", text.lower())
    if len(words) != 10 or words[7] != "," or words[9] != "background":
        raise CaptionError(f"{text!r} does not read '<count> <size> <colour> <shape> <place>, <colour> background'")
    count = _find(words[0], {word: number for number, word in _COUNT_WORDS.items()}, "count")
    nouns = {shape: shape for shape in SHAPES} if count == 1 else {plural: shape for shape, plural in _PLURALS.items()}
    shape = _find(words[3], nouns, "shape")
    position = _find(" ".join(words[4:7]), {place: name for name, place in _PLACES.items()}, "place")
    return Scene(count, words[1], words[2], shape, position, words[8])


@cache
def all_scenes() -> tuple[Scene, ...]:
    """Return every scene of the grammar once, in a fixed order."""
    return tuple(
        Scene(*values)
        for values in itertools.product(COUNTS, SIZES, COLOURS, SHAPES, POSITIONS, BACKGROUNDS)
        if values[2] != values[5]
    )


def held_out_captions() -> list[str]:
    """Return the 200 captions that no training uses: the same on every machine, spread over all attributes."""
    return list(_split()[0])


def training_captions() -> list[str]:
    """Return every caption that is not held out, in a fixed order."""
    return list(_split()[1])


def _find(words: str, known: Mapping[str, T], what: str) -> T:
    if words not in known:
        raise CaptionError(f"{what} {words!r} is none of {', '.join(known)}")
    return known[words]


@cache
def _split() -> tuple[tuple[str, ...], tuple[str, ...]]:
    captions = [caption(scene) for scene in all_scenes()]
    by_hash = sorted(captions, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    held_out = frozenset(by_hash[:HELD_OUT_COUNT])
    return tuple(by_hash[:HELD_OUT_COUNT]), tuple(text for text in captions if text not in held_out)
