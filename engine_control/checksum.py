"""Digests of weights: a fast one that the device computes, and SHA-256 for those who ask for it.

The fast digest is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): 32-bit
words times fixed pseudo-random 64-bit numbers, summed modulo 2^64 over each chunk. Integer sums have no order, so a CPU
and a GPU find the same. The chunks' sums, in order, with dtype and shape, go through BLAKE2b. It finds every change of
a single word, and any other accident but for one in 2^32; it is no protection against somebody who means harm.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

CHUNK_WORDS = 1 << 18  # 1 MiB of weights; the multipliers of a chunk are 2 MiB and stay in a GPU's cache
CHUNKS_AT_ONCE = 64
WORD = 4


def device_digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The fast digest of each tensor, by its name, with one wait for each device at the end."""
    named = list(tensors)
    sums = _on_host(_sums_of([tensor for _, tensor in named]))
    digests = {}
    for (name, tensor), found in zip(named, sums, strict=True):
        head = f"{tensor.dtype}{list(tensor.shape)}".encode()
        digests[name] = hashlib.blake2b(head + found, digest_size=16).hexdigest()
    return digests


def _sums_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`chunk_sums` of each. Tensors of less than a chunk and of equal size share their launches."""
    sums: dict[int, torch.Tensor] = {}
    small: dict[tuple[torch.device, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.nbytes < CHUNK_WORDS * WORD:
            small.setdefault((tensor.device, tensor.nbytes), []).append(index)
        else:
            sums[index] = chunk_sums(tensor)
    for (device, nbytes), alike in small.items():
        together = max(CHUNKS_AT_ONCE * CHUNK_WORDS * WORD // max(nbytes, 1), 1)
        for first in range(0, len(alike), together):
            group = alike[first : first + together]
            words = torch.stack([_words(tensors[index]) for index in group])
            found = (words * _factors(device)[: words.shape[1]]).sum(1)
            sums |= {index: found[row : row + 1] for row, index in enumerate(group)}
    return [sums[index] for index in range(len(tensors))]


def _on_host(sums: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of each, fetched together."""
    devices: dict[torch.device, list[int]] = {}
    for index, found in enumerate(sums):
        devices.setdefault(found.device, []).append(index)
    fetched: dict[int, bytes] = {}
    for indices in devices.values():
        flat = torch.cat([sums[index] for index in indices]).cpu().numpy()
        position = 0
        for index in indices:
            count = len(sums[index])
            fetched[index] = flat[position : position + count].tobytes()
            position += count
    return [fetched[index] for index in range(len(sums))]


def chunk_sums(tensor: torch.Tensor) -> torch.Tensor:
    """`[chunks]` int64, on the tensor's device: the hash of each MiB of its bytes in row-major order."""
    words = _words(tensor)
    factors = _factors(tensor.device)
    whole = words.numel() // CHUNK_WORDS
    parts = [
        (words[first * CHUNK_WORDS : last * CHUNK_WORDS].view(-1, CHUNK_WORDS) * factors).sum(1)
        for first in range(0, whole, CHUNKS_AT_ONCE)
        for last in (min(first + CHUNKS_AT_ONCE, whole),)
    ]
    rest = words[whole * CHUNK_WORDS :]
    if rest.numel() or not parts:
        parts.append((rest * factors[: rest.numel()]).sum().reshape(1))
    return torch.cat(parts)


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest for many named ones, whatever their order."""
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of `str(dtype)`, `repr(tuple(shape))` and the bytes, as SGLang's tensor checker computes it."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)!r}".encode())
    digest.update(_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()


def module_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes in the order of the names, as SGLang's `/get_weights_checksum` computes it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]).cpu().numpy().data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    data = _bytes(tensor)
    over = data.numel() % WORD
    if over or data.data_ptr() % WORD:
        data = torch.nn.functional.pad(data, (0, (WORD - over) % WORD)).clone()
    return data.view(torch.int32)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """`[CHUNK_WORDS]` odd int64 numbers, by splitmix64, the same on every device."""
    state = (torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)) ^ 0x5851F42D4C957F2D
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return ((state ^ _shifted(state, 31)) | 1).to(device)


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
