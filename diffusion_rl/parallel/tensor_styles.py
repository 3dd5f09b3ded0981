"""Splits a transformer's weights by its plan, with torch's `parallelize_module` and styles of our own.

The styles shard parameters as torch's do (`distribute_tensor`), and replace what those do at a forward: torch's put
DTensors through the layer's operation, which exact mode couldn't replace, and add parts up in the order of a library.
The meshes know ranks and no process group: an engine's groups are its own (`groups`), so that a trainer may have
torch's default group in the same process.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from diffusion_rl.parallel.tensor import (
    ColumnLinear,
    RowLinear,
    SplitRMSNorm,
    TensorParallel,
    TensorPlan,
    matches,
    sum_gradient,
)
from engine_control.errors import InvalidRequestError


class _Columns(ColwiseParallel):
    """Weight and bias are split along the outputs."""

    def __init__(self, ranks: TensorParallel, device: torch.device) -> None:
        super().__init__()
        self._ranks, self._device = ranks, device

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._partition_linear_fn("", module, device_mesh)
        return _settled(module, ColumnLinear, self._ranks, self._device)


class _Rows(RowwiseParallel):
    """The weight is split along the inputs, section by section; the bias is whole."""

    def __init__(self, ranks: TensorParallel, device: torch.device, sections: tuple[int, ...]) -> None:
        super().__init__()
        self._ranks, self._device, self._sections = ranks, device, sections

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        module.sections = self._sections
        if len(self._sections) > 1:
            shares = [part.chunk(self._ranks.size, dim=1) for part in module.weight.split(self._sections, dim=1)]
            module.weight.data = torch.cat([share for of_rank in zip(*shares, strict=True) for share in of_rank], dim=1)
        self._partition_linear_fn("", module, device_mesh)
        return _settled(module, RowLinear, self._ranks, self._device)


class _Norms(ParallelStyle):
    """The weight is split along its one axis."""

    def __init__(self, ranks: TensorParallel, device: torch.device) -> None:
        super().__init__()
        self._ranks, self._device = ranks, device

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for name, parameter in list(module.named_parameters()):
            part = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
        return _settled(module, SplitRMSNorm, self._ranks, self._device)


def split_weights(transformer: torch.nn.Module, plan: TensorPlan, ranks: TensorParallel, device: torch.device) -> None:
    """Afterwards `transformer` is on `device`, with this rank's part of every weight that the plan names. Weights are
    split one after the other, where they are: a device that holds the part needs no room for the whole.

    Raises:
        InvalidRequestError: a width can't be dealt out evenly; nothing has changed.
    """
    plan.check(transformer, ranks.size)
    mesh = _mesh("cpu", ranks)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="DTensor random operators")  # nobody draws from these
        for name, module in list(transformer.named_modules()):
            style: ParallelStyle | None = None
            if matches(name, plan.columns):
                style = _Columns(ranks, device)
            elif matches(name, plan.rows):
                style = _Rows(ranks, device, plan.sections(transformer, name))
            elif matches(name, plan.norms):
                style = _Norms(ranks, device)
            if style is None:
                module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
            else:
                parallelize_module(transformer, mesh, {name: style}, src_data_rank=None)
    for name, module in transformer.named_modules():
        if matches(name, plan.attentions):
            _share_heads(module, ranks)


def _mesh(device_type: str, ranks: TensorParallel) -> DeviceMesh:
    """The ranks in their order, on devices of that type."""
    if "_rank" not in inspect.signature(DeviceMesh.__init__).parameters:
        raise InvalidRequestError(
            f"torch {torch.__version__} has no meshes without process groups of torch's own",
            field="tp_size",
            value=ranks.size,
            hint="Install torch 2.11 or later.",
        )
    return DeviceMesh(device_type, list(range(ranks.size)), _init_backend=False, _rank=ranks.rank)


def _settled(module: Any, kind: type[torch.nn.Module], ranks: TensorParallel, device: torch.device) -> torch.nn.Module:
    """The layer on its device, with local parts in memory of their own, and with its forward."""
    mesh = _mesh(device.type, ranks)
    for name, parameter in list(module.named_parameters()):
        local = parameter.to_local().detach().to(device, copy=True)
        placed = DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        module.register_parameter(name, torch.nn.Parameter(placed, requires_grad=parameter.requires_grad))
    module.__class__ = kind
    module.ranks = ranks
    return module  # type: ignore[no-any-return]


def _share_heads(attention: Any, ranks: TensorParallel) -> None:
    """What the attention's processor reads is the local number of heads, and their width."""
    for name in ("heads", "inner_dim", "inner_kv_dim", "kv_inner_dim", "sliceable_head_dim"):
        if hasattr(attention, name):
            setattr(attention, name, getattr(attention, name) // ranks.size)
    for parameter in attention.parameters():
        if not isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(sum_gradient(ranks))
