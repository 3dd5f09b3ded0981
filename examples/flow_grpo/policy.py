"""The trainer's side: the policy, its reference, its optimizer, what is sent to the engine, and checkpoints."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.rollout.certification import cache_of, make_exact
from diffusion_rl.trainer import certified_family

from .settings import Settings

ADAPTED = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Policy:
    """The transformer that is trained, certified like an engine's, so that at equal weights it has the engine's bits.

    With `lora` an unmerged adapter is trained. The engine gets merged weights then, which are rounded once more than
    the adapter's own sum: its log-probs are close to the trainer's, and equal only while the adapter is zero.
    """

    def __init__(self, settings: Settings, model: str = "embedded", *, family: ModelFamily | None = None) -> None:
        """`family`, if it is given, is certified and trained where it is, and no `model` is loaded."""
        pipeline, defaults = load_pipeline(model) if family is None else (family.pipeline, None)
        torch.manual_seed(settings.seed)  # of the adapter's first matrices; nothing else is drawn from it
        self.lora = settings.lora > 0
        transformer = pipeline.transformer.requires_grad_(not self.lora)
        if self.lora:
            from peft import LoraConfig

            config = LoraConfig(r=settings.lora, lora_alpha=2 * settings.lora, target_modules=ADAPTED)
            transformer.add_adapter(config)
        if family is not None:
            make_exact(family, "on", cache=cache_of(EngineConfig()))
        self.family: ModelFamily = certified_family(pipeline, defaults) if family is None else family
        self.transformer: torch.nn.Module = transformer
        self._frozen = None if self.lora or settings.kl == 0 else copy.deepcopy(transformer).requires_grad_(False)
        named = [(name, p) for name, p in transformer.named_parameters() if p.requires_grad]
        self.trained: dict[str, torch.nn.Parameter] = dict(named)
        self.optimizer = torch.optim.AdamW([p for _, p in named], lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)

    @contextmanager
    def reference(self) -> Iterator[torch.nn.Module]:
        """Inside, the base model: a frozen copy, or the policy with its adapter off."""
        if self._frozen is not None:
            yield self._frozen
            return
        transformer: Any = self.transformer
        transformer.disable_adapters()
        try:
            yield transformer
        finally:
            transformer.enable_adapters()

    def engine_weights(self) -> dict[str, torch.Tensor]:
        """The weights by the names that the engine's transformer has; adapters are merged in a copy."""
        if not self.lora:
            return {name: tensor.detach() for name, tensor in self.transformer.state_dict().items()}
        from peft.tuners.tuners_utils import BaseTunerLayer

        merged = copy.deepcopy(self.transformer)
        for module in merged.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()
        plain = {name: tensor for name, tensor in merged.state_dict().items() if "lora_" not in name}
        return {name.replace(".base_layer.", "."): tensor.detach() for name, tensor in plain.items()}

    def set_learning_rate(self, lr: float) -> None:
        """Of the next optimizer steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, max_grad_norm: float) -> float:
        """One optimizer step; the gradients are gone afterwards. Returns their norm."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.values(), max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Writes weights, moments and `state` (JSON) as one safetensors file, whole or not at all."""
        tensors = {f"weights.{name}": p.detach() for name, p in self.trained.items()}
        steps = 0
        for name, parameter in self.trained.items():
            for moment in MOMENTS:
                if moment in (held := self.optimizer.state[parameter]):
                    tensors[f"{moment}.{name}"] = held[moment]
                    steps = int(held["step"])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, partial, {"state": json.dumps(state), "steps": str(steps)}
        )
        os.replace(partial, path)

    def load(self, path: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Takes over what `save` wrote, if `check(state)` doesn't raise; returns its `state`."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            state: dict[str, Any] = json.loads(metadata["state"])
            check(state)
            names = set(file.keys())
            for name, parameter in self.trained.items():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"weights.{name}"))
                if f"{MOMENTS[0]}.{name}" in names:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(float(metadata["steps"])),
                        **{moment: file.get_tensor(f"{moment}.{name}") for moment in MOMENTS},
                    }
        return state
