"""What rank 0 tells the other ranks while it works, in the order in which it does it itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from diffusion_rl.rollout.queue import SampleState
from engine_control.rank import RankCommand

SampleKey = tuple[str, int]
"""A sample in flight: its request's id, and the index of its (or, for a trunk, its first) member."""


class Add(msgspec.Struct, tag="add", frozen=True):
    """A request that was accepted; it waits."""

    request_id: str
    params: Any


class Admit(msgspec.Struct, tag="admit", frozen=True):
    """Its prompts are encoded and its samples begin."""

    request_id: str


class Advance(msgspec.Struct, tag="advance", frozen=True):
    """These samples, in this order, take one step together."""

    samples: list[SampleKey]


class Retire(msgspec.Struct, tag="retire", frozen=True):
    """These samples have taken all their steps, or are handed out before that. The answer is a report with a digest of
    each."""

    samples: list[SampleKey]


class Retract(msgspec.Struct, tag="retract", frozen=True):
    """A request that had begun waits again; its samples are dropped."""

    request_id: str


class Remove(msgspec.Struct, tag="remove", frozen=True):
    """A request is out of the engine: finished, failed or aborted."""

    request_id: str


Decision = Add | Admit | Advance | Retire | Retract | Remove | RankCommand


def key_of(sample: SampleState) -> SampleKey:
    return sample.request.request_id, sample.members[0]


def keys(samples: Iterable[SampleState]) -> list[SampleKey]:
    return [key_of(sample) for sample in samples]


def digest(sample: SampleState) -> str:
    """Of every bit of a sample's state."""
    raw = sample.latents.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).hexdigest()
