"""Which encoding a client gets, by its Accept header (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Mapping

from diffusion_rl.config import Wire
from diffusion_rl.server.encoding import CONTENT_TYPES
from engine_control.errors import NotAcceptableError, UnsupportedMediaTypeError

MEDIA_TYPES: Mapping[str, Wire] = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
    "application/vnd.safetensors": "safetensors",
    "application/x-safetensors": "safetensors",
}
MAX_RANGES = 64  # of an Accept header; a browser sends eight


def choose_wire(accept: str | None, default: Wire) -> Wire:
    """The encoding with the highest quality; among equals those that the header names, in its order, then the default.
    Of a header with more than `MAX_RANGES` entries the first ones count.

    Raises:
        NotAcceptableError: the header excludes all of them.
    """
    if accept is None or not accept.strip():
        return default
    ranges = dict(_media_range(item) for item in reversed(accept.split(",", MAX_RANGES)[:MAX_RANGES]) if item.strip())
    named = [(-quality, MEDIA_TYPES[media_type]) for media_type, quality in ranges.items() if media_type in MEDIA_TYPES]
    named.reverse()
    wild = ranges.get("application/*", ranges.get("*/*", 0.0))
    others = [(-wild, wire) for wire in (default, *CONTENT_TYPES) if CONTENT_TYPES[wire] not in ranges]
    acceptable = [(quality, wire) for quality, wire in [*named, *others] if quality < 0]
    if not acceptable:
        raise NotAcceptableError(
            "no encoding of a reply fits the Accept header",
            field="Accept",
            value=accept,
            hint="Accept application/json, application/msgpack or application/vnd.safetensors.",
        )
    return min(acceptable, key=lambda pair: pair[0])[1]  # min is stable: the first of the best


def check_json_content_type(content_type: str | None) -> None:
    """Refuses a request body that is labelled as anything but JSON.

    Raises:
        UnsupportedMediaTypeError: it is; a missing label is fine.
    """
    media_type = (content_type or "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaTypeError(
            f"this route reads JSON, not {media_type[:100]}",
            field="Content-Type",
            value=content_type,
            hint="Send Content-Type: application/json.",
        )


def _media_range(item: str) -> tuple[str, float]:
    media_type, *parameters = (part.strip().lower() for part in item.split(";"))
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = min(max(float(value), 0.0), 1.0)
            except ValueError:
                quality = 0.0
    return media_type, quality
