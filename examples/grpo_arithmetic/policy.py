"""The trainer's side: the policy, its reference, its optimizer, what is sent to the engine, and checkpoints."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_runtime.assets import embedded_model_path

from .rollouts import Answer
from .settings import Settings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Policy:
    """The embedded model as transformers has it, trained in plain torch; the engine's own forward is another one, so
    log-probs agree to rounding and not to the bit."""

    def __init__(self, settings: Settings) -> None:
        folder = embedded_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if settings.kl > 0 else None
        self.trained: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def log_probs(
        self, answers: Sequence[Answer], temperature: float, *, model: torch.nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs `[n, L]` of the answers' tokens, padded to the longest answer, and a mask of what is no padding."""
        longest_answer = max(len(answer.output_ids) for answer in answers)
        longest = max(len(answer.prompt_ids) + len(answer.output_ids) for answer in answers)
        ids = torch.zeros(len(answers), longest, dtype=torch.long)
        places = torch.zeros(len(answers), longest_answer, dtype=torch.long)  # of the logits that tell the token
        tokens, mask = torch.zeros_like(places), torch.zeros(len(answers), longest_answer)
        attended = torch.zeros_like(ids)
        for i, answer in enumerate(answers):
            row = torch.tensor([*answer.prompt_ids, *answer.output_ids])
            first, count = len(answer.prompt_ids), len(answer.output_ids)
            ids[i, : len(row)], attended[i, : len(row)] = row, 1
            places[i, :count] = torch.arange(first - 1, first - 1 + count)
            tokens[i, :count], mask[i, :count] = row[first:], 1.0
        hidden: torch.Tensor = (model or self.model)(input_ids=ids, attention_mask=attended, use_cache=False).logits
        logits = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])) / temperature
        return torch.log_softmax(logits, dim=-1).gather(2, tokens[..., None])[..., 0], mask

    def engine_weights(self) -> dict[str, torch.Tensor]:
        """The weights by their names in a checkpoint; a tied one goes by its first name alone."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}

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
