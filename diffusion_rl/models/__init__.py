"""Model families: one file each, on diffusers' models and schedulers, by the file's name."""

from __future__ import annotations

from pathlib import Path

import torch

from diffusion_rl.models.base import ModelFamily
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.models.offload import offload_pipeline
from engine_control.errors import InvalidRequestError
from engine_control.registry import Registry

families: Registry[ModelFamily] = Registry(
    "diffusion_rl.models",
    ModelFamily,  # type: ignore[type-abstract]
    noun="model family",
    skip=(
        *("compiled", "decoder", "fused_blocks", "fused_flux", "graphs", "loading", "offload", "packed"),
        *("picture_editing", "prompts", "prompt_encoding", "processor", "runner", "single_frame"),
    ),
)


def family_for(pipeline: object, defaults_folder: Path | None = None) -> ModelFamily:
    """The family that serves this diffusers pipeline.

    Raises:
        InvalidRequestError: no family serves pipelines of its class; the message lists those that are served.
    """
    name = type(pipeline).__name__
    served = {families.get(n).pipeline_class_name: families.get(n) for n in families.names()}
    if name not in served:
        raise InvalidRequestError(
            f"no model family serves a {name}",
            code="unsupported_model",
            field="model_path",
            value=name,
            hint=f"Served pipelines: {', '.join(sorted(served))}.",
        )
    return served[name](pipeline, defaults_folder)


def load_family(
    model_path: str, *, dtype: torch.dtype | None = None, device: str = "cpu", offload: int | None = None
) -> ModelFamily:
    """Loads a diffusers folder or hub id (`embedded`: the model in this package) onto `device`, ready to predict.

    offload: the transformer's blocks stay in host memory, and come to the device in groups of that many.
    """
    pipeline, folder = load_pipeline(model_path, dtype)
    if offload is None:
        pipeline.to(device)
    else:
        offload_pipeline(pipeline, device, group_size=offload)
    return family_for(pipeline, folder)


__all__ = ["ModelFamily", "families", "family_for", "load_family"]
