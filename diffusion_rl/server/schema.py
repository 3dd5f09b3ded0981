"""The request body of `/rollout/generate`, and how it becomes `RolloutParams`.

The fields are those of SGLang's `RolloutRequest`, then this project's. `null` always means "left out".
"""

from __future__ import annotations

import reprlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from diffusion_rl.condition_images import load_wire_images
from diffusion_rl.params import (
    FieldNames,
    Limits,
    OutputDtype,
    OutputType,
    RolloutParams,
    StorageDtype,
    params_from_mapping,
)
from diffusion_rl.prompt_fields import PROMPTS
from diffusion_rl.server.encoding import DecodeError, value_of_json
from engine_control.errors import InvalidRequestError, LimitExceededError

MAX_CHOSEN_SEED = 2**31 - 1
MAX_ITEMS = 4096
MAX_BRACKETS = 100_000  # in a body, within its texts too; far more than MAX_ITEMS rows and the longest prompts have
MAX_NAME = 128  # characters of a field's, a step kind's or a device's name, of which none is that long
T = TypeVar("T")
MASK = "0 or 1 a token of "
# The first wrong item ends the validation: an error an item would be gigabytes for a body of a few megabytes.
Items = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
Tensor = dict[str, Any]  # as it stands in JSON; see `encoding`
Ids = Items[int] | Tensor
Mask = Items[bool | int] | Tensor
EXAMPLE: dict[str, JsonValue] = {
    "prompt": "a red square above a blue circle",
    "num_outputs_per_prompt": 4,
    "seed": 42,
    "num_inference_steps": 10,
    "rollout_sde_type": "sde",
    "rollout_noise_level": 0.7,
    "rollout_debug_mode": False,
    "rollout_return_denoising_env": True,
    "rollout_return_dit_trajectory": True,
}


