"""Both engines as the control layer sees them: what a test of that layer needs to run over either, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from tiny_llms import make_tiny_llm

from diffusion_rl.config import EngineConfig
from diffusion_rl.pipeline import RolloutPipeline
from engine_control.config import ControlConfig
from engine_control.methods import ControlMethods
from llm_runtime import LLM, LLMConfig

CONTROL = ControlConfig(enable_memory_saver=True)
FIELDS: dict[str, Any] = {"seed": 5, "num_inference_steps": 1, "height": 32, "width": 32, "output_type": "latent"}
Weights = dict[str, torch.Tensor]


class Controlled(Protocol):
    """An engine in this process. module: what a refit is about; needed_tags: without which it can't step."""

    methods: ControlMethods
    folder: Path
    module: str
    needed_tags: frozenset[str]

    def generate(self) -> tuple[str, ...]:
        """Computes something small, and says under which weight versions."""

    def weights(self) -> Weights:
        """A copy of the module's, by their names in the checkpoint."""

    def close(self) -> None:
        """Afterwards it is gone."""


class Diffusion:
    module = "transformer"
    needed_tags = frozenset({"weights"})

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.methods = RolloutPipeline.from_config(EngineConfig(str(folder), device="cpu", control=CONTROL))

    def generate(self) -> tuple[str, ...]:
        versions: tuple[str, ...] = self.methods("red", **FIELDS)[0].weight_versions
        return versions

    def weights(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self.methods.transformer.state_dict().items()}

    def close(self) -> None:
        self.methods.close()


class LanguageModel:
    module = "model"
    needed_tags = frozenset({"weights", "kv_cache"})

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.methods = LLM(
            config=LLMConfig(str(folder), device="cpu", control=CONTROL, max_total_tokens=512, overlap_schedule="on")
        )

    def generate(self) -> tuple[str, ...]:
        output = self.methods.generate([[1, 2, 3]], {"max_new_tokens": 1})[0].output
        return tuple(span.version for span in output.weight_versions)

    def weights(self) -> Weights:
        live = self.methods.engine.weights.target.checkpoint_tensors(self.module)
        return {name: live[name].clone() for name in live}

    def close(self) -> None:
        self.methods.close()


def make_controlled(kind: str, sd3_folder: Path, llm_folder: Path) -> Controlled:
    return Diffusion(sd3_folder) if kind == "diffusion" else LanguageModel(make_tiny_llm(llm_folder, layers=1))
