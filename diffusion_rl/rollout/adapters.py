"""Unmerged LoRA adapters on the family's transformers, one rank's: by name, and in force for one batch at a time.

An adapter is applied by hooks that stand for the length of a forward: no module is wrapped and no weight renamed, so
that refits, checksums and the memory saver see the base alone. The operations and their order are those of peft's
linear layer, each through exact mode: a trainer's peft module has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from diffusion_rl.batch import FIRST
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.compiled import CompiledForward
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.models.runner import eager
from diffusion_rl.rollout.certification import probe_batches
from engine_control.checksum import combined_digest, device_digests
from engine_control.errors import NotExactError, RefitRefusedError
from engine_control.refit.adapter import AdapterConfig, unknown_adapter
from engine_control.refit.lora import check_fit, pairs_of
from rl_kernels.certify import certify, record
from rl_kernels.verdict_cache import VerdictCache

LinearChoices = Mapping[tuple[int, int, torch.dtype], str]


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of a transformer, and what is added to its output: `b (a x) * scale`."""

    module: torch.nn.Module
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def hook(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = args[0].to(self.a.dtype)
        return (output + F.linear(F.linear(x, self.a), self.b) * self.scale).to(output.dtype)

    @property
    def layout(self) -> tuple[object, ...]:
        """What a graph that was captured with it holds fixed."""
        return self.a.shape, self.b.shape, self.a.dtype, self.scale


@dataclass
class Adapter:
    """A loaded adapter. While it keeps its layout, new numbers are written into the same memory."""

    name: str
    layers: dict[str, AdaptedLayer]
    choices: LinearChoices
    version: str = ""
    source: str | None = None

    @property
    def layout(self) -> dict[str, tuple[object, ...]]:
        return {path: layer.layout for path, layer in self.layers.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{path}.{half}": getattr(layer, half) for path, layer in self.layers.items() for half in ("a", "b")}


class Adapters:
    """An `engine_control.adapters.AdapterStore`, and what the steps ask of it."""

    def __init__(self, family: ModelFamily, cache: VerdictCache | None = None) -> None:
        self._family = family
        self._cache = cache
        self._loaded: dict[str, Adapter] = {}
        self._prepared: Adapter | None = None

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Inside, the transformer computes with that adapter; None: with the base alone.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        self.check(name)
        if name is None:
            yield
            return
        with self._applied(self._loaded[name]):
            yield

    def check(self, name: str | None) -> None:
        """Refuses a name that no adapter has."""
        if name is not None and name not in self._loaded:
            raise unknown_adapter(name, self._loaded)

    def version(self, weight_version: str, name: str | None) -> str:
        """What computed a step: the version of the weights, and behind it the adapter's, as in `v3+policy@2`."""
        return weight_version if name is None else f"{weight_version}+{name}@{self._loaded[name].version}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """The factors of all adapters, by names that no module's weight has."""
        return {f"lora:{a.name}.{path}": t for a in self._loaded.values() for path, t in a.tensors().items()}

    @torch.no_grad()
    def prepare(self, name: str, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        self._prepared = None
        if isinstance(self._family.runner, CompiledForward):
            raise RefitRefusedError(
                "a compiled transformer takes no adapters",
                code="compiled",
                field="lora_name",
                value=name,
                hint="Start without torch_compile, or merge the adapter (weight_update_mode lora_merge).",
            )
        if self._family.tensor is not None:
            raise RefitRefusedError(
                "a transformer whose weights are shared by ranks takes no adapters",
                code="sharded",
                field="lora_name",
                value=name,
                hint="Start without --tp-size, or merge the adapter (weight_update_mode lora_merge).",
            )
        layers = self._layers(config, tensors)
        adapter = Adapter(name, layers, {})
        adapter.choices = self._certified(adapter)
        self._prepared = adapter
        kinds = sorted(f"{key} {way}" for key, way in adapter.choices.items())
        return {"digest": combined_digest(device_digests(adapter.tensors().items())), "choices": kinds}

    @torch.no_grad()
    def commit(self, version: str, source: str | None) -> None:
        new, self._prepared = self._prepared, None
        assert new is not None
        old = self._loaded.get(new.name)
        if old is not None and old.layout == new.layout and _same_modules(old, new):
            for mine, theirs in zip(old.tensors().values(), new.tensors().values(), strict=True):
                mine.copy_(theirs)
            new = old
        else:
            self._forget_graphs(new.name)
        new.version, new.source = version, source
        self._loaded[new.name] = new
        choices = self._family.choices
        self._family.choices = replace(choices, linear={**new.choices, **choices.linear}) if new.choices else choices

    def discard(self) -> None:
        self._prepared = None

    def unload(self, name: str) -> None:
        if self._loaded.pop(name, None) is not None:
            self._forget_graphs(name)

    def describe(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "version": adapter.version,
                "source": adapter.source,
                "layers": len(adapter.layers),
                "rank": max(len(layer.a) for layer in adapter.layers.values()),
                "bytes": sum(t.numel() * t.element_size() for t in adapter.tensors().values()),
            }
            for name, adapter in self._loaded.items()
        }

    def forget_graphs(self) -> None:
        """The adapters' tensors lie somewhere else now."""
        for name in self._loaded:
            self._forget_graphs(name)

    def _layers(self, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, AdaptedLayer]:
        device, linears = self._family.device, self._linears()
        own = ((name, tensor.detach().to(device, copy=True)) for name, tensor in tensors)
        layers = {}
        for pair in pairs_of(own, linears.__contains__, FIRST):
            module = linears[pair.layer]
            check_fit(pair, module.weight)
            for factor in (pair.a, pair.b):
                if not factor.isfinite().all():
                    raise RefitRefusedError(
                        f"layer {pair.layer!r}: it holds NaN or infinity",
                        code="non_finite_weights",
                        field=pair.name,
                        hint="See to the training; nothing changed.",
                    )
            layers[pair.layer] = AdaptedLayer(module, pair.a.contiguous(), pair.b.contiguous(), config.scale(pair))
        if not layers:
            raise RefitRefusedError("an adapter without tensors", code="invalid_adapter", field="tensors")
        return layers

    def _linears(self) -> dict[str, torch.nn.Linear]:
        """Of all transformers, by their paths; those of another than the first begin with its name."""
        return {
            path if owner == FIRST else f"{owner}.{path}": module
            for owner, transformer in self._family.transformers.items()
            for path, module in transformer.named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    def _certified(self, adapter: Adapter) -> LinearChoices:
        """How the adapter's products are computed, where that isn't known yet: as a trainer's certification finds it.

        Raises:
            NotExactError: some of them can't be made exact on this device.
        """
        family = self._family
        known = family.choices.linear
        needed = {(x.shape[1], x.shape[0], x.dtype) for x in adapter.tensors().values()} - known.keys()
        if not family.choices.exact or not known or not needed:  # nothing was promised, or nothing is new
            return {}
        runner, family.runner = family.runner, eager
        try:
            with self._applied(adapter):
                recorded = record(lambda: [family.predict(batch) for batch in probe_batches(family)])
        finally:
            family.runner = runner
        new = {k: call for k, call in recorded.items() if k.operation == "linear" and (*k.shape, k.dtype) in needed}
        certificate = certify(new, family.device, cache=self._cache)
        if not certificate.exact:
            raise NotExactError(
                f"the adapter isn't exact on {certificate.device}: {'; '.join(certificate.refused)}",
                field="lora_name",
                value=adapter.name,
                hint="Use another rank or dtype, or start with --disable-deterministic-inference.",
            )
        return certificate.choices.linear

    @contextmanager
    def _applied(self, adapter: Adapter) -> Iterator[None]:
        runner = self._family.runner
        handles = [layer.module.register_forward_hook(layer.hook) for layer in adapter.layers.values()]
        if isinstance(runner, CudaGraphs):
            runner.variant = adapter.name
        try:
            yield
        finally:
            if isinstance(runner, CudaGraphs):
                runner.variant = None
            for handle in handles:
                handle.remove()

    def _forget_graphs(self, name: str) -> None:
        if isinstance(self._family.runner, CudaGraphs):
            self._family.runner.forget(name)


def _same_modules(old: Adapter, new: Adapter) -> bool:
    return all(old.layers[path].module is layer.module for path, layer in new.layers.items())
