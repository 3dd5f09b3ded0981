"""Tensors of the caller's own process, for Python callers. Other ranks of the engine get them over their socket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.backends.base import WeightItem, WeightTransport


def direct_info(named_tensors: Iterable[tuple[str, torch.Tensor]], module: str | None = None) -> dict[str, Any]:
    """The update call's own fields for these tensors."""
    return {"items": [[module, name, tensor.detach()] for name, tensor in named_tensors]}


class DirectTransport(WeightTransport):
    """`info["items"]` is a list of `[module or None, name, tensor]`."""

    def receive(self, info: Mapping[str, Any]) -> Iterator[WeightItem]:
        items = info.get("items")
        if not isinstance(items, list):
            raise RefitRefusedError("the tensors are missing", field="items", hint="Make the fields by direct_info.")
        for item in items:
            if not (isinstance(item, list | tuple) and len(item) == 3 and isinstance(item[2], torch.Tensor)):
                raise RefitRefusedError(
                    "each item is [module, name, tensor]", field="items", hint="Make the fields by direct_info."
                )
            module, name, tensor = item
            yield WeightItem(module, name, tensor, more=True)
