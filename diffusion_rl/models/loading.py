"""From a diffusers folder or hub id to a pipeline in memory."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import is_accelerate_available
from safetensors import SafetensorError, safe_open

from engine_control.errors import InvalidRequestError

EMBEDDED = "embedded"
WRITE_AGAIN = "Write or download it again."
DTYPE = "dtype" if tuple(map(int, diffusers.__version__.split(".")[:2])) >= (0, 42) else "torch_dtype"  # its older name
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_pipeline(model_path: str, dtype: torch.dtype | None = None) -> tuple[Any, Path | None]:
    """The pipeline in `dtype` (None: each component as it is stored), and its folder if it is a local one.

    Components that the checkpoint leaves out (an SD3 without T5) stay None.

    Raises:
        InvalidRequestError: the folder is missing, is no diffusers pipeline, or has a damaged file.
    """
    if model_path == EMBEDDED:
        from diffusion_rl.assets import embedded_model_path

        model_path = str(embedded_model_path())
    folder = Path(model_path)
    if not folder.is_dir():
        if folder.exists() or model_path.startswith((".", "/", "~")) or model_path.count("/") > 1:
            raise _bad_path(model_path, "there is no such folder")
        return _from_hub(model_path, dtype), None
    index = folder / "model_index.json"
    if not index.is_file():
        raise _bad_path(model_path, "it holds no model_index.json, so it is no diffusers pipeline")
    try:
        found = json.loads(index.read_text())
    except ValueError as error:
        raise _bad_path(str(index), f"it is no JSON ({error})", WRITE_AGAIN) from error
    return _load(folder, dtype, {**_absent_components(found), **_processor(folder, found)}), folder


def _load(folder: Path, dtype: torch.dtype | None, given: dict[str, Any]) -> Any:
    path, stored = str(folder), stored_dtypes(folder)  # which finds damaged files, too
    dtypes = stored if dtype is None else dtype  # with None diffusers takes fp32
    try:  # None: only for modules that keep parts in fp32, which diffusers can't load otherwise
        pipeline = DiffusionPipeline.from_pretrained(path, low_cpu_mem_usage=None, **{DTYPE: dtypes}, **given)
    except NameError as error:  # diffusers then goes on to use what it could not import
        if is_accelerate_available():
            raise
        reason = "it has modules that keep parts in fp32, and diffusers loads those with the package accelerate alone"
        raise _bad_path(path, reason, "pip install accelerate") from error
    pipeline.set_progress_bar_config(disable=True)
    if dtype is not None:
        _cast(pipeline, dtype)
    return pipeline


def _cast(pipeline: Any, dtype: torch.dtype) -> None:
    """Casts what `from_pretrained` left in another precision, but for modules that name parts to be kept in fp32."""
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module) and not getattr(module, "_keep_in_fp32_modules", None):
            module.to(dtype)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype that most of each component's numbers are stored in, by its name in the pipeline, and `default`, fp32,
    for all else. Files of a variant (`.fp16.`) aren't loaded, and don't count.

    Raises:
        InvalidRequestError: a file is cut short, or no safetensors file at all.
    """
    found = {"default": torch.float32}
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        counts: Counter[torch.dtype] = Counter()
        for file in component.glob("*.safetensors"):
            if "." in file.stem:
                continue
            try:
                counts += _numbers_by_dtype(file)
            except SafetensorError as error:
                raise _bad_path(str(file), f"it is no whole safetensors file ({error})", WRITE_AGAIN) from error
        if counts:
            found[component.name] = counts.most_common(1)[0][0]
    return found


def _numbers_by_dtype(file: Path) -> Counter[torch.dtype]:
    counts: Counter[torch.dtype] = Counter()
    with safe_open(file, framework="pt") as tensors:
        for one in (tensors.get_slice(name) for name in tensors.keys()):  # noqa: SIM118
            if (dtype := STORED.get(one.get_dtype())) is not None:
                counts[dtype] += math.prod(one.get_shape())
    return counts


def _from_hub(model_id: str, dtype: torch.dtype | None) -> Any:
    try:
        folder = Path(DiffusionPipeline.download(model_id))
        return _load(folder, dtype, _processor(folder, json.loads((folder / "model_index.json").read_text())))
    except OSError as error:
        raise _bad_path(model_id, f"it is neither a folder nor a hub id that could be loaded ({error})") from error


def _processor(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """The processor, if the pipeline has one, where diffusers couldn't load it."""
    if not index.get("processor"):
        return {}
    from diffusion_rl.models.processor import processor_of  # imports transformers' image processing

    return processor_of(folder, index)


def _absent_components(index: dict[str, Any]) -> dict[str, None]:
    """Text encoders that the pipeline's class knows and the checkpoint leaves out, as `name=None` for diffusers."""
    known = {"StableDiffusion3Pipeline": ("text_encoder_3", "tokenizer_3")}.get(index.get("_class_name", ""), ())
    return {name: None for name in known if (index.get(name) or [None])[0] is None}


def _bad_path(
    model_path: str, reason: str, hint: str = "Give a diffusers-format folder, a hub id, or 'embedded'."
) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot load a model from {model_path!r}: {reason}",
        code="bad_model_path",
        field="model_path",
        value=model_path,
        hint=hint,
    )
