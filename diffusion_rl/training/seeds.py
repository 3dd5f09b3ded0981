"""Seeds that can't collide: a run, an epoch, a worker and a prompt each have bits of their own in one 64-bit number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import torch

from engine_control.errors import InvalidRequestError

SAMPLE_BITS = 10
BITS = {"run": 14, "epoch": 20, "worker": 8, "prompt": 12}  # and SAMPLE_BITS: 64 in all
MAX_GROUP = 2**SAMPLE_BITS


@dataclass(frozen=True)
class GroupKey:
    """Which group of samples: of which run, epoch (rollout iteration), worker (trainer rank) and prompt of the batch.

    A prompt that occurs twice in a batch has two places in it, hence two keys.
    """

    run: int
    epoch: int
    worker: int = 0
    prompt: int = 0


def group_seed(key: GroupKey) -> int:
    """The `seed` of a group's request: its samples have this seed and the numbers that follow it, below
    `seed + MAX_GROUP`. Different keys have different samples, always: the key can be read off the seed's bits.

    Raises:
        InvalidRequestError: a part of the key has more bits than it may have; it would run into its neighbour's.
    """
    seed = 0
    for field in fields(key):
        value, bits = getattr(key, field.name), BITS[field.name]
        if not 0 <= value < 2**bits:
            raise InvalidRequestError(
                f"the {field.name} of a seed has {bits} bits",
                field=field.name,
                value=value,
                hint=f"Count from 0 to {2**bits - 1}.",
            )
        seed = seed << bits | value
    return seed << SAMPLE_BITS


def iteration_generator(run: int, epoch: int, purpose: str) -> torch.Generator:
    """A generator for what one iteration decides for all workers alike (its prompts, its stochastic steps): a function
    of these three alone, so that a resumed run draws what an uninterrupted one would have drawn."""
    digest = hashlib.sha256(f"{run}/{epoch}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
