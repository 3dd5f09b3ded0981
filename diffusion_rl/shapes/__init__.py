"""A small world of coloured shapes: its captions, its pictures, and a rule-based judge of one against the other."""

from diffusion_rl.shapes.checker import CheckResult, Reading, check, read_picture
from diffusion_rl.shapes.drawing import PICTURE_SIZE, draw, draw_batch
from diffusion_rl.shapes.grammar import (
    CaptionError,
    Scene,
    all_scenes,
    caption,
    held_out_captions,
    parse,
    training_captions,
)

__all__ = [
    "PICTURE_SIZE",
    "CaptionError",
    "CheckResult",
    "Reading",
    "Scene",
    "all_scenes",
    "caption",
    "check",
    "draw",
    "draw_batch",
    "held_out_captions",
    "parse",
    "read_picture",
    "training_captions",
]
