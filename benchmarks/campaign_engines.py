"""Both engines as the refit campaign sees them: how each is served, what is refitted, and what a probe shows."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from benchmarks.refit_faults import Weights
from engine_control.checksum import module_sha256
from engine_control.client import ControlClient
from engine_control.service_process import ServiceProcess


@dataclass(frozen=True)
class Probe:
    """What a probe request computed: its bytes by what they are of; and how much of it wasn't computed but found, in a
    cache that outlives requests and depends on the refitted weights."""

    outputs: Mapping[str, bytes]
    found_in_cache: int = 0


class CampaignEngine(Protocol):
    """One engine. module: what is refitted; has_cache: whether `found_in_cache` can be more than 0."""

    module: str
    has_cache: bool

    def service(self, model: str, log: Path, arguments: Sequence[str]) -> AbstractContextManager[ServiceProcess]:
        """A service of the model in a process of its own, on a free port."""

    def client(self, url: str) -> ControlClient:
        """The engine's own client."""

    def weights(self, model: str) -> Weights:
        """The module's weights by the names that a complete refit has."""

    def fresh(self, model: str, weights: Weights, folder: Path) -> tuple[str, Probe]:
        """Saves the model with these weights into `folder`, loads it anew from there, and probes it. Also returns the
        SHA-256 that the engine's checksum route must find."""

    def probe(self, client: Any) -> Probe:
        """The probe request, of the service."""


class Diffusion:
    module = "transformer"
    has_cache = False
    prompt = "a red circle"
    fields: Mapping[str, Any] = {
        "seed": 11,
        "num_inference_steps": 2,
        "num_outputs_per_prompt": 1,
        "guidance_scale": 1.0,
        "output_type": "both",
    }

    def service(self, model: str, log: Path, arguments: Sequence[str]) -> AbstractContextManager[ServiceProcess]:
        from diffusion_rl.cli.service_process import running_service

        return running_service(model, port=0, log=log, arguments=arguments)

    def client(self, url: str) -> ControlClient:
        from diffusion_rl.client import RolloutClient

        return RolloutClient(url, timeout=120)

    def weights(self, model: str) -> Weights:
        from diffusion_rl.pipeline import RolloutPipeline

        with RolloutPipeline.from_pretrained(model, device="cpu") as base:
            return {name: tensor.clone() for name, tensor in base.transformer.state_dict().items()}

    def fresh(self, model: str, weights: Weights, folder: Path) -> tuple[str, Probe]:
        from diffusion_rl.assets import embedded_model_path
        from diffusion_rl.config import EngineConfig
        from diffusion_rl.pipeline import RolloutPipeline

        shutil.copytree(embedded_model_path() if model == "embedded" else model, folder)
        for old in (folder / self.module).glob("*.safetensors*"):
            old.unlink()
        save_file(weights, folder / self.module / "diffusion_pytorch_model.safetensors")
        with RolloutPipeline.from_config(EngineConfig(str(folder), device="cpu")) as pipeline:
            return module_sha256(weights), self._probe(pipeline, self.prompt, **self.fields)

    def probe(self, client: Any) -> Probe:
        return self._probe(client.generate, self.prompt, **self.fields)

    @staticmethod
    def _probe(generate: Callable[..., Any], prompt: str, **fields: Any) -> Probe:
        [sample] = generate(prompt, **fields)
        return Probe({"picture": _bytes(sample.generated_output), "latents": _bytes(sample.generated_latents)})


class LanguageModel:
    """Its probe's prompt is longer than a page of the KV cache, so that the prefix cache has something of it."""

    module = "model"
    has_cache = True
    prompt = "What is 347 plus 85? Compute 12 - 34."
    sampling: Mapping[str, Any] = {"max_new_tokens": 16, "sampling_seed": 11, "ignore_eos": True}
    cache_tokens = 2048  # little, so that what a process holds doesn't grow while the cache is first filled

    def service(self, model: str, log: Path, arguments: Sequence[str]) -> AbstractContextManager[ServiceProcess]:
        from llm_runtime.cli.service_process import running_service

        arguments = [*arguments, "--max-total-tokens", str(self.cache_tokens)]
        return running_service(model, port=0, log=log, arguments=arguments)

    def client(self, url: str) -> ControlClient:
        from llm_runtime.client import LLMClient

        return LLMClient(url, timeout=120)

    def weights(self, model: str) -> Weights:
        """A tied weight goes by the first of its names, as in a checkpoint."""
        with self._llm(model) as llm:
            target = llm.engine.weights.target
            live = target.checkpoint_tensors(self.module)
            return {name: live[name].clone() for name in live if target.tied(self.module, name) == name}

    def fresh(self, model: str, weights: Weights, folder: Path) -> tuple[str, Probe]:
        from llm_runtime.models.loading import model_folder

        shutil.copytree(model_folder(model), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(weights, folder / "model.safetensors")
        with self._llm(str(folder)) as llm:
            target = llm.engine.weights.target
            names = target.modules()[self.module]
            whole = {name: weights[target.tied(self.module, name)] for name in names}
            return module_sha256(whole), self.probe(llm)

    def probe(self, client: Any) -> Probe:
        [sample] = client.generate(self.prompt, self.sampling, return_logprob=True)
        output = sample.output
        ids, log_probs = output.output_ids, [log_prob for log_prob, _ in output.output_token_logprobs]
        outputs = {"tokens": struct.pack(f"{len(ids)}q", *ids), "log-probs": struct.pack(f"{len(ids)}d", *log_probs)}
        return Probe(outputs, output.cached_tokens)

    def _llm(self, model: str) -> Any:
        from llm_runtime import LLM, LLMConfig

        return LLM(config=LLMConfig(model, device="cpu", max_total_tokens=self.cache_tokens))


ENGINES: Mapping[str, Callable[[], CampaignEngine]] = {"diffusion": Diffusion, "llm": LanguageModel}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
