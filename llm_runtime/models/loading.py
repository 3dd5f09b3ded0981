"""From a Hugging Face folder or hub id to a model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from engine_control.errors import InvalidRequestError
from llm_runtime.assets import embedded_model_path
from llm_runtime.config import LLMConfig
from llm_runtime.layers.fp8 import why_no_scaled_product
from llm_runtime.layers.linear import multiply_bytes
from llm_runtime.models import families
from llm_runtime.models.base import CausalLM, OneRank, TensorParallel
from llm_runtime.models.checkpoint import checkpoint_tensors
from llm_runtime.models.decoder import DecoderLM
from llm_runtime.models.model_config import dtype_named, read_model_config
from llm_runtime.models.weights import MODULE, PlacedWeights

EMBEDDED = "embedded"
DUMMY_STD = 0.02
QUANTIZATIONS = (None, "fp8")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # weights, configs and tokenizers


def load_model(config: LLMConfig, tensor_parallel: TensorParallel | None = None) -> CausalLM:
    """The model, or this rank's part of it, on its device and with its weights.

    `device="auto"` is the current GPU of this process, if there is one.

    Raises:
        InvalidRequestError: naming what can't be loaded: the path, the architecture, a setting that no family has, a
            size that ranks can't share, or a tensor that is missing, unknown, of another shape, or not to be quantised.
    """
    folder = model_folder(config.model_path)
    model_config = read_model_config(folder)
    if config.quantization not in QUANTIZATIONS:
        raise InvalidRequestError(
            f"there is no quantization {config.quantization!r}",
            field="quantization",
            value=config.quantization,
            hint="Leave it out, or use 'fp8'.",
        )
    model_config = replace(model_config, quantised=config.quantization == "fp8")
    if config.dtype != "auto":
        model_config = replace(model_config, dtype=dtype_named(config.dtype))
    longest = model_config.max_position_embeddings
    if config.context_length is not None and config.context_length > longest:
        raise InvalidRequestError(
            f"context_length={config.context_length} is more than max_position_embeddings={longest}",
            field="context_length",
            value=config.context_length,
            hint="Leave it out, or state the longer context (and its rope scaling) in the model's config.json.",
        )
    family = family_of(model_config.architecture)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(automatic if config.device == "auto" else config.device):
        model = family(model_config, tensor_parallel, context_length=config.context_length).eval()
    if config.fp8_activations:
        _refuse_fp8_activations(config, model)
        multiply_bytes(model)
    if config.load_format == "dummy":
        _fill_at_random(model.refit_target(), config.random_seed or 0)
    else:
        _fill(model.refit_target(), checkpoint_tensors(folder))
    return model


def check_tensor_parallel(config: LLMConfig) -> None:
    """Whether `tp_size` ranks can share the model, before any of them is started.

    Raises:
        InvalidRequestError: a size doesn't divide, with the numbers; or as `load_model`, before it reads weights.
    """
    model_config = read_model_config(model_folder(config.model_path))
    with torch.device("meta"):
        family_of(model_config.architecture)(model_config, _Place(config.tp_size))


class _Place(OneRank):
    """The place of the first of several ranks that aren't there."""

    def __init__(self, size: int) -> None:
        self.size = size


def model_folder(model_path: str) -> Path:
    """The folder that a path, a hub id or `embedded` means; a hub's model is downloaded unless it is here already.

    Raises:
        InvalidRequestError: there is no such folder, and no such model that could be downloaded.
    """
    if model_path == EMBEDDED:
        return embedded_model_path()
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model_path.startswith((".", "/", "~")) or model_path.count("/") > 1:
        raise _bad_path(model_path, "there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model_path, allow_patterns=HUB_FILES))
    except (OSError, HFValidationError) as error:
        raise _bad_path(
            model_path, f"it is neither a folder nor a hub id that could be downloaded ({error})"
        ) from error


def family_of(architecture: str) -> type[DecoderLM]:
    """The family whose models have that name in `config.json`.

    Raises:
        InvalidRequestError: none has; the message lists those that are known.
    """
    known = {name: family for n in families.names() for family in [families.get(n)] for name in family.architectures}
    if architecture not in known:
        raise InvalidRequestError(
            f"no model family loads a {architecture}",
            code="unsupported_model",
            field="architectures",
            value=architecture,
            hint=f"Known: {', '.join(sorted(known))}.",
        )
    return known[architecture]


@torch.no_grad()
def _fill(target: PlacedWeights, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Writes every tensor to its place. Tied weights may come under one of their names, or as equals under several."""
    infos = target.modules()[MODULE]
    came: dict[str, str] = {}
    for name, tensor in tensors:
        if name.endswith(".rotary_emb.inv_freq"):  # a table of old checkpoints, which is computed here
            continue
        info = infos.get(name)
        if info is None:
            raise _bad_tensor(name, f"the model has no such weight among its {len(infos)}")
        if tuple(tensor.shape) != info.shape:
            raise _bad_tensor(name, f"its shape is {tuple(tensor.shape)}, and the model's is {info.shape}")
        first = came.setdefault(target.tied(MODULE, name), name)
        for live, part in target.destinations(MODULE, name, tensor):
            if first == name:
                live.copy_(part)
                if target.is_quantised(name):
                    _refuse_non_finite(name, live)
            elif not torch.equal(live.cpu(), part.to(live.dtype)):
                raise _bad_tensor(name, f"config.json ties it to {first!r}, and it has other numbers")
        target.finish([MODULE])  # one by one, so that a quantised model never lies here as it came
    missing = [name for name in infos if target.tied(MODULE, name) not in came]
    if missing:
        raise _bad_tensor(missing[0], f"it is missing from the checkpoint, with {len(missing) - 1} others")


@torch.no_grad()
def _fill_at_random(target: PlacedWeights, seed: int) -> None:
    """Small normal numbers, norms around one; each rank draws the whole tensors and keeps its parts of them."""
    generator: torch.Generator | None = None
    for name, info in target.modules()[MODULE].items():
        if target.tied(MODULE, name) != name:
            continue
        places = target.destinations(MODULE, name, torch.empty(info.shape, device="meta"))
        device = places[0][0].device
        generator = generator or torch.Generator(device).manual_seed(seed)
        whole = torch.randn(info.shape, device=device, generator=generator) * DUMMY_STD
        whole = whole + 1 if name.endswith("norm.weight") else whole
        for live, part in target.destinations(MODULE, name, whole):
            live.copy_(part)
        target.finish([MODULE])


def _refuse_fp8_activations(config: LLMConfig, model: CausalLM) -> None:
    reason = why_no_scaled_product(next(model.parameters()).device, model.config.dtype)
    if config.quantization != "fp8":
        reason = "the weights aren't quantised"
    elif config.deterministic != "off":
        reason = "such products aren't certified, so exact mode must be off"
    if reason is not None:
        raise InvalidRequestError(
            f"activations can't be quantised: {reason}",
            field="fp8_activations",
            value=True,
            hint="Leave fp8_activations out: then weights are dequantised for each product.",
        )


def _refuse_non_finite(name: str, part: torch.Tensor) -> None:
    if not part.isfinite().all():
        raise _bad_tensor(name, "it holds NaN or infinity, which can't be quantised")


def _bad_tensor(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"weight {name!r}: {what}", code="bad_checkpoint", field=name)


def _bad_path(model_path: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot load a model from {model_path!r}: {reason}",
        code="bad_model_path",
        field="model_path",
        value=model_path,
        hint="Give a Hugging Face folder, a hub id, or 'embedded'.",
    )


__all__ = ["family_of", "load_model", "model_folder", "read_model_config"]
