"""One extension, one file: the file's name in its folder is the registered name, imported on first use."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Generic, TypeVar

from engine_control.errors import InvalidRequestError

T = TypeVar("T")


class Registry(Generic[T]):
    """Finds the one subclass of `base` that a module of `package` defines.

    A module named `base`, or one whose name begins with an underscore, is no extension. A module that fails to import
    raises its own error, from `get` alone; the other names keep working.
    """

    def __init__(self, package: str, base: type[T], *, noun: str, skip: tuple[str, ...] = ()) -> None:
        """`noun` names such an extension in errors; modules named in `skip` belong to the package's own machinery."""
        self._package = package
        self._base = base
        self._noun = noun
        self._skip = {"base", *skip}
        self._registered: dict[str, type[T]] = {}

    def names(self) -> list[str]:
        """All names, sorted: modules of the package and classes registered from outside."""
        paths = importlib.import_module(self._package).__path__
        modules = [
            m.name for m in pkgutil.iter_modules(paths) if m.name not in self._skip and not m.name.startswith("_")
        ]
        return sorted({*modules, *self._registered})

    def register(self, name: str, cls: type[T]) -> None:
        """Adds a class from outside the package under `name`. Afterwards `get(name)` returns it."""
        self._registered[name] = cls

    def get(self, name: str) -> type[T]:
        """The class of that name.

        Raises:
            InvalidRequestError: no extension has that name; the message lists those that exist.
        """
        if name in self._registered:
            return self._registered[name]
        known = self.names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise InvalidRequestError(
                f"unknown {self._noun} {name!r}",
                code=f"unknown_{self._noun.replace(' ', '_')}",
                value=name,
                hint=f"{hint}Known: {', '.join(known)}.",
            )
        module = importlib.import_module(f"{self._package}.{name}")
        found = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, self._base) and value.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise TypeError(f"{module.__name__} must define exactly one {self._base.__name__}, found {len(found)}")
        self._registered[name] = found[0]
        return found[0]
