"""What a Hugging Face folder says of its model: `config.json` in the spellings of transformers 4 and 5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine_control.errors import InvalidRequestError
from llm_runtime.layers.rotary import rope_type
from llm_runtime.models.base import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_model_config(folder: str | Path) -> ModelConfig:
    """Reads `config.json`, and the end tokens from `generation_config.json` if that names any.

    Without a dtype the model is one of fp32.

    Raises:
        InvalidRequestError: a file is absent or is no JSON object, a field that every model has is absent, or the model
            needs what no family here has (another activation, sliding windows, quantised weights).
    """
    folder = Path(folder)
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    end_tokens = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    architectures = raw.get("architectures") or []
    if not architectures:
        raise _bad_config("names no architecture", "architectures", None)
    _refuse_unsupported(raw)
    heads, hidden = whole_number(raw, "num_attention_heads"), whole_number(raw, "hidden_size")
    theta, scaling = _rope(raw)
    return ModelConfig(
        architecture=str(architectures[0]),
        vocab_size=whole_number(raw, "vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=whole_number(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=whole_number(raw, "num_key_value_heads", heads),
        head_dim=whole_number(raw, "head_dim", hidden // heads),
        intermediate_size=whole_number(raw, "intermediate_size"),
        max_position_embeddings=whole_number(raw, "max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype_named(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        rope_scaling=scaling,
        eos_token_ids=_token_ids(raw.get("eos_token_id") if end_tokens is None else end_tokens),
        raw=raw,
    )


def dtype_named(name: object) -> torch.dtype:
    """`bfloat16` or `torch.bfloat16` -> the dtype.

    Raises:
        InvalidRequestError: it is none that models are computed in.
    """
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise InvalidRequestError(
            f"models aren't computed in {short!r}",
            code="unsupported_model",
            field="dtype",
            value=short,
            hint=f"Choose one of {', '.join(DTYPES)}.",
        )
    return DTYPES[short]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidRequestError(
            f"{path.parent} holds no {path.name}, so it is no Hugging Face model",
            code="bad_model_path",
            field="model_path",
            value=str(path.parent),
            hint="Give a folder that `save_pretrained` wrote, a hub id, or 'embedded'.",
        ) from error
    except (OSError, ValueError) as error:
        raise _bad_config(f"{path} can't be read: {error}", path.name, None) from error
    if not isinstance(content, dict):
        raise _bad_config(f"{path} is no JSON object", path.name, None)
    return content


def whole_number(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field of `config.json`, or the default if it is absent.

    Raises:
        InvalidRequestError: it is no positive whole number.
    """
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad_config(f"{name} must be a positive whole number, not {value!r}", name, value)
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling: side by side in transformers 4, together in transformers 5."""
    together = raw.get("rope_parameters")
    scaling = together or raw.get("rope_scaling") or None
    theta = (together or {}).get("rope_theta") or raw.get("rope_theta") or 10_000.0
    scaling = None if rope_type(scaling) == "default" else scaling
    original = raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    if scaling is not None and original is not None:
        scaling = {"original_max_position_embeddings": original, **scaling}
    return float(theta), scaling


def _token_ids(given: object) -> tuple[int, ...]:
    """One id, a list of them or none."""
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise _bad_config(f"eos_token_id must be a token's id or a list of them, not {given!r}", "eos_token_id", given)
    return tuple(ids)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    windows = raw.get("use_sliding_window") and raw.get("max_window_layers", 0) < raw.get("num_hidden_layers", 0)
    kinds = raw.get("layer_types") or (["sliding_attention"] if windows else [])
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    rotated = (raw.get("rope_parameters") or raw).get("partial_rotary_factor", 1.0)
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") if raw.get("hidden_act", "silu") != "silu" else None,
        "layer_types": other,
        "quantization_config": (raw.get("quantization_config") or {}).get("quant_method"),
        "partial_rotary_factor": rotated if rotated != 1.0 else None,
    }
    for field, value in refused.items():
        if value is not None:
            raise InvalidRequestError(
                f"the model's {field} is {value!r}, and no family here has that",
                code="unsupported_model",
                field=field,
                value=value,
                hint="Supported: SiLU, full attention, full rotation, weights of fp32, bf16 or fp16.",
            )


def _bad_config(what: str, field: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"config.json: {what}", code="bad_model_config", field=field, value=value)
