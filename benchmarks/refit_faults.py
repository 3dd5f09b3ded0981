"""What can go wrong with weights on their way. A fault takes the buckets of a refit and yields the bodies to send."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from engine_control.refit.payload.safetensors_format import file_bytes

BUCKETS = 4
Weights = dict[str, torch.Tensor]
Bucket = list[tuple[str, torch.Tensor]]


def buckets_of(weights: Weights) -> list[Bucket]:
    """The weights in four buckets."""
    items = list(weights.items())
    size = -(-len(items) // BUCKETS)
    return [items[at : at + size] for at in range(0, len(items), size)]


def drop_tensor(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    bucket = choose.choice(buckets)
    del bucket[choose.randrange(len(bucket))]
    yield from buckets


def drop_bucket(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    del buckets[choose.randrange(len(buckets))]
    yield from buckets


def duplicate(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    yield from [*buckets, choose.choice(buckets)]


def reorder(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    choose.shuffle(buckets)
    for bucket in buckets:
        choose.shuffle(bucket)
    yield from buckets


def truncate(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    files = [bytes(file_bytes(bucket)) for bucket in buckets]
    at = choose.randrange(len(files))
    files[at] = files[at][: choose.randrange(len(files[at]))]
    yield from files


def flip_bit(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    files = [bytearray(file_bytes(bucket)) for bucket in buckets]
    file = choose.choice(files)
    place = choose.randrange(len(file)) if choose.random() < 0.2 else len(file) - 1 - choose.randrange(len(file) // 2)
    file[place] ^= 1 << choose.randrange(8)
    yield from map(bytes, files)


def wrong_dtype(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    bucket = choose.choice(buckets)
    at = choose.randrange(len(bucket))
    bucket[at] = (bucket[at][0], bucket[at][1].to(choose.choice([torch.float16, torch.bfloat16, torch.float64])))
    yield from buckets


def wrong_shape(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    bucket = choose.choice(buckets)
    at = choose.randrange(len(bucket))
    bucket[at] = (bucket[at][0], choose.choice([bucket[at][1][None], bucket[at][1].flatten()[:-1]]))
    yield from buckets


def not_finite(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    bucket = choose.choice(buckets)
    at = choose.randrange(len(bucket))
    tensor = bucket[at][1].clone()
    tensor.view(-1)[choose.randrange(tensor.numel())] = choose.choice([float("nan"), float("inf"), -float("inf")])
    bucket[at] = (bucket[at][0], tensor)
    yield from buckets


def exchange(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    """Two tensors of one shape under each other's name."""
    places: dict[Any, list[tuple[int, int]]] = {}
    for i, bucket in enumerate(buckets):
        for j, (_, tensor) in enumerate(bucket):
            places.setdefault((tuple(tensor.shape), tensor.dtype), []).append((i, j))
    (a, b), (c, d) = choose.sample(choose.choice([p for p in places.values() if len(p) > 1]), 2)
    one, other = buckets[a][b], buckets[c][d]
    if torch.equal(one[1], other[1]):  # then there is nothing to notice: any other fault
        yield from drop_bucket(choose, buckets)
        return
    buckets[a][b], buckets[c][d] = (one[0], other[1]), (other[0], one[1])
    yield from buckets


def unknown_name(choose: random.Random, buckets: list[Bucket]) -> Iterator[Any]:
    bucket = choose.choice(buckets)
    at = choose.randrange(len(bucket))
    bucket[at] = (bucket[at][0] + ".0", bucket[at][1])
    yield from buckets


CHANGES = {
    "drop a tensor": drop_tensor,
    "drop a bucket": drop_bucket,
    "duplicate": duplicate,
    "truncate": truncate,
    "flip a bit": flip_bit,
    "wrong dtype": wrong_dtype,
    "wrong shape": wrong_shape,
    "not finite": not_finite,
    "exchange two": exchange,
    "unknown name": unknown_name,
}
"""All of them must be refused, or noticed at the end."""
