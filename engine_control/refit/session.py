"""One refit on one rank: applies tensors, verifies them, and commits or undoes. For every transport and both engines.

In place, the old bytes of each tensor are kept (on the device while it has room, else in host memory) until the commit,
and the new ones written at once. Staged, the new bytes wait in a shadow and are written at the commit. Without an undo
(the old bytes were released) there is nothing to go back to, and only a complete update may be committed.

Where this rank holds only a part of a weight, digests are of the whole tensor as it came, and what is read back is the
part: a session never waits for another rank, which may refuse what this one takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine_control.checksum import device_digests
from engine_control.errors import RefitRefusedError
from engine_control.refit.backends.base import WeightItem
from engine_control.refit.readback import ReadBack
from engine_control.refit.target import RefitTarget, ShardedTarget
from engine_control.refit.undo import Key, UndoLog
from engine_control.refit.writing import Applied, Looked, Writer, look, refuse_non_finite
from engine_control.weight_kernels import WeightKernels

TOGETHER = 256  # tensors that are applied by one launch, where they stay valid so long
UndoPlace = Literal["device", "host", "shadow", "none"]


@dataclass(frozen=True)
class Received:
    """What one update call brought."""

    tensors: int
    nbytes: int


class RefitSession:
    """From `begin` to `commit` or `undo`. A call that raises has changed nothing."""

    def __init__(
        self,
        target: RefitTarget,
        modules: Sequence[str],
        *,
        partial: bool = False,
        staged: bool = False,
        undo: bool = True,
        kernels: WeightKernels | None = None,
    ) -> None:
        """`modules` are those that the session may touch; a tensor without a module belongs to the only one, or the
        first. Afterwards those modules are in checkpoint form. `kernels` make it quicker where weights are on their
        device.

        Raises:
            RefitRefusedError: there is no such module.
        """
        self._target = target
        self._weights = target.modules()
        for module in modules:
            if module not in self._weights:
                raise RefitRefusedError(
                    f"there is no module {module!r}",
                    code="unknown_module",
                    field="target_modules",
                    value=module,
                    hint=f"Known: {', '.join(sorted(self._weights))}.",
                )
        self.modules = tuple(modules)
        self.partial = partial and undo
        self.staged = staged
        self._undo = UndoLog() if undo and not staged else None
        self._can_undo = undo or staged
        self._kernels = kernels
        self._writer = Writer(target, kernels)
        self._shadow: dict[Key, torch.Tensor] = {}
        self._sent: dict[Key, None] = {}
        self._tied: dict[Key, Key] = {}
        self._last_call: list[Key] = []
        self._readback = ReadBack(target) if isinstance(target, ShardedTarget) and not staged else None
        target.begin(self.modules)

    @property
    def undo_place(self) -> UndoPlace:
        if self.staged:
            return "shadow"
        return "none" if self._undo is None else self._undo.place

    @property
    def can_undo(self) -> bool:
        return self._can_undo

    @property
    def touched(self) -> list[str]:
        """The modules of which tensors came."""
        return sorted({module for module, _ in self._sent})

    @property
    def sent(self) -> list[Key]:
        """What came, in its order."""
        return list(self._sent)

    @torch.no_grad()
    def update(self, items: Iterable[WeightItem]) -> Received:
        """Applies the tensors of one call, those together that stay valid so long.

        Raises:
            RefitRefusedError: one of them is unknown, came before, or has another shape, another dtype or numbers that
                aren't finite. All of this call is undone then; what came before stays.
        """
        self._last_call, nbytes = [], 0
        waiting: list[Applied] = []
        looked: list[Looked] = []
        try:
            for item in items:
                key = self._checked(item)
                first = self._tied.setdefault(self._representative(key), key)
                if first != key:
                    looked += self._apply(waiting)
                    waiting = []
                    self._refuse_untied(first, key, item.tensor)
                self._sent[key] = None
                self._last_call.append(key)
                waiting.append((key, item.tensor))
                nbytes += item.tensor.nbytes
                if not item.more or len(waiting) >= TOGETHER:
                    looked += self._apply(waiting)
                    waiting = []
            looked += self._apply(waiting)
            refuse_non_finite(looked)
        except BaseException:
            self.undo_last_call()
            raise
        return Received(len(self._last_call), nbytes)

    @torch.no_grad()
    def undo_last_call(self) -> None:
        """Afterwards the last update call has not been. Also for a call that another rank has refused."""
        if self._undo is not None:
            self._undo.restore(self._last_call)
        for key in self._last_call:
            self._shadow.pop(key, None)
            if self._readback is not None:
                self._readback.drop(key)
            if self._tied.get(self._representative(key)) == key:
                del self._tied[self._representative(key)]
            del self._sent[key]
        self._last_call = []

    @torch.no_grad()
    def verify(self) -> dict[str, str]:
        """The digest of each tensor that came, by `module.name`, read back from where it lies now.

        Raises:
            RefitRefusedError: a tensor of a touched module is missing.
            EngineFaultError: another tensor lies there than the one that came.
        """
        self._last_call = []
        if not self.partial:
            self._refuse_incomplete()
        if self._readback is not None:
            return {f"{module}.{name}": digest for (module, name), digest in self._readback.verified().items()}
        lying = [(key, self._lying(key)) for key in self._sent]
        return device_digests(((f"{module}.{name}", tensor) for (module, name), tensor in lying), self._kernels)

    @torch.no_grad()
    def commit(self) -> None:
        """Afterwards the new weights are the weights, in the kernels' layout, and the old bytes are gone."""
        if self.staged:
            self._undo = UndoLog()
            written = set(self._tied.values())  # of tied weights one: a launch writes no memory twice
            try:
                batch = [(key, tensor) for key, tensor in self._shadow.items() if key in written]
                self._writer.write(batch, self._undo, checked=True)
            except BaseException:
                self.undo()
                raise
        self._target.finish(self.modules)
        self._forget()

    @torch.no_grad()
    def undo(self) -> None:
        """Afterwards every byte is as it was before the session. Without an undo log only the bookkeeping goes."""
        if self._undo is not None:
            self._undo.restore_all()
        self._target.finish(self.modules)
        self._forget()

    def _forget(self) -> None:
        self._undo, self._last_call = None, []
        self._shadow.clear()
        if self._readback is not None:
            self._readback.clear()
        self._sent.clear()
        self._tied.clear()

    def _apply(self, batch: Sequence[Applied]) -> list[Looked]:
        """Writes the tensors, or puts them into the shadow; what tells whether they are finite."""
        if self.staged:
            for key, tensor in batch:
                self._shadow[key] = torch.empty_like(tensor, device=self._device(key, tensor)).copy_(tensor)
            return look(batch)
        looked = self._writer.write(batch, self._undo)
        if self._readback is not None:
            self._readback.note(batch)
        return looked

    def _device(self, key: Key, tensor: torch.Tensor) -> torch.device:
        """Where the weight lies; without a piece of it on this rank, where the tensor is."""
        return next((live.device for live, _ in self._target.destinations(*key, tensor)), tensor.device)

    def _checked(self, item: WeightItem) -> Key:
        """The tensor's key, if it may be written."""
        module = self.modules[0] if item.module is None else item.module
        if module not in self.modules:
            raise _refused(
                f"module {module!r} is not part of this update",
                module,
                item.name,
                code="unknown_module",
                hint=f"The session is about: {', '.join(self.modules)}.",
            )
        info = self._weights[module].get(item.name)
        if info is None:
            raise _refused("there is no such weight", module, item.name, code="unknown_weight", hint=self._near(module))
        key, tensor = (module, item.name), item.tensor
        if key in self._sent:
            raise _refused("this weight came twice", module, item.name, code="duplicate_weight", hint="Send it once.")
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype or tensor.layout != torch.strided:
            raise _refused(
                f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)} came, and the "
                f"weight is {str(info.dtype).removeprefix('torch.')} of shape {info.shape}",
                module,
                item.name,
                code="wrong_shape" if tuple(tensor.shape) != info.shape else "wrong_dtype",
                hint="Send it as the checkpoint has it.",
            )
        return key

    def _refuse_untied(self, first: Key, key: Key, tensor: torch.Tensor) -> None:
        """Tied weights may come under any of their names, and under several only with the same bytes."""
        if self.staged:
            same = torch.equal(self._shadow[first].cpu(), tensor.cpu())
        else:
            pairs = self._target.destinations(*first, tensor)
            same = all(torch.equal(live.cpu(), new.cpu()) for live, new in pairs)
        if not same:
            raise _refused(
                f"it is tied to {first[1]!r}, which came with other numbers",
                *key,
                code="tied_weights",
                hint="Send one name.",
            )

    def _representative(self, key: Key) -> Key:
        return key[0], self._target.tied(*key)

    def _lying(self, key: Key) -> torch.Tensor:
        return self._shadow[key] if self.staged else self._target.checkpoint_tensors(key[0])[key[1]]

    def _refuse_incomplete(self) -> None:
        for module in self.touched:
            came = {self._target.tied(m, name) for m, name in self._sent if m == module}
            missing = [n for n in self._weights[module] if self._target.tied(module, n) not in came]
            if missing:
                raise _refused(
                    f"{len(missing)} weights of {module!r} never came, this one among them",
                    module,
                    missing[0],
                    code="missing_weights",
                    hint="Send all of them" + (", or begin with partial=true." if self._can_undo else "."),
                )

    def _near(self, module: str) -> str:
        names = list(self._weights[module])
        return f"{module!r} has {len(names)}, such as {names[0]!r}." if names else f"{module!r} has no weights."


def _refused(message: str, module: str, name: str, *, code: str, hint: str) -> RefitRefusedError:
    return RefitRefusedError(
        f"weight {name!r} of {module!r}: {message}", code=code, field=f"{module}.{name}", hint=hint
    )