class RolloutRequest(BaseModel):
    """One prompt and how to roll it out."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra={"examples": [EXAMPLE]}
    )

    prompt: str | None = Field(
        None,
        description="One prompt; a group of samples comes from `num_outputs_per_prompt`. Needed, if there are neither "
        "`prompt_ids` nor `prompt_embeds`.",
    )
    negative_prompt: str | None = Field(None, description="For classifier-free guidance.")
    seed: int | None = Field(None, description="Sample i has seed `seed + i`. Left out, one is chosen and returned.")
    generator_device: str = Field(
        "cuda", max_length=MAX_NAME, description="Accepted for compatibility; replies name the effective one."
    )
    width: int | None = Field(None, description="Pixels; the model's own default if left out.")
    height: int | None = Field(None, description="Pixels; the model's own default if left out.")
    num_inference_steps: int | None = Field(None, description="T, the number of denoising steps.")
    num_outputs_per_prompt: int | None = Field(None, description="K, the samples of this group; left out, 1.")
    guidance_scale: float | None = Field(None, description="Classifier-free guidance; FLUX.1 dev embeds it.")
    true_cfg_scale: float | None = Field(None, description="Classifier-free guidance of Qwen-Image and FLUX.")
    num_frames: int | None = Field(None, description="Of a video; 1 or null for picture models.")
    fps: int | None = Field(None, description="Accepted for compatibility: no model here is conditioned on it.")
    rollout: bool = Field(True, description="false: evaluation, images only.")
    rollout_sde_type: str = Field("sde", max_length=MAX_NAME, description="sde, cps, dance, ode or affine.")
    rollout_noise_level: float = Field(0.7, description="eta, the noise level of the stochastic steps.")
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: bool = Field(True, description="Return four more `[T, ...]` tensors a sample.")
    rollout_return_denoising_env: bool = Field(False, description="Return what the transformer was conditioned on.")
    rollout_return_dit_trajectory: bool = Field(False, description="Return latents, timesteps and sigmas.")
    rollout_sde_step_indices: Items[int] | None = Field(None, description="The stochastic steps; null: all of them.")
    rollout_return_step_indices: Items[int] | None = Field(None, description="Which states of 0..T to return.")
    image_path: Items[str] | str | None = Field(None, description="Null: no path or address is opened; see `image`.")
    suppress_logs: bool = Field(False, description="Accepted for compatibility.")
    extra_sampling_params: dict[str, Any] | None = Field(
        None, description="More fields of this request, merged over the others (but for `rollout`)."
    )
    rollout_video_dtype: Literal["uint8"] | None = Field(None, description="The same as `output_dtype`.")
    rid: str | None = Field(None, min_length=1, max_length=128, description="The request's id, for /abort_request.")

    guidance_scale_2: float | None = Field(None, description="For models with two transformers: the second one's.")
    cfg_normalization: float | bool | None = Field(None, description="Limits a guided velocity's norm (Z-Image).")
    cfg_truncation: float | None = Field(None, description="0 (noise) to 1: no guidance after that time (Z-Image).")
    seeds: Items[int] | None = Field(None, description="One seed a sample, instead of `seed + i`.")
    rollout_sde_window_size: int | None = Field(None, description="A contiguous run of that many stochastic steps,")
    rollout_sde_window_range: Items[int] | None = Field(None, description="which lies in steps [low, high).")
    sigmas: Items[float] | None = Field(None, description="T values to be shifted, or T + 1 that end with 0, as is.")
    flow_shift: float | None = Field(None, description="Replaces the scheduler's shift.")
    max_sequence_length: int | None = Field(None, description="Longest prompt, in tokens of the long text encoder.")
    init_same_noise: bool = Field(False, description="All samples of the group start from one initial latent.")
    initial_noise_seed: int | None = Field(None, description="A seed for the initial latents alone.")
    rollout_share_prefix: bool = Field(True, description="Compute common deterministic steps of a group once.")
    affine_coefficients: Items[Items[float]] | None = Field(None, description="Rows (a, b, c, s) for `affine`.")
    rollout_latents_dtype: StorageDtype = "float32"
    output_type: OutputType = "image"
    output_dtype: OutputDtype = "float32"
    priority: int = Field(0, description="Larger goes first.")
    lora_name: str | None = Field(None, max_length=MAX_NAME, description="A loaded adapter; left out, the base alone.")
    adapter: str | None = Field(None, max_length=MAX_NAME, description="The same as `lora_name`.")
    rollout_return_partial: bool = Field(
        False, description="If the request is aborted by a call, answer 200 with its samples as far as they are."
    )
    resume_from: Items[dict[str, Any] | None] | None = Field(
        None,
        description="One `resume_state` of an aborted sample for each sample, as it came in JSON (a reply's tensor is "
        "one here too), null to begin anew; with the aborted request's other fields, `seed` included, and the samples' "
        "`seeds`.",
    )
    prompt_ids: Ids | None = Field(None, description="The prompt as tokens of the first text encoder, all of them.")
    prompt_mask: Mask | None = Field(None, description=f"{MASK}`prompt_ids`: which are no padding.")
    extra_prompt_ids: dict[str, Any] | None = Field(None, description="Those of other text encoders, by name.")
    prompt_embeds: Tensor | None = Field(None, description="The prompt as embeddings: a tensor `[L, D]`.")
    prompt_embeds_mask: Mask | None = Field(None, description=f"{MASK}`prompt_embeds`, where the pipeline has one.")
    pooled_prompt_embeds: Tensor | None = Field(None, description="`[P]`, with `prompt_embeds` (SD3, FLUX).")
    negative_prompt_ids: Ids | None = Field(None, description="The negative prompt as tokens.")
    negative_prompt_mask: Mask | None = Field(None, description=f"{MASK}`negative_prompt_ids`.")
    negative_extra_prompt_ids: dict[str, Any] | None = Field(None, description="As `extra_prompt_ids`.")
    negative_prompt_embeds: Tensor | None = Field(None, description="The negative prompt as embeddings.")
    negative_prompt_embeds_mask: Mask | None = Field(None, description=f"{MASK}`negative_prompt_embeds`.")
    negative_pooled_prompt_embeds: Tensor | None = Field(None, description="With `negative_prompt_embeds`.")
    image: str | Tensor | Items[str | Tensor] | None = Field(
        None,
        description="For models that edit pictures: base64 of a PNG, JPEG or WebP file, that as a data URL, or a "
        "tensor `[3, H, W]`, uint8 or in [0, 1]; a list where the model takes several.",
    )


TENSORS_IN = ("resume_from", *(name for prompt in PROMPTS.values() for name in astuple(prompt)))
PARAM_NAMES = tuple(field.name for field in fields(RolloutParams))
NO_USE_HERE = ("image_path", "boundary_ratio")
EXTRA_NAMES = ("boundary_ratio", "quality")  # known in extra_sampling_params alone


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request: its id, and what the engine is to compute."""

    request_id: str
    params: RolloutParams


def load_json(body: bytes) -> dict[str, Any]:
    """The object that a request body holds.

    Raises:
        InvalidRequestError: `invalid_json`, for broken text and for NaN or Infinity; or no object.
        LimitExceededError: it holds so many lists and objects that the interpreter would stand still to make them.
    """
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_BRACKETS:
        raise LimitExceededError(
            f"{brackets} opening brackets in the body, at most {MAX_BRACKETS} are read",
            value=brackets,
            hint="Send fewer lists.",
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}",
            code="invalid_json",
            hint="Send one JSON object (RFC 8259: no NaN, no Infinity).",
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", value=type(value).__name__, hint="See /docs.")
    return value


