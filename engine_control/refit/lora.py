"""LoRA in a refit: pairs of factors become whole weights on their way from a transport to the session.

merged = base + (alpha / rank) * (B @ A), in fp32, rounded once to the base's dtype (Hu et al., "LoRA", 2021). Every
merge starts from the base, whose bytes are kept in host memory from the first merge of a layer on, so that any number
of merges leaves no trace. A layer that comes as a whole weight is no longer merged: what came is its base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_control.checksum import device_digests
from engine_control.errors import RefitRefusedError
from engine_control.refit.backends.base import WeightItem
from engine_control.refit.target import RefitTarget, ShardedTarget

Key = tuple[str, str]
"""A module's name and a tensor's."""

MERGE = "lora_merge"
PREFIX = "base_model.model."  # what peft's wrapper puts before a layer's name
HALF = re.compile(r"(?P<layer>.+)\.(?P<half>lora_A|lora_B|lora_down|lora_up)(?P<adapter>\.[^.]+?)??(?:\.weight)?")


@dataclass(frozen=True)
class LoraMerge:
    """How the pairs of a call are merged. alpha None: each layer's rank, so that the factor is 1. rank: what the sender
    says of all layers; the tensors' shapes decide, and must agree."""

    alpha: float | None = None
    rank: int | None = None

    def scale(self, rank: int) -> float:
        return 1.0 if self.alpha is None else self.alpha / rank


@dataclass(frozen=True)
class LoraPair:
    """The factors of one layer: a `[rank, K]`, b `[N, rank]`, of one dtype; `name` is how the sender called `a`."""

    layer: str
    name: str
    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


def read_mode(info: Mapping[str, Any]) -> tuple[LoraMerge | None, dict[str, Any]]:
    """The merge that an update call asks for, None if it brings whole weights, and the call's other fields.

    Raises:
        RefitRefusedError: another mode, or numbers that make no sense.
    """
    rest = {key: value for key, value in info.items() if key not in ("weight_update_mode", "lora_alpha", "lora_rank")}
    mode, alpha, rank = (info.get(key) for key in ("weight_update_mode", "lora_alpha", "lora_rank"))
    if mode not in (None, MERGE):
        raise _refused("unknown mode", "weight_update_mode", code="unknown_mode", value=mode, hint=f"Known: {MERGE}.")
    for name, value, kinds in (("lora_alpha", alpha, (int, float)), ("lora_rank", rank, (int,))):
        if value is None:
            continue
        if mode is None:
            raise _refused(
                "it means nothing here",
                name,
                code="wrong_mode",
                value=value,
                hint=f"Send weight_update_mode {MERGE!r}.",
            )
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value <= 0:
            raise _refused("not a number above 0", name, code="invalid_lora", value=value, hint="Leave it out.")
    return (None if mode is None else LoraMerge(alpha, rank)), rest


def pairs_of(
    named: Iterable[tuple[str, torch.Tensor]], knows: Callable[[str], bool], module: str
) -> Iterator[LoraPair]:
    """Each pair, as soon as both of its halves are there: the very tensors that were given.

    `knows` says whether the module has such a layer. Peft's prefix, and the module's own name before a layer's, are
    taken off where that helps.

    Raises:
        RefitRefusedError: a tensor is no half of a pair, a layer is unknown, a half came alone or twice, or the halves
            don't fit each other.
    """
    waiting: dict[str, tuple[str, str, torch.Tensor]] = {}
    done: set[str] = set()
    for name, tensor in named:
        found = HALF.fullmatch(name)
        if found is None:
            raise _refused(
                f"tensor {name!r} is no half of a pair",
                name,
                code="not_lora",
                hint="Expected LAYER.lora_A and LAYER.lora_B (or lora_down and lora_up), with or without .weight.",
            )
        layer = _resolved(found["layer"], knows, module, name)
        half = "a" if found["half"] in ("lora_A", "lora_down") else "b"
        if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.element_size() < 2:
            raise _refused(
                f"tensor {name!r} is {_described(tensor)}",
                name,
                code="wrong_shape",
                hint="A half is a matrix of floating-point numbers; convolutions can't be adapted.",
            )
        other = waiting.pop(layer, None)
        if layer in done or (other is not None and other[0] == half):
            raise _refused(
                f"{name!r}: layer {layer!r} has this half already",
                name,
                code="duplicate_weight",
                hint="Send one adapter, each half once.",
            )
        mine = (half, name, tensor)
        if other is None:
            waiting[layer] = mine
            continue
        (_, a_name, a), (_, b_name, b) = sorted((mine, other), key=lambda kept: kept[0])
        if a.shape[0] != b.shape[1] or a.shape[0] == 0 or a.dtype != b.dtype:
            raise _refused(
                f"{a_name!r} is {_described(a)} and {b_name!r} is {_described(b)}",
                a_name,
                code="wrong_shape",
                hint="A pair is [rank, K] and [N, rank] of one dtype.",
            )
        done.add(layer)
        yield LoraPair(layer, a_name, a, b)
    for layer, (half, name, _) in waiting.items():
        missing = "lora_B" if half == "a" else "lora_A"
        raise _refused(
            f"layer {layer!r} has {name!r} and no {missing}; {len(waiting)} layers came by half",
            name,
            code="half_pair",
            hint="Send both halves in one call.",
        )


