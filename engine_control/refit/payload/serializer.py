"""The sender's half of pickled payloads: handles to memory that the receiver maps, as base64 text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import cast

import torch
import torch.multiprocessing  # registers how tensors are shared

from engine_control.errors import RefitRefusedError
from engine_control.refit.payload.unpickler import FIELD

STRATEGY = "file_system"  # the other one hands out descriptors, which only a relative of this process can fetch


def to_text(value: object) -> str:
    """`value` (containers of tensors) as base64 of a pickle. The tensors' bytes stay where they are.

    Keep the tensors, unchanged, until the receiver has replied. A text is for one receiver, and for one reading.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(STRATEGY)
    try:
        return base64.b64encode(ForkingPickler.dumps(value)).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def from_text(text: object, *, field: str = FIELD) -> bytes:
    """The bytes of standard base64 without whitespace; bytes are returned as they are.

    Raises:
        RefitRefusedError: it is no such text.
    """
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    try:
        return base64.b64decode(cast(str, text), validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RefitRefusedError(
            f"not base64: {error}",
            field=field,
            value=text if isinstance(text, str) else type(text).__name__,
            hint="Send the standard alphabet (+ and /) without whitespace.",
        ) from error


def pickle_from(value: object, *, field: str = FIELD) -> bytes:
    """The bytes of a pickle that comes as such, or as base64 in text or bytes.

    Raises:
        RefitRefusedError: it is neither.
    """
    if isinstance(value, bytes | bytearray | memoryview) and bytes(value[:1]) != b"\x80":
        value = bytes(value).decode("latin-1")
    return from_text(value, field=field)


def entry_of_rank(entries: Sequence[object], rank: int, world_size: int, *, field: str) -> int:
    """The index of the entry that a rank takes: its own of `world_size` entries, or the only one.

    Raises:
        RefitRefusedError: neither as many entries as ranks, nor one.
    """
    if len(entries) == world_size:
        return rank
    if len(entries) == 1:
        return 0
    raise RefitRefusedError(
        f"{len(entries)} payloads for {world_size} ranks",
        field=field,
        value=len(entries),
        hint="Send one for each rank, in rank order, or one for all, or name their GPUs in payload_gpu_uuids.",
    )
