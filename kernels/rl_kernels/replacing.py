"""Another forward for some modules of a model, for the duration of a block and for the calling thread only.

It sits in the instance's attributes, where `nn.Module.__call__` looks first: hooks on the module still run, and nothing
of its class changes. Another thread that calls the same module meanwhile gets the module's own forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[..., Any]

_active: ContextVar[Mapping[int, Forward]] = ContextVar("replaced forwards of this thread, by the module's id")
_lock = threading.Lock()


@dataclass(frozen=True)
class Replacement:
    """`function(module, *args, **kwargs)` in place of the module's forward."""

    module: torch.nn.Module
    function: Forward


@dataclass(eq=False)
class _Switched:
    """What a module's `forward` is while anybody replaces it: each thread's own replacement, or the class's forward."""

    module: torch.nn.Module
    holders: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = _active.get({}).get(id(self.module), type(self.module).forward)
        return forward(self.module, *args, **kwargs)


def replacements(model: torch.nn.Module, forwards: Mapping[type[torch.nn.Module], Forward]) -> tuple[Replacement, ...]:
    """One for each module of `model` whose forward is that of a class in `forwards`; not for modules within those.

    A subclass with a forward of its own, and a module whose forward somebody else has replaced, are left alone.
    """
    found: list[Replacement] = []
    ahead = [model]
    while ahead:
        module = ahead.pop()
        function = next((f for cls, f in forwards.items() if runs_forward_of(module, cls)), None)
        if function is not None:
            found.append(Replacement(module, function))
        else:
            ahead += module.children()
    return tuple(found)


def runs_forward_of(module: object, cls: type[torch.nn.Module]) -> bool:
    """Whether the module's forward is the one that `cls` gives it, and nobody but this file has replaced it."""
    if not isinstance(module, cls) or type(module).forward is not cls.forward:
        return False
    own = vars(module).get("forward")
    return own is None or isinstance(own, _Switched)


@contextmanager
def replaced_forwards(wanted: Sequence[Replacement]) -> Iterator[None]:
    """Inside, this thread's calls of those modules run the replacements. Re-entrant, and from any number of threads."""
    entered: list[_Switched] = []
    token = _active.set({**_active.get({}), **{id(r.module): r.function for r in wanted}})
    try:
        with _lock:
            for replacement in wanted:
                attributes = vars(replacement.module)
                switched = attributes.get("forward")
                if not isinstance(switched, _Switched):
                    switched = attributes["forward"] = _Switched(replacement.module)
                switched.holders += 1
                entered.append(switched)
        yield
    finally:
        _active.reset(token)
        with _lock:
            for switched in entered:
                switched.holders -= 1
                attributes = vars(switched.module)
                if switched.holders == 0 and attributes.get("forward") is switched:
                    del attributes["forward"]