@torch.no_grad()
def merged(base: torch.Tensor, pair: LoraPair, scale: float) -> torch.Tensor:
    """`base + (b @ a) * scale`, computed in fp32 (fp64 for such a base) where `base` is, rounded once to its dtype.

    The order of operations is peft's, so that at fp32 the bits are those of its merge.
    """
    wide = torch.promote_types(base.dtype, torch.float32)
    a, b = (x.to(base.device, wide) for x in (pair.a, pair.b))
    with _full_precision():
        return (base.to(wide) + (b @ a) * scale).to(base.dtype)


@dataclass
class _Call:
    """What one update call has changed: for each weight the base that it is merged onto now, None where it is none;
    and the halves that came, by the module and the sender's name."""

    changes: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    weights: dict[Key, str] = field(default_factory=dict)
    halves: dict[Key, torch.Tensor] = field(default_factory=dict)


class LoraMerges:
    """Which weights of one rank are merged, and the base of each, in host memory. Its session is the refit's."""

    def __init__(self, target: RefitTarget, device: torch.device | None = None) -> None:
        """device: where merged weights are computed; by default, where each lies."""
        self._target = target
        self._device = device
        self._bases: dict[Key, torch.Tensor] = {}
        self._calls: list[_Call] = []
        self._can_undo_call = False

    def merged_weights(self) -> dict[str, list[str]]:
        """The names of the weights that hold a merged adapter, by module."""
        names: dict[str, list[str]] = {}
        for module, name in self._bases:
            names.setdefault(module, []).append(name)
        return names

    @property
    def alone(self) -> bool:
        """Whether all that came in this session is about merged adapters. Such a session is complete as it is."""
        kinds = {kind for call in self._calls for kind in call.weights.values()}
        return bool(kinds) and "whole" not in kinds

    def begin_call(self) -> None:
        """Before each update call, whatever becomes of it."""
        self._calls.append(_Call())
        self._can_undo_call = True

    def whole(self, items: Iterable[WeightItem], modules: Sequence[str]) -> Iterator[WeightItem]:
        """Whole weights, as they come; those that were merged are so no longer after the commit."""
        call = self._calls[-1]
        for item in items:
            module = item.module or modules[0]
            yield item  # what isn't taken is not noted
            key = module, self._target.tied(module, item.name)
            call.weights[key] = "whole"
            if key in self._bases:
                call.changes[key] = None

    def merging(self, items: Iterable[WeightItem], how: LoraMerge, modules: Sequence[str]) -> Iterator[WeightItem]:
        """The merged weight of each layer of which a pair comes.

        Raises:
            RefitRefusedError: as `pairs_of`; or a pair doesn't fit its weight, or the rank that was stated.
        """
        call = self._calls[-1]
        by_module: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for item in items:
            module = item.module or modules[0]
            if module not in modules:
                raise _refused(
                    f"module {module!r} is not part of this update",
                    item.name,
                    code="unknown_module",
                    hint=f"The session is about: {', '.join(modules)}.",
                )
            tensor = item.tensor.detach().clone()
            call.halves[module, item.name] = tensor
            by_module.setdefault(module, []).append((item.name, tensor))
        for module, named in by_module.items():
            weights = self._target.modules()[module]
            for pair in pairs_of(named, lambda layer, known=weights: f"{layer}.weight" in known, module):  # type: ignore[misc]
                yield WeightItem(module, f"{pair.layer}.weight", self._merged(module, pair, how, call))

    def restoring(self, modules: Sequence[str]) -> Iterator[WeightItem]:
        """The base of every merged weight of those modules; after the commit none of them is merged."""
        call = self._calls[-1]
        for key, base in self._bases.items():
            if key[0] in modules:
                yield WeightItem(*key, base)
                call.changes[key] = None
                call.weights[key] = "restored"

    def undo_last_call(self) -> None:
        """Afterwards the last call has not been; a second time it does nothing."""
        if self._can_undo_call:
            self._calls.pop()
        self._can_undo_call = False

    def came(self, digests: Mapping[Key, str]) -> dict[Key, str]:
        """The digest of each tensor as it was sent: halves instead of the weights that were made of them. Where weights
        are sharded, what was made here (a base that was put back, too) is a rank's own, and is left out."""
        ours = ("merged", "restored") if isinstance(self._target, ShardedTarget) else ("merged",)
        made = {key for call in self._calls for key, kind in call.weights.items() if kind in ours}
        sent = {key: value for key, value in digests.items() if (key[0], self._target.tied(*key)) not in made}
        halves = {key: tensor for call in self._calls for key, tensor in call.halves.items()}
        found = device_digests((f"{module}\0{name}", tensor) for (module, name), tensor in halves.items())
        return sent | {(module, name): found[f"{module}\0{name}"] for module, name in halves}

    def commit(self) -> None:
        """What came is merged now, and what came whole is not."""
        for call in self._calls:
            for key, base in call.changes.items():
                if base is None:
                    self._bases.pop(key, None)
                else:
                    self._bases[key] = base
        self.forget()

    def forget(self) -> None:
        """Nothing came: the session was undone, or a new one begins."""
        self._calls, self._can_undo_call = [], False

    def _merged(self, module: str, pair: LoraPair, how: LoraMerge, call: _Call) -> torch.Tensor:
        name = f"{pair.layer}.weight"
        live = self._live(module, name)
        if how.rank is not None and pair.rank != how.rank:
            raise _refused(
                f"{pair.name!r} is of rank {pair.rank}, and lora_rank says {how.rank}",
                pair.name,
                code="wrong_rank",
                value=how.rank,
                hint="Leave lora_rank out: each layer's own rank is in its tensors' shapes.",
            )
        check_fit(pair, live)
        key = module, self._target.tied(module, name)
        base = self._bases.get(key)
        if base is None:
            base = live.detach().to("cpu", copy=True)
        call.changes[key], call.weights[key] = base, "merged"
        return merged(base.to(self._device or live.device), pair, how.scale(pair.rank))

    def _live(self, module: str, name: str) -> torch.Tensor:
        """The weight as it is now. Where weights are sharded only this rank's part of it: no more will be written."""
        if isinstance(self._target, ShardedTarget):
            return self._target.own_part(module, name)
        return self._target.checkpoint_tensors(module)[name]


