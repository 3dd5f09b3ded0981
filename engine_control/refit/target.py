"""What an engine owes a refit: its weights by name, and where the bytes of each go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine_control.errors import InvalidRequestError


@dataclass(frozen=True)
class TensorInfo:
    """A weight in checkpoint form."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RefitTarget(Protocol):
    """The weights of one rank. Names, shapes and dtypes are those of the checkpoint, whatever the kernels' own layout
    is; a session asks for nothing else, so it never knows of fused, sharded, offloaded or quantised weights."""

    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Every parameter and persistent buffer of every module, by module and by its name in the checkpoint. Of tied
        weights each name is listed."""

    def default_modules(self, selector: str) -> Sequence[str]:
        """The modules that a session means by `target`, `draft` or `all` when it names none.

        Raises:
            InvalidRequestError: the engine has no module of that kind.
        """

    def tied(self, module: str, name: str) -> str:
        """One name that stands for all names of the same memory: the same for tied weights."""

    def destinations(self, module: str, name: str, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """`(live, new)` pairs of equal shape: the bytes of each `new` belong into that `live` memory of this rank.

        All of `live` together is what an undo must restore. Without a piece on this rank the list is empty.
        """

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        """The module's weights in checkpoint form, whole. They may be the live memory itself: only read them."""

    def begin(self, modules: Sequence[str]) -> None:
        """Brings those modules into a form that `destinations` can write to. No step runs until `finish`."""

    def finish(self, modules: Sequence[str]) -> None:
        """Makes the kernels' layout once, after a commit or an undo."""


@runtime_checkable
class ShardedTarget(RefitTarget, Protocol):
    """Weights of which this rank holds a part. `checkpoint_tensors` gathers a tensor from all ranks when it is read, so
    every rank reads the same ones in the same order; nothing that may fail on one rank alone may come between. A refit,
    in which a rank may refuse what another one takes, therefore never reads them: it looks at this rank's part."""

    def own_part(self, module: str, name: str) -> torch.Tensor:
        """The weight as a new tensor of the checkpoint's shape, where it lies: this rank's part of it as it is now, and
        zeros elsewhere."""


class ModuleTarget:
    """The weights of plain torch modules, which lie in memory as they do in the checkpoint."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], *, main: Iterable[str] | None = None) -> None:
        """`main` are the modules that a session means when it names none; by default all."""
        self._modules = dict(modules)
        self._main = tuple(main) if main is not None else tuple(modules)
        self._found: dict[str, _Weights] = {}  # while a session is open; at other times weights may be moved
        self._infos = {
            name: {key: TensorInfo(tuple(t.shape), t.dtype) for key, t in module.state_dict().items()}
            for name, module in self._modules.items()
        }
        self._plain = {name: _says_only_what_it_holds(module) for name, module in self._modules.items()}

    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        return self._infos

    def default_modules(self, selector: str) -> Sequence[str]:
        if selector in ("all", "target"):
            return self._main
        raise InvalidRequestError(
            f"this engine has no {selector!r} model",
            field="selector",
            value=selector,
            hint="Send 'all', 'target' or nothing.",
        )

    def tied(self, module: str, name: str) -> str:
        return self._weights(module).representative[name]

    def destinations(self, module: str, name: str, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return [(self._weights(module).live[name], tensor)]

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        return self._weights(module).live

    def begin(self, modules: Sequence[str]) -> None:
        self._found = {name: _Weights(self._lying(name)) for name in modules}

    def finish(self, modules: Sequence[str]) -> None:
        self._found = {}

    def _weights(self, module: str) -> _Weights:
        return self._found.get(module) or _Weights(self._lying(module))

    def _lying(self, module: str) -> dict[str, torch.Tensor]:
        """The memory of each weight of a module."""
        if self._plain[module]:
            return {name: t.detach() if t.requires_grad else t for name, t in _held(self._modules[module]).items()}
        return dict(self._modules[module].state_dict())


class _Weights:
    """A module's tensors by their names, and for each name the first that names the same memory."""

    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        self.live = live
        addresses = [tensor.data_ptr() for tensor in live.values()]
        self.representative = {name: name for name in live}
        if len(set(addresses)) < len(addresses):
            first: dict[object, str] = {}
            self.representative = {name: first.setdefault(_place(t), name) for name, t in live.items()}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers as `state_dict` names and orders them, without what hooks make of it: six
    times as fast, which counts while an engine stands still."""
    found: dict[str, torch.Tensor] = {}

    def walk(module: torch.nn.Module, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[prefix + name] = buffer
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{prefix}{name}.")

    walk(module, "")
    return found


def _says_only_what_it_holds(module: torch.nn.Module) -> bool:
    """Whether the module's `state_dict` is what `_held` finds: no hook adds, drops or renames anything."""
    said, held = module.state_dict(keep_vars=True), _held(module)
    return list(said) == list(held) and all(said[name] is held[name] for name in held)
