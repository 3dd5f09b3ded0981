"""New bytes over those of weights, the old ones kept for an undo, and whether the new ones are finite.

What an engine's kernels can do, they do in one pass of one launch. For the rest torch copies twice, and looks at the
new numbers once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.target import RefitTarget
from engine_control.refit.undo import Kept, Key, UndoLog
from engine_control.weight_kernels import WeightKernels

ALONE_BYTES = 8 << 20  # of a tensor from which on a copy of its own is the faster one

Applied = tuple[Key, torch.Tensor]


class Looked(NamedTuple):
    """Tensors that came, and on their device for each of them a number that isn't 0 if it holds NaN or infinity."""

    keys: list[Key]
    bad: torch.Tensor


class _Piece(NamedTuple):
    key: Key
    live: torch.Tensor
    new: torch.Tensor


class Writer:
    """Writes what came into the places that a target names. `kernels` None: torch alone."""

    def __init__(self, target: RefitTarget, kernels: WeightKernels | None) -> None:
        self._target = target
        self._kernels = kernels

    def write(self, batch: Sequence[Applied], undo: UndoLog | None, *, checked: bool = False) -> list[Looked]:
        """Afterwards the new bytes are where they belong, and the old ones in `undo`, if it is given, when the device
        has done it. An error leaves everything either as it was, or noted in `undo`.

        checked: that they are finite is known.
        """
        whole: list[_Piece] = []
        others: list[_Piece] = []
        unseen: list[Applied] = []
        for key, tensor in batch:
            pieces = [_Piece(key, live, new) for live, new in self._target.destinations(*key, tensor)]
            if self._is_whole(tensor, pieces):
                whole += pieces
            else:
                others += pieces
                unseen.append((key, tensor))
        found = self._in_one_pass(whole, undo)
        if others:
            _copy_twice(others, undo, None if undo is None else undo.room_for([piece.live for piece in others]))
        return found if checked else found + look(unseen)

    def _is_whole(self, tensor: torch.Tensor, pieces: list[_Piece]) -> bool:
        """Whether a kernel can write the tensor, and so sees all of it."""
        kernels = self._kernels
        if kernels is None or len(pieces) != 1:
            return False
        _, live, new = pieces[0]
        return new is tensor and live.dtype == new.dtype and kernels.reads(live) and kernels.reads(new)

    def _in_one_pass(self, pieces: list[_Piece], undo: UndoLog | None) -> list[Looked]:
        if not pieces:
            return []
        assert self._kernels is not None
        kept = None if undo is None else undo.room_for([piece.live for piece in pieces])
        if kept is not None and any(one.room.device != self._kernels.device for one in kept):
            _copy_twice(pieces, undo, kept)  # the old bytes go to the host, over the link
            return look([(piece.key, piece.new) for piece in pieces])
        by_size: dict[int, list[int]] = {}
        for index, piece in enumerate(pieces):
            by_size.setdefault(piece.live.element_size(), []).append(index)
        found = []
        for indices in by_size.values():
            keys, lives, news = zip(*(pieces[index] for index in indices), strict=True)
            addresses = None if kept is None else [kept[index].address for index in indices]
            found.append(Looked(list(keys), self._kernels.replace(lives, news, addresses)))
            if undo is not None and kept is not None:
                undo.note(keys, [kept[index] for index in indices])
        return found


def look(batch: Sequence[Applied]) -> list[Looked]:
    """Looks at every tensor of floating point, without waiting for the device."""
    by_kind: dict[object, list[Applied]] = {}
    for key, tensor in batch:
        if tensor.is_floating_point() and tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append((key, tensor))
    found = []
    for alike in by_kind.values():
        tensors = [tensor.detach() for _, tensor in alike]
        if tensors[0].element_size() == 1:  # float8 has no norms
            tensors = [tensor.float() for tensor in tensors]
        found.append(Looked([key for key, _ in alike], ~_extremes(tensors).isfinite().all(dim=1)))
    return found


def _extremes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[tensors, n]`, finite where all of a tensor is. The tensors are of one device and dtype, and none is empty."""
    if tensors[0].device.type == "cpu":  # at twenty times the rate that norms of bfloat16 have there
        return torch.stack([extreme for tensor in tensors for extreme in torch.aminmax(tensor)]).view(-1, 2)
    return torch.stack(torch._foreach_norm(tensors, float("inf"))).view(-1, 1)


def refuse_non_finite(found: Sequence[Looked]) -> None:
    """Waits for the devices, once for each.

    Raises:
        RefitRefusedError: a tensor holds NaN or infinity; it is named.
    """
    by_device: dict[torch.device, list[Looked]] = {}
    for looked in found:
        by_device.setdefault(looked.bad.device, []).append(looked)
    for alike in by_device.values():
        bad = torch.cat([looked.bad.bool() for looked in alike]).nonzero().flatten().tolist()
        if bad:
            keys = [key for looked in alike for key in looked.keys]
            module, name = keys[bad[0]]
            raise RefitRefusedError(
                f"weight {name!r} of {module!r}: it holds NaN or infinity",
                code="non_finite_weights",
                field=f"{module}.{name}",
                hint="See to the training; nothing changed.",
            )


def _copy_twice(pieces: Sequence[_Piece], undo: UndoLog | None, kept: Sequence[Kept] | None) -> None:
    """kept: where the old bytes have room, if there is an undo."""
    lives = [piece.live for piece in pieces]
    if undo is not None and kept is not None:
        copy_all([one.old for one in kept], lives)
        undo.note([piece.key for piece in pieces], kept)
    copy_all(lives, [piece.new for piece in pieces])


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target: the small ones by common launches, which reach three quarters of the rate
    that a large copy has. Those between other devices than the rest go together."""
    small: dict[tuple[torch.device, torch.device], list[int]] = {}
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if target.nbytes >= ALONE_BYTES:
            target.copy_(source)
        else:
            small.setdefault((target.device, source.device), []).append(index)
    for alike in small.values():
        torch._foreach_copy_([targets[index] for index in alike], [sources[index] for index in alike])