def check_fit(pair: LoraPair, weight: torch.Tensor) -> None:
    """Refuses a pair that is not of that weight."""
    expected = (pair.b.shape[0], pair.a.shape[1])
    if tuple(weight.shape) != expected or not weight.is_floating_point() or weight.element_size() < 2:
        raise _refused(
            f"the pair of {pair.layer!r} is of a matrix {expected}, and the weight is {_described(weight)}",
            pair.name,
            code="wrong_shape",
            hint="Was the adapter trained on this model?",
        )


def _resolved(layer: str, knows: Callable[[str], bool], module: str, name: str) -> str:
    bare = layer.removeprefix(PREFIX)
    found = next((option for option in (layer, bare, bare.removeprefix(f"{module}.")) if knows(option)), None)
    if found is None:
        raise _refused(
            f"{module!r} has no layer {bare!r} that could be adapted",
            name,
            code="unknown_layer",
            hint="Names are those of the model's layers, with or without peft's prefix. Nothing was changed.",
        )
    return found


@contextmanager
def _full_precision() -> Iterator[None]:
    """Inside, products of fp32 matrices are not rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _refused(message: str, field: str, *, code: str, hint: str, value: object = None) -> RefitRefusedError:
    return RefitRefusedError(message, code=code, field=field, value=value, hint=hint)
