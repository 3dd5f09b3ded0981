"""What came, and what lies there, where a rank holds only pieces of a weight: digests of both, without another rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine_control.checksum import device_digests
from engine_control.errors import EngineFaultError
from engine_control.refit.target import RefitTarget
from engine_control.refit.undo import Key


class ReadBack:
    """Digests of whole tensors as they came, and of the pieces that this rank has written of them."""

    def __init__(self, target: RefitTarget) -> None:
        self._target = target
        self._wholes: dict[Key, str] = {}
        self._pieces: dict[Key, tuple[str, ...]] = {}

    def note(self, batch: Sequence[tuple[Key, torch.Tensor]]) -> None:
        """These have been written. Waits for the device."""
        wholes = device_digests((str(index), tensor) for index, (_, tensor) in enumerate(batch))
        self._wholes |= {key: wholes[str(index)] for index, (key, _) in enumerate(batch)}
        self._pieces |= _digests((key, new) for key, t in batch for _, new in self._target.destinations(*key, t))

    def drop(self, key: Key) -> None:
        """It isn't written any more."""
        self._wholes.pop(key, None)
        self._pieces.pop(key, None)

    def clear(self) -> None:
        self._wholes.clear()
        self._pieces.clear()

    def verified(self) -> dict[Key, str]:
        """The digest of each whole tensor that came, if this rank's pieces lie where they were written.

        Raises:
            EngineFaultError: something else lies there.
        """
        infos = self._target.modules()
        shapes = {(m, n): torch.empty(infos[m][n].shape, device="meta") for m, n in self._wholes}
        lives = ((key, live) for key, t in shapes.items() for live, _ in self._target.destinations(*key, t))
        found = _digests(lives)
        unlike = next((key for key in self._wholes if found.get(key) != self._pieces.get(key)), None)
        if unlike is not None:
            raise EngineFaultError(
                f"weight {unlike[1]!r} of {unlike[0]!r}: another tensor lies there than the one that came",
                code="weights_differ",
                field=".".join(unlike),
                hint="A fault of the hardware or of this program; the update is undone.",
            )
        return dict(self._wholes)


def _digests(pieces: Iterable[tuple[Key, torch.Tensor]]) -> dict[Key, tuple[str, ...]]:
    """Of the pieces of each weight, in their order."""
    listed = list(pieces)
    digests = device_digests((str(index), piece) for index, (_, piece) in enumerate(listed))
    found: dict[Key, tuple[str, ...]] = {}
    for index, (key, _) in enumerate(listed):
        found[key] = (*found.get(key, ()), digests[str(index)])
    return found