def parse_rollout_request(
    values: Mapping[str, Any], *, limits: Limits, step_kinds: Sequence[str], lenient: bool, most_pictures: int = 1
) -> ParsedRequest:
    """Checks everything about a request that can be known without the model.

    Raises:
        InvalidRequestError: naming the field, its value and the way out.
    """
    request = validated(_merged(values, lenient=lenient))
    present = request.model_dump(exclude_unset=True)
    if present.get("rollout_video_dtype") is not None:
        present["output_dtype"] = present["rollout_video_dtype"]
    if "adapter" in present and present.setdefault("lora_name", present["adapter"]) != present["adapter"]:
        raise InvalidRequestError(
            f"lora_name says {present['lora_name']!r}",
            field="adapter",
            value=present["adapter"],
            hint="They are two names of one field: send one of them.",
        )
    params = {name: value for name, value in present.items() if name in PARAM_NAMES}
    if "image" in params:
        images = _with_tensors("image", params["image"])
        params["image"] = load_wire_images(images, most=most_pictures, max_pixels=limits.max_image_pixels)
    params |= {name: _with_tensors(name, params[name]) for name in TENSORS_IN if name in params}
    if "seed" not in params and "seeds" not in params:
        params["seed"] = secrets.randbelow(MAX_CHOSEN_SEED - request_count(params))
    parsed = params_from_mapping(params)
    parsed.validate(limits, step_kinds=step_kinds)
    return ParsedRequest(request.rid or uuid.uuid4().hex, parsed)


def _with_tensors(name: str, value: Any) -> Any:
    try:
        return value_of_json(value)
    except DecodeError as error:
        raise InvalidRequestError(
            f"a tensor in it can't be read: {error}",
            field=name,
            hint='Send {"__tensor__": true, "data": ...} as it came in a JSON reply.',
        ) from error


def request_count(params: Mapping[str, Any]) -> int:
    """K, bounded so that a chosen seed leaves room for the group's others."""
    return min(max(int(params.get("num_outputs_per_prompt", 1)), 1), 2**20)


def validated(values: Mapping[str, Any]) -> RolloutRequest:
    """The request, if every field has its type.

    Raises:
        InvalidRequestError: naming the first field that has not.
    """
    try:
        return RolloutRequest.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(part) for part in first["loc"]]
        where = f" at {'.'.join(path)}" if len(path) > 1 else ""
        raise InvalidRequestError(
            f"wrong type or value{where}: {first['msg'][0].lower()}{first['msg'][1:]}",
            field=path[0] if path else None,
            value=outline(first["input"]),
            hint="See /docs for the fields of a request and their types.",
        ) from error


class _Outline(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return f"an object of {len(x)} fields"


_OUTLINE = _Outline()
_OUTLINE.maxstring = 200
_OUTLINE.maxlong = 200


def outline(value: object) -> object:
    """A JSON value as it stands in an error: itself if it is a scalar, else its beginning, whatever its size."""
    return _OUTLINE.repr(value) if isinstance(value, list | dict) else value


def _merged(values: Mapping[str, Any], *, lenient: bool) -> dict[str, Any]:
    """The request's fields with `extra_sampling_params` laid over them, nulls left out and aliases resolved."""
    top_names = tuple(RolloutRequest.model_fields)
    merged = _known(values, top_names, lenient=lenient)
    extra = merged.pop("extra_sampling_params", {})
    if not isinstance(extra, Mapping):
        raise InvalidRequestError(
            "must be an object", field="extra_sampling_params", value=outline(extra), hint='Send {"field": value}.'
        )
    extra_names = (*top_names, *EXTRA_NAMES)
    extra = _known(extra, tuple(n for n in extra_names if n != "extra_sampling_params"), lenient=lenient)
    if extra.get("rollout", merged.get("rollout", True)) != merged.get("rollout", True):
        raise InvalidRequestError(
            "extra_sampling_params can't change it",
            field="rollout",
            value=outline(extra["rollout"]),
            hint="Send it at the top.",
        )
    merged.update(extra)
    if isinstance(merged.get("seed"), list):
        merged["seeds"] = merged.pop("seed")
        if isinstance(values.get("seed"), int):
            merged["seed"] = values["seed"]
    _refuse_what_has_no_use(merged)
    return merged


def _known(values: Mapping[str, Any], names: Sequence[str], *, lenient: bool) -> dict[str, Any]:
    unknown = [name for name in values if name not in names]
    if unknown and not lenient:
        raise FieldNames(tuple(names)).unknown(unknown[0][:MAX_NAME], outline(values[unknown[0]]))
    return {name: value for name, value in values.items() if name in names and value is not None}


def _refuse_what_has_no_use(merged: dict[str, Any]) -> None:
    quality = merged.pop("quality", "exact")
    if quality != "exact":
        raise InvalidRequestError(
            "there are no approximate modes",
            field="quality",
            value=outline(quality),
            hint="Leave it out, or send 'exact'.",
        )
    for name in NO_USE_HERE:
        value = merged.get(name)
        if value is not None and value != []:
            raise InvalidRequestError(
                f"no model here has a use for {name}",
                code="unsupported_field",
                field=name,
                value=outline(value),
                hint="Send pictures themselves, as `image`." if name == "image_path" else "Leave it out.",
            )
        if name not in RolloutRequest.model_fields:
            merged.pop(name, None)
