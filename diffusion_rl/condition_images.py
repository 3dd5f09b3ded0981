"""Pictures that a request brings for a model to edit: read from what Python callers and bodies hold, within limits.

Read, a picture is a uint8 tensor `[3, H, W]` on the CPU. Nothing here opens an address, and a service opens no path.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from diffusion_rl.batch import Pictures
from engine_control.errors import InvalidRequestError, LimitExceededError

FORMATS = ("PNG", "JPEG", "WEBP")
UNREADABLE = (OSError, ValueError, SyntaxError, TypeError, LookupError, EOFError, struct.error)  # what Pillow raises
HINT = "Send a picture as a tensor [3, H, W] (uint8, or floats in [0, 1]), or the bytes of a PNG, JPEG or WebP file."
WIRE_HINT = (
    "Send base64 of a PNG, JPEG or WebP file, that as a data URL, or a tensor. No address and no path is opened."
)


def load_images(value: Any, *, max_pixels: float) -> tuple[torch.Tensor, ...]:
    """What `image` may hold in Python, one picture or a list: tensors, PIL images, and paths of files.

    Raises:
        InvalidRequestError: a picture can't be read.
        LimitExceededError: it has more pixels than `max_pixels`.
    """
    return tuple(_load(item, max_pixels) for item in _items(value))


def load_wire_images(value: Any, *, most: int, max_pixels: float) -> tuple[torch.Tensor, ...]:
    """What `image` may hold in a body, one picture or a list, its tensors decoded: those, and base64.

    Raises:
        InvalidRequestError, LimitExceededError: as `read_pictures`; more than `most` aren't decoded at all.
    """
    return tuple(
        _from_file(_from_base64(item), max_pixels) if isinstance(item, str) else _from_tensor(item, max_pixels)
        for item in _counted(value, most)
    )


def read_pictures(value: Any, *, most: int, max_pixels: float) -> Pictures:
    """The pictures of a request as it reaches the engine: tensors alone.

    Raises:
        InvalidRequestError, LimitExceededError: as `load_images`; or they are more than `most`, or none.
    """
    return Pictures(tuple(_from_tensor(item, max_pixels) for item in _counted(value, most)))


def plain_picture(side: int) -> torch.Tensor:
    """A gray square, for probes that need some picture."""
    return torch.full((3, side, side), 128, dtype=torch.uint8)


def pil_image(picture: torch.Tensor) -> Image.Image:
    """A picture `[3, H, W]` as Pillow has it."""
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _counted(value: Any, most: int) -> Sequence[Any]:
    items = _items(value)
    if not 1 <= len(items) <= most:
        many = "one picture" if most == 1 else f"1 to {most} pictures"
        raise _refused(f"{len(items)} pictures, and the loaded model takes {many}", len(items), "Send as many.")
    return items


def _load(value: Any, max_pixels: float) -> torch.Tensor:
    if isinstance(value, Image.Image):
        return _from_pil(value, max_pixels)
    if isinstance(value, bytes):
        return _from_file(value, max_pixels)
    if isinstance(value, str | Path):
        try:
            content = Path(value).read_bytes()
        except (OSError, ValueError) as error:
            raise _refused(f"can't be read: {error}"[:200], str(value)[:80], HINT) from error
        return _from_file(content, max_pixels)
    return _from_tensor(value, max_pixels)


def _from_tensor(value: Any, max_pixels: float) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise _refused("must be a picture", type(value).__name__, HINT)
    picture = value.squeeze(0) if value.dim() == 4 else value
    if picture.dim() != 3 or picture.shape[0] != 3 or not picture.numel():
        raise _refused("must be [3, H, W], or that with a batch axis of 1", list(value.shape), HINT)
    _check_pixels(picture.shape[2], picture.shape[1], max_pixels)
    picture = picture.detach().cpu()
    if picture.dtype == torch.uint8:
        return picture
    if not picture.is_floating_point():
        raise _refused("must be uint8, or floating-point numbers in [0, 1]", str(value.dtype), HINT)
    picture = picture.float()
    if not ((picture >= 0) & (picture <= 1)).all():  # a NaN is neither
        raise _refused("holds numbers outside of [0, 1]", None, "Scale it to [0, 1], or send uint8.")
    return (picture * 255).round().to(torch.uint8)


def _from_base64(text: str) -> bytes:
    content = text
    if text.startswith("data:"):
        head, _, content = text[:256].partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise _refused("is no data URL of a picture in base64", text[:40], WIRE_HINT)
        content = text[len(head) + 1 :]
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused("is no base64", text[:40], WIRE_HINT) from error


def _from_file(content: bytes, max_pixels: float) -> torch.Tensor:
    """Of a file's bytes; its size is checked before a pixel is decoded."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_pixels(image.width, image.height, max_pixels)
            return _from_pil(ImageOps.exif_transpose(image), max_pixels)
    except Image.DecompressionBombError as error:
        raise _too_large("far more pixels than Pillow decodes", None) from error
    except UNREADABLE as error:
        raise _refused("is no picture that can be read", f"{len(content)} bytes", HINT) from error


def _from_pil(image: Image.Image, max_pixels: float) -> torch.Tensor:
    _check_pixels(image.width, image.height, max_pixels)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def _check_pixels(width: int, height: int, max_pixels: float) -> None:
    if width * height > max_pixels:
        raise _too_large(f"{width} x {height} = {width * height} pixels, at most {max_pixels} are accepted", width)


def _too_large(what: str, value: object) -> LimitExceededError:
    hint = "Send a smaller picture (the model scales it down anyway), or raise the server's --max-image-pixels."
    return LimitExceededError(what, field="image", value=value, hint=hint)


def _refused(what: str, value: object, hint: str) -> InvalidRequestError:
    return InvalidRequestError(what, field="image", value=value, hint=hint)
