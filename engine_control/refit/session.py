"""One refit on one rank: applies tensors, verifies them, and commits or undoes. For every transport and both engines.

In place, the old bytes of each tensor are kept (on the device while it has room, else in host memory) until the commit,
and the new ones written at once. Staged, the new bytes wait in a shadow and are written at the commit. Without an undo
(the old bytes were released) there is nothing to go back to, and only a complete update may be committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine_control.checksum import device_digests
from engine_control.errors import RefitRefusedError
from engine_control.refit.backends.base import WeightItem
from engine_control.refit.manifest import Manifest, check_against
from engine_control.refit.target import RefitTarget

Key = tuple[str, str]
"""A module's name and a tensor's."""

UndoPlace = Literal["device", "host", "shadow", "none"]
DEVICE_MARGIN_BYTES = 1 << 30  # of a GPU's free memory, left to everything else


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
    ) -> None:
        """`modules` are those that the session may touch; a tensor without a module belongs to the only one, or the
        first. Afterwards those modules are in checkpoint form.

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
        self._undo = _UndoLog() if undo and not staged else None
        self._can_undo = undo or staged
        self._shadow: dict[Key, torch.Tensor] = {}
        self._sent: dict[Key, None] = {}
        self._tied: dict[Key, Key] = {}
        self._last_call: list[Key] = []
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
        """Applies the tensors of one call.

        Raises:
            RefitRefusedError: one of them is unknown, came before, or has another shape, another dtype or numbers that
                aren't finite. All of this call is undone then; what came before stays.
        """
        self._last_call, nbytes = [], 0
        finite: list[tuple[Key, torch.Tensor]] = []
        try:
            for item in items:
                key = self._checked(item)
                self._sent[key] = None
                self._last_call.append(key)
                self._apply(key, item.tensor)
                nbytes += item.tensor.numel() * item.tensor.element_size()
                if item.tensor.is_floating_point():
                    finite.append((key, _largest(item.tensor)))
            _refuse_non_finite(finite)
        except BaseException:
            self.undo_last_call()
            raise
        return Received(len(self._last_call), nbytes)

    @torch.no_grad()
    def undo_last_call(self) -> None:
        """Afterwards the last update call has not been. Also for a call that another rank has refused."""
        for key in self._last_call:
            if self._undo is not None:
                self._undo.restore(key)
            self._shadow.pop(key, None)
            if self._tied.get(self._representative(key)) == key:
                del self._tied[self._representative(key)]
            del self._sent[key]
        self._last_call = []

    @torch.no_grad()
    def verify(self, manifest: Manifest | None = None) -> dict[str, str]:
        """The digest of each tensor that came, by `module.name`, read back from where it lies now.

        Raises:
            RefitRefusedError: a tensor of a touched module is missing, or the manifest says otherwise.
        """
        self._last_call = []
        if not self.partial:
            self._refuse_incomplete()
        lying = [(key, self._lying(key)) for key in self._sent]
        digests = device_digests((f"{module}.{name}", tensor) for (module, name), tensor in lying)
        if manifest is not None:
            check_against(manifest, self.modules, {key: digests[".".join(key)] for key in self._sent})
        return digests

    @torch.no_grad()
    def commit(self) -> None:
        """Afterwards the new weights are the weights, in the kernels' layout, and the old bytes are gone."""
        if self.staged:
            self._undo = _UndoLog()
            try:
                for key, tensor in self._shadow.items():
                    self._write(key, tensor)
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
        self._sent.clear()
        self._tied.clear()

    def _apply(self, key: Key, tensor: torch.Tensor) -> None:
        if self.staged:
            live = self._target.checkpoint_tensors(key[0])[key[1]]
            self._shadow[key] = torch.empty_like(tensor, device=live.device).copy_(tensor)
        else:
            self._write(key, tensor)

    def _write(self, key: Key, tensor: torch.Tensor) -> None:
        for live, new in self._target.destinations(*key, tensor):
            if self._undo is not None:
                self._undo.keep(key, live)
            live.copy_(new)

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
        self._refuse_untied(key, tensor)
        return key

    def _refuse_untied(self, key: Key, tensor: torch.Tensor) -> None:
        """Tied weights may come under any of their names, and under several only with the same bytes."""
        representative = self._representative(key)
        other = self._tied.setdefault(representative, key)
        if other != key and not torch.equal(self._lying(other).cpu(), tensor.cpu()):
            raise _refused(
                f"it is tied to {other[1]!r}, which came with other numbers",
                *key,
                code="tied_weights",
                hint="Send one.",
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


class _UndoLog:
    """The old bytes of what was written, each kept once."""

    def __init__(self) -> None:
        self._old: dict[Key, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.place: UndoPlace = "device"

    def keep(self, key: Key, live: torch.Tensor) -> None:
        self._old.setdefault(key, []).append((live, self._copy(live)))

    def restore(self, key: Key) -> None:
        for live, old in reversed(self._old.pop(key, [])):
            live.copy_(old)

    def restore_all(self) -> None:
        for key in reversed(list(self._old)):
            self.restore(key)

    def _copy(self, live: torch.Tensor) -> torch.Tensor:
        if live.device.type != "cuda":
            return live.clone()
        if self.place == "device":
            free, _ = torch.cuda.mem_get_info(live.device)
            reserved = torch.cuda.memory_reserved(live.device) - torch.cuda.memory_allocated(live.device)
            if free + reserved > live.numel() * live.element_size() + DEVICE_MARGIN_BYTES:
                return live.clone()
            self.place = "host"
        return torch.empty(live.shape, dtype=live.dtype, pin_memory=True).copy_(live)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that is finite if and only if all of the tensor's are; on the tensor's device, without waiting."""
    if tensor.numel() == 0:
        return torch.zeros((), device=tensor.device)
    if tensor.element_size() == 1:  # float8 has no norms
        return tensor.float().abs().amax()
    return torch.linalg.vector_norm(
        tensor.detach(), float("inf"), dtype=torch.float32 if tensor.element_size() < 4 else None
    )


def _refuse_non_finite(found: Sequence[tuple[Key, torch.Tensor]]) -> None:
    if not found:
        return
    largest = torch.stack([value.to(found[0][1].device, torch.float64) for _, value in found]).cpu()
    bad = (~largest.isfinite()).nonzero().flatten().tolist()
    if bad:
        module, name = found[bad[0]][0]
        raise _refused(
            "it holds NaN or infinity",
            module,
            name,
            code="non_finite_weights",
            hint="See to the training; nothing changed.",
        )


def _refused(message: str, module: str, name: str, *, code: str, hint: str) -> RefitRefusedError:
    return RefitRefusedError(
        f"weight {name!r} of {module!r}: {message}", code=code, field=f"{module}.{name}", hint=hint
    )
