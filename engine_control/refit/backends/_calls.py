"""Fields that update calls of several transports share: the modules they are about, and who reads the payload."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.backends.base import TransportContext, WeightItem
from engine_control.refit.payload.layout import byte_count, dtype_named, shape_of

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
Loader: TypeAlias = Callable[[NamedTensors], NamedTensors]


@dataclass(frozen=True)
class Announced:
    """A tensor that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return byte_count(self.shape, self.dtype)


def target_modules(info: Mapping[str, Any], context: TransportContext) -> list[str] | None:
    """The modules that the call names, each of which this engine has; None if it names none.

    Raises:
        RefitRefusedError: no list of names, or a module that isn't there.
    """
    named = info.get("target_modules")
    if named is None:
        return None
    if isinstance(named, str) or not isinstance(named, Sequence) or not named:
        raise RefitRefusedError(
            "not a list of modules", field="target_modules", value=named, hint="Leave it out, or name modules."
        )
    for module in named:
        if module not in context.weights:
            raise RefitRefusedError(
                f"there is no module {module!r}",
                code="unknown_module",
                field="target_modules",
                value=module,
                hint=f"Known: {', '.join(sorted(context.weights))}.",
            )
    return list(named)


def one_module(info: Mapping[str, Any], context: TransportContext) -> str | None:
    """The module of tensors that come without one: the only one that the call names. None: the session's.

    Raises:
        RefitRefusedError: the call names several.
    """
    named = target_modules(info, context)
    if named is not None and len(named) != 1:
        raise RefitRefusedError(
            f"tensors without a module, for {len(named)} modules",
            field="target_modules",
            value=", ".join(named),
            hint="Name exactly one, and send the others in calls of their own.",
        )
    return None if named is None else named[0]


def refuse_modes(info: Mapping[str, Any]) -> None:
    """Refuses calls that mean something else than whole weights."""
    mode = info.get("weight_update_mode")
    if mode is not None:
        raise RefitRefusedError(
            "this transport replaces weights and knows no other mode",
            field="weight_update_mode",
            value=mode,
            hint="Merge adapters on the trainer's side and send whole weights.",
        )


def load_format(info: Mapping[str, Any], context: TransportContext, known: Sequence[str]) -> tuple[str | None, Loader]:
    """The call's format (None for the transport's own), and what its tensors go through before they are handed on:
    `as_is`, or a loader, which may keep tensors, or hand on one buffer again and again.

    Raises:
        RefitRefusedError: neither one of `known` nor a loader that the configuration allows.
    """
    name = info.get("load_format")
    if name is None or name in known:
        return name, as_is
    if not isinstance(name, str) or name not in context.load_formats:
        allowed = [*known, *context.load_formats]
        raise RefitRefusedError(
            "unknown load_format",
            field="load_format",
            value=name,
            hint=f"Known: null, {', '.join(allowed)}. Loaders of your own are allowed in the configuration.",
        )
    return None, _custom(name)


def as_is(named: NamedTensors) -> NamedTensors:
    """What came: all that the transport says of its memory holds."""
    return named


def _custom(path: str) -> Loader:
    module, _, function = path.replace(":", ".").rpartition(".")
    try:
        loader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RefitRefusedError(
            f"the loader can't be imported: {error}", field="load_format", value=path, hint="See to the configuration."
        ) from error

    def load(named: NamedTensors) -> NamedTensors:
        loaded: NamedTensors = loader(named)
        return loaded

    return load


def items(module: str | None, named: NamedTensors, *, field: str, more: bool = False) -> Iterator[WeightItem]:
    """The tensors as items of that module. more: all of them stay valid until the call's end.

    Raises:
        RefitRefusedError: something is no name with a tensor.
    """
    for pair in named:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise RefitRefusedError("not a name and a tensor", field=field, value=type(pair).__name__)
        if not isinstance(pair[1], torch.Tensor):
            raise RefitRefusedError("its value is no tensor", field=pair[0], value=type(pair[1]).__name__)
        yield WeightItem(module, *pair, more=more)


def of_rank(info: Mapping[str, Any], context: TransportContext) -> Mapping[str, Any]:
    """The fields that are meant for this rank: all have the same, unless `per_rank` lists those of each."""
    each = info.get("per_rank")
    if each is None:
        return info
    if not isinstance(each, Sequence) or len(each) != context.world_size or not isinstance(each[context.rank], Mapping):
        raise RefitRefusedError(
            f"not the fields of {context.world_size} ranks", field="per_rank", hint="List one object for each rank."
        )
    shared = {key: value for key, value in info.items() if key != "per_rank"}
    return {**shared, **each[context.rank]}


@dataclass(frozen=True)
class Said:
    """Names, dtypes and shapes of an announcement as they came, and what they announce."""

    fields: tuple[object, object, object] = (None, None, None)
    tensors: Sequence[Announced] = ()


def announced_again(info: Mapping[str, Any], last: Said) -> Said:
    """`last`, if the call announces the same: a trainer does in each refit, and reading it takes time.

    Raises:
        RefitRefusedError: as `announced_tensors`.
    """
    fields = _fields(info)
    return last if fields == last.fields else Said(deepcopy(fields), announced_tensors(info))


def announced_tensors(info: Mapping[str, Any]) -> list[Announced]:
    """What `names`, `dtypes` (or `dtype_names`) and `shapes` announce.

    Raises:
        RefitRefusedError: they are of different lengths, or one of them is no name, dtype or shape.
    """
    names, dtypes, shapes = map(_list, _fields(info), ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise RefitRefusedError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes",
            field="names",
            value=len(names),
            hint="Send one of each for each tensor.",
        )
    if not all(isinstance(name, str) and name for name in names):
        raise RefitRefusedError("a tensor without a name", field="names")
    return [
        Announced(name, dtype_named(dtype, field=name), shape_of(shape, field=name))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _fields(info: Mapping[str, Any]) -> tuple[object, object, object]:
    dtypes = info.get("dtypes") if info.get("dtypes") is not None else info.get("dtype_names")
    return info.get("names"), dtypes, info.get("shapes")


def _list(value: object, field_name: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RefitRefusedError("not a list", field=field_name, value=type(value).__name__)
    return value
