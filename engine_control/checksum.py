"""Digests of weights: a fast one that the device computes, and SHA-256 for those who ask for it.

The fast digest is a tree of multilinear hashes (Lemire and Kaser, "Strongly universal string hashing is fast", 2014)
over bytes: each KiB becomes `COLUMNS` sums of its signed bytes times fixed pseudo-random numbers, which is a product of
matrices of bytes and reads the weights once. The sums' bytes are hashed in the same way twice more, to 32 bytes a MiB
(not those of a tensor of up to 32 KiB). What is left, with dtype and shape, goes through BLAKE2b. The sums are exact,
so a CPU and a GPU find the same. A change goes unseen in about one of 2^46 cases; it is no protection against somebody
who means harm.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from engine_control.weight_kernels import WeightKernels

ROW = 1024  # bytes of which one row of sums is made
COLUMNS = 8
FAN_IN = ROW // (COLUMNS * 4)  # rows of sums whose bytes are one row of the next level
CHUNK_WORDS = FAN_IN * FAN_IN * ROW // 4  # 1 MiB of weights, of which COLUMNS sums are left
LARGEST = 63  # of a multiplier: 2 * 255 * 63 is an int16, which is where some CPUs add up pairs, with saturation
FEWEST_ROWS = 32  # of a product on a GPU
GROUP_BYTES = 1 << 32  # hashed together; the sums of the first level take 1/32 of it
ALIGNED = 16  # bytes, for a product that reads memory as it lies


def device_digests(tensors: Iterable[tuple[str, torch.Tensor]], kernels: WeightKernels | None = None) -> dict[str, str]:
    """The fast digest of each tensor, by its name, with one wait for each device at the end."""
    named = list(tensors)
    sums = _on_host([tensor for _, tensor in named], kernels)
    digests = {}
    for (name, tensor), found in zip(named, sums, strict=True):
        digests[name] = hashlib.blake2b(_head(tensor.dtype, tensor.shape) + found, digest_size=16).hexdigest()
    return digests


@functools.lru_cache(4096)
def _head(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def _on_host(tensors: Sequence[torch.Tensor], kernels: WeightKernels | None) -> list[bytes]:
    """For each tensor the bytes of its last sums."""
    devices: dict[torch.device, tuple[list[int], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, ([], []))[_is_small(tensor)].append(index)
    fetched: dict[int, bytes] = {}
    for device, (large, small) in devices.items():
        own = kernels if kernels is not None and kernels.device == device else None
        sums = [_tree_of([tensors[index] for index in group], own) for group in _groups(tensors, large)]
        sums += [_rows_of([tensors[index] for index in group], own) for group in _groups(tensors, small)]
        flat = torch.cat(sums).cpu().numpy()
        position = 0
        for index in [*large, *small]:
            count = _rows(tensors[index]) if _is_small(tensors[index]) else _chunks(tensors[index])
            fetched[index] = flat[position : position + count].tobytes()
            position += count
    return [fetched[index] for index in range(len(tensors))]


def _groups(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """The indices in their order, in parts of about `GROUP_BYTES`, or one tensor."""
    group: list[int] = []
    size = 0
    for index in indices:
        if group and size + tensors[index].nbytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(index)
        size += tensors[index].nbytes
    if group:
        yield group


def _tree_of(tensors: Sequence[torch.Tensor], kernels: WeightKernels | None) -> torch.Tensor:
    """`[chunks, COLUMNS]` int32, on the tensors' device: those of each tensor follow those of the one before."""
    begins = list(itertools.accumulate((_chunks(tensor) * FAN_IN * FAN_IN for tensor in tensors), initial=0))
    first = torch.zeros(begins[-1], COLUMNS, dtype=torch.int32, device=tensors[0].device)
    if kernels is not None:
        kernels.row_sums(_readable(tensors, kernels), begins[:-1], _factors(first.device), first)
    else:
        _multiply_all(tensors, begins, first)
    return _next_level(_next_level(first))[: begins[-1] // (FAN_IN * FAN_IN)]


def _multiply_all(tensors: Sequence[torch.Tensor], begins: Sequence[int], first: torch.Tensor) -> None:
    """The sums of the first level, a product for each tensor's whole rows and one for all that is left."""
    rests: list[torch.Tensor] = []  # bytes that aren't whole rows where they lie
    places: list[torch.Tensor] = []  # of their sums
    factors = _factors(first.device)
    for tensor, row in zip(tensors, begins, strict=False):
        data = _bytes(tensor)
        count = len(data)
        whole = count // ROW if data.data_ptr() % ALIGNED == 0 else 0
        if whole:
            rows = (data if whole * ROW == count else data[: whole * ROW]).view(whole, ROW)
            torch._int_mm(rows, factors, out=first[row : row + whole])
        if whole * ROW < count:
            rests.append(data[whole * ROW :])
            places.append(first[row + whole : row + _rows(tensor)])
    if rests:
        torch._foreach_copy_(places, list(_rows_of(rests, None).split([len(place) for place in places])))


def _rows_of(tensors: Sequence[torch.Tensor], kernels: WeightKernels | None) -> torch.Tensor:
    """`[rows, COLUMNS]` int32: the sums of each tensor's bytes, padded to whole rows with zeros."""
    begins = list(itertools.accumulate((_rows(tensor) for tensor in tensors), initial=0))
    device = tensors[0].device
    if kernels is not None:
        sums = torch.zeros(begins[-1], COLUMNS, dtype=torch.int32, device=device)
        kernels.row_sums(_readable(tensors, kernels), begins[:-1], _factors(device), sums)
        return sums
    parts = [_bytes(tensor) for tensor in tensors]
    staged = torch.zeros(max(begins[-1], FEWEST_ROWS) * ROW, dtype=torch.int8, device=device)
    torch._foreach_copy_([staged[s * ROW : s * ROW + len(p)] for p, s in zip(parts, begins, strict=False)], parts)
    return _multiply(staged.view(-1, ROW))[: begins[-1]]


def _readable(tensors: Sequence[torch.Tensor], kernels: WeightKernels) -> list[torch.Tensor]:
    """What the kernels can read, with the bytes of the tensors."""
    return [tensor if kernels.reads(tensor) else _bytes(tensor).clone() for tensor in tensors]


def _next_level(sums: torch.Tensor) -> torch.Tensor:
    """`[n, COLUMNS]` to `[n / FAN_IN, COLUMNS]`, with rows of zeros behind if there'd be too few."""
    rows = sums.view(torch.int8).view(-1, ROW)
    if len(rows) < FEWEST_ROWS:
        rows = torch.cat([rows, rows.new_zeros(FEWEST_ROWS - len(rows), ROW)])
    return _multiply(rows)


def _multiply(rows: torch.Tensor) -> torch.Tensor:
    """`[n, ROW]` int8 to `[n, COLUMNS]` int32, exactly: a sum is at most 1024 * 128 * 63."""
    return torch._int_mm(rows, _factors(rows.device))


def _rows(tensor: torch.Tensor) -> int:
    return -(-int(tensor.nbytes) // ROW)


def _chunks(tensor: torch.Tensor) -> int:
    """MiB that have begun."""
    return -(-int(tensor.nbytes) // (4 * CHUNK_WORDS))


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether the sums of the first level are few enough."""
    return bool(tensor.nbytes <= FAN_IN * ROW)


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
    """Flat int8, in row-major order; a view if it lies so."""
    return tensor.detach().contiguous().view(-1).view(torch.int8)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """`[ROW, COLUMNS]` odd int8 numbers from -63 to 63, by splitmix64, the same on every device."""
    state = torch.arange(1, COLUMNS * ROW + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    drawn = _shifted(state ^ _shifted(state, 31), 58)  # 0 to 63
    return (2 * drawn - LARGEST).to(torch.int8).view(COLUMNS, ROW).to(device).t()


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
