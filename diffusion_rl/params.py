"""What one asks for: a rollout request as plain, validated data. Imports no torch, so that any process may use it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from diffusion_rl.prompt_fields import PROMPTS, check_forms
from engine_control.errors import InvalidRequestError, LimitExceededError, UnknownFieldError

OutputType = Literal["image", "latent", "both"]
OutputDtype = Literal["float32", "uint8"]
StorageDtype = Literal["float32", "bfloat16", "float16"]
MAX_SEED = 2**64 - 1
MAX_SCALE = 1e4  # of guidance and shift; beyond it a half-precision model overflows
MAX_NOISE_LEVEL = 1e3
MAX_COEFFICIENT = 1e6


@dataclass(frozen=True)
class Limits:
    """The largest request that an engine accepts. A larger one is refused before any model work."""

    max_num_outputs_per_prompt: int = 64
    max_num_inference_steps: int = 200
    max_pixels: int = 2048 * 2048
    max_image_pixels: int = 4096 * 4096
    max_num_frames: int = 257
    max_latent_elements: int = 2**24
    max_prompt_characters: int = 8192
    max_sequence_length: int = 1024
    max_queued_samples: int = 4096


@dataclass(frozen=True)
class RolloutParams:
    """One prompt and how to roll it out. Fields carry the names of SGLang's `RolloutRequest`, then our own; those of a
    prompt that is no text are diffusers' (embeddings) and verl-omni's (token ids).

    `None` means the model's own default. A request is stochastic at the steps that `rollout_sde_step_indices` (or the
    window) names and runs ODE steps elsewhere; sample i of the group has seed `seed + i`, unless `seeds` names them.

    Field notes:
        prompt, prompt_ids, prompt_embeds: the prompt in one of three forms, and the negative one in one of its three;
            the two need not be of one form. Ids are a list or an integer tensor `[L]`, as the tokenizer of the
            pipeline's first text encoder makes them of the whole text (special tokens, template); `extra_prompt_ids`
            names those of the others, and `prompt_mask` (`[L]`, 0 or 1) the ones that are no padding. Embeddings are
            `[L, D]` (or `[1, L, D]`) in fp32, bf16 or fp16, as the pipeline's `encode_prompt` returns them;
            `prompt_embeds_mask` is for pipelines that have such a mask, `pooled_prompt_embeds` `[P]` for those that
            have such a vector. Nobody changes embeddings: a text encoder's refit leaves them as they came.
        image: for models that edit pictures: one, or a list where the pipeline takes several. uint8 `[3, H, W]`, or
            floats in [0, 1]; `RolloutPipeline` and `RolloutClient` take PIL images and paths too, a request's body
            base64 of a file. With `height` and `width` left out, the output has the (last) picture's proportions.
        num_frames: of a video, 1 + a multiple of what the VAE puts into one latent frame. Pictures have none, or 1.
        guidance_scale_2: the guidance scale of the second transformer, of pipelines that have two; by default that of
            the first.
        cfg_normalization: the most that a guided velocity's norm may be, in norms of the one with the prompt (true: 1;
            0 or false: as it comes). cfg_truncation: from 0 (noise) to 1, the time after which no step is guided. For
            pipelines that have them.
        lora_name: the adapter that the transformer computes with, unmerged; None is the base alone.
        rollout_sde_type: a step kind (`sde`, `cps`, `dance`, `ode`, `affine`).
        rollout_noise_level: eta, the noise level of the stochastic steps. 0 makes the request an ODE request.
        rollout_log_prob_no_const: log-probs are `mean(-(x' - mean)^2)` instead of the full Gaussian density.
        rollout_return_step_indices: which of the states 0..T to return; T is the final one.
        rollout_sde_window_size, rollout_sde_window_range: a contiguous run of stochastic steps, whose start is drawn
            from the request's seed within `[low, high)`; the range's default is `(0, T - 1)`, so that the last step
            stays deterministic.
        sigmas: T values are what diffusers' pipelines take as `sigmas=` (the scheduler shifts them); T + 1 values that
            end with 0 are the final grid, used as they stand.
        flow_shift: replaces the `shift` of the checkpoint's scheduler.
        init_same_noise: all samples of the group start from one initial latent, that of seed `initial_noise_seed`, or
            of the request's seed.
        initial_noise_seed: the seed of the initial latents alone: sample i uses `initial_noise_seed + i`, or all the
            same one with `init_same_noise`. The noise of the steps keeps following `seed`.
        rollout_share_prefix: compute the deterministic steps that a group with the same initial noise has in common
            once. Results are the same bits either way.
        affine_coefficients: for `affine`, one row `(a, b, c, s)` a step: mean = a x + b v + c x0_prev, standard
            deviation s; x0_prev is the previous step's prediction `x - sigma v` (zero at the first step).
        rollout_latents_dtype: what a stochastic request's states are rounded to; log-probs are those of the rounded
            state, and the rounded state is what the next step reads.
        rollout_return_partial: if the request is aborted by a command, it is answered with its samples as they are.
        resume_from: the `resume_state`s of aborted samples, one for each sample of this request, None to begin anew.
            With the fields of the aborted request, and `seeds` that name the samples, they end with the bits that
            they would have had. Keep its `seed` too: what samples have in common is drawn from it.
    """

    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    generator_device: str = "cuda"
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    num_outputs_per_prompt: int = 1
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_frames: int | None = None
    guidance_scale_2: float | None = None
    cfg_normalization: float | bool | None = None
    cfg_truncation: float | None = None
    rollout: bool = True
    rollout_sde_type: str = "sde"
    rollout_noise_level: float = 0.7
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: bool = True
    rollout_return_denoising_env: bool = False
    rollout_return_dit_trajectory: bool = False
    rollout_sde_step_indices: tuple[int, ...] | None = None
    rollout_return_step_indices: tuple[int, ...] | None = None

    seeds: tuple[int, ...] | None = None
    rollout_sde_window_size: int | None = None
    rollout_sde_window_range: tuple[int, int] | None = None
    sigmas: tuple[float, ...] | None = None
    flow_shift: float | None = None
    max_sequence_length: int | None = None
    init_same_noise: bool = False
    initial_noise_seed: int | None = None
    rollout_share_prefix: bool = True
    affine_coefficients: tuple[tuple[float, float, float, float], ...] | None = None
    rollout_latents_dtype: StorageDtype = "float32"
    output_type: OutputType = "image"
    output_dtype: OutputDtype = "float32"
    priority: int = 0
    lora_name: str | None = None
    rollout_return_partial: bool = False
    resume_from: tuple[Any, ...] | None = None
    prompt_ids: Any = None
    prompt_mask: Any = None
    extra_prompt_ids: Mapping[str, Any] | None = None
    prompt_embeds: Any = None
    prompt_embeds_mask: Any = None
    pooled_prompt_embeds: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_mask: Any = None
    negative_extra_prompt_ids: Mapping[str, Any] | None = None
    negative_prompt_embeds: Any = None
    negative_prompt_embeds_mask: Any = None
    negative_pooled_prompt_embeds: Any = None
    image: Any = None

    def validate(self, limits: Limits, *, step_kinds: Sequence[str]) -> None:
        """Checks all that can be known without a model.

        Raises:
            InvalidRequestError: naming the field, its value and the way out. Nothing has been computed.
        """
        _check_types(self)
        check_forms(self)
        _check_texts(self, limits)
        _check_numbers(self, limits)
        _check_seeds(self)
        _check_resumed(self)
        _check_choice("rollout_sde_type", self.rollout_sde_type, step_kinds)
        _check_choice("output_type", self.output_type, get_args(OutputType))
        _check_choice("output_dtype", self.output_dtype, get_args(OutputDtype))
        _check_choice("rollout_latents_dtype", self.rollout_latents_dtype, get_args(StorageDtype))
        _check_noise_level(self)
        _check_affine(self)
        _check_sigmas(self, limits)
        if self.num_inference_steps is not None:
            check_step_fields(self, self.num_inference_steps)


BOOLEANS = tuple(f.name for f in fields(RolloutParams) if isinstance(f.default, bool))
SEQUENCES = tuple(f.name for f in fields(RolloutParams) if str(f.type).startswith("tuple"))


@dataclass(frozen=True)
class FieldNames:
    """The names a foreign request may use, for the error that suggests the right one."""

    known: tuple[str, ...] = field(default_factory=lambda: tuple(f.name for f in fields(RolloutParams)))

    def unknown(self, name: str, value: object, *, extra: Sequence[str] = ()) -> UnknownFieldError:
        near = difflib.get_close_matches(name, [*self.known, *extra], n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]!r}?" if near else "See /docs for the fields of a request."
        return UnknownFieldError(f"unknown field {name!r}", field=name, value=value, hint=hint)


def params_from_mapping(values: Mapping[str, object]) -> RolloutParams:
    """The request with these fields; lists become tuples. Types are checked by `validate`.

    Raises:
        UnknownFieldError: a key that no request has, with the nearest right one.
    """
    names = FieldNames()
    for name in values:
        if name not in names.known:
            raise names.unknown(name, values[name])
    return RolloutParams(**{name: _frozen(value) for name, value in values.items()})  # type: ignore[arg-type]


def check_step_fields(params: RolloutParams, steps: int) -> None:
    """Checks the fields that speak of single steps, once the number of steps T is known."""
    _check_indices("rollout_sde_step_indices", params.rollout_sde_step_indices, steps - 1, "T - 1")
    _check_indices("rollout_return_step_indices", params.rollout_return_step_indices, steps, "T")
    if params.rollout_return_step_indices is not None and not params.rollout_return_step_indices:
        raise InvalidRequestError(
            "an empty list keeps no state at all",
            field="rollout_return_step_indices",
            value="[]",
            hint="Leave it out for all states, or set rollout_return_dit_trajectory to false for none.",
        )
    _check_window(params, steps)
    if params.affine_coefficients is not None and len(params.affine_coefficients) != steps:
        raise InvalidRequestError(
            f"one row a step is needed: {steps} steps, {len(params.affine_coefficients)} rows",
            field="affine_coefficients",
            value=len(params.affine_coefficients),
            hint="Send a row (a, b, c, s) for each of the num_inference_steps.",
        )


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def _check_types(params: RolloutParams) -> None:
    """Flags that are no booleans, and lists that are none: Python callers get the errors that HTTP callers get."""
    for name in BOOLEANS:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequestError("must be true or false", field=name, value=getattr(params, name))
    for name in SEQUENCES:
        value = getattr(params, name)
        if value is not None and not isinstance(value, tuple):
            raise InvalidRequestError("must be a list", field=name, value=value, hint="Send a list, or leave it out.")


def _check_texts(params: RolloutParams, limits: Limits) -> None:
    for name in PROMPTS:
        value = getattr(params, name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequestError("must be a string", field=name, value=value, hint="Send one prompt a request.")
        if len(value) > limits.max_prompt_characters:
            raise LimitExceededError(
                f"{len(value)} characters, at most {limits.max_prompt_characters} are accepted",
                field=name,
                value=len(value),
                hint="Shorten it, or raise the server's --max-prompt-characters.",
            )
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise InvalidRequestError("holds half a surrogate pair, which is no text", field=name, hint="Send UTF-8.")
    if params.lora_name is not None and not isinstance(params.lora_name, str):
        raise InvalidRequestError("must be a string", field="lora_name", value=params.lora_name)
    if params.prompt is not None and not params.prompt.strip():
        raise InvalidRequestError("the prompt is empty", field="prompt", value=params.prompt, hint="Send some text.")


def _check_numbers(params: RolloutParams, limits: Limits) -> None:
    _check_integer("num_outputs_per_prompt", params.num_outputs_per_prompt, 1, limits.max_num_outputs_per_prompt)
    tops = {
        "num_inference_steps": limits.max_num_inference_steps,
        "max_sequence_length": limits.max_sequence_length,
        "num_frames": limits.max_num_frames,
    }
    for name, top in tops.items():
        if getattr(params, name) is not None:
            _check_integer(name, getattr(params, name), 1, top)
    for name in ("width", "height"):
        if getattr(params, name) is not None:
            _check_integer(name, getattr(params, name), 1, limits.max_pixels)
    if params.width is not None and params.height is not None:
        check_pixels(params.width, params.height, limits)
    for name in ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "flow_shift"):
        if getattr(params, name) is not None:
            _check_finite(name, getattr(params, name), low=0.0, high=MAX_SCALE)
    if params.cfg_normalization is not None and not isinstance(params.cfg_normalization, bool):
        _check_finite("cfg_normalization", params.cfg_normalization, low=0.0, high=MAX_SCALE)
    if params.cfg_truncation is not None:
        _check_finite("cfg_truncation", params.cfg_truncation, low=0.0, high=1.0)
    if params.flow_shift == 0:
        raise InvalidRequestError("must be above 0", field="flow_shift", value=0, hint="1.0 means no shift.")
    _check_integer("priority", params.priority, -(2**31), 2**31 - 1)


def check_pixels(width: int, height: int, limits: Limits) -> None:
    """Refuses a picture of more pixels than the limit."""
    if width * height > limits.max_pixels:
        raise LimitExceededError(
            f"{width} x {height} = {width * height} pixels, at most {limits.max_pixels} are accepted",
            field="width",
            value=width,
            hint="Ask for a smaller picture, or raise the server's --max-pixels.",
        )


def check_frames(num_frames: int, limits: Limits) -> None:
    """Refuses a video of more frames than the limit."""
    _check_integer("num_frames", num_frames, 1, limits.max_num_frames)


def check_latent_elements(elements: int, limits: Limits) -> None:
    """Refuses samples whose latents are larger than the limit, as those of long videos are."""
    if elements > limits.max_latent_elements:
        raise LimitExceededError(
            f"a latent of {elements} numbers, at most {limits.max_latent_elements} are accepted",
            field="num_frames",
            value=elements,
            hint="Ask for fewer frames or pixels, or raise the server's --max-latent-elements.",
        )


def _check_seeds(params: RolloutParams) -> None:
    count = params.num_outputs_per_prompt
    for name in ("seed", "initial_noise_seed"):
        value = getattr(params, name)
        if value is not None:
            _check_integer(name, value, 0, MAX_SEED - count + 1)
    if params.seeds is not None:
        if len(params.seeds) != count:
            raise InvalidRequestError(
                f"one seed a sample is needed: {count} samples, {len(params.seeds)} seeds",
                field="seeds",
                value=len(params.seeds),
                hint="Send num_outputs_per_prompt seeds, or one `seed`.",
            )
        for value in params.seeds:
            _check_integer("seeds", value, 0, MAX_SEED)


def _check_resumed(params: RolloutParams) -> None:
    """The entries themselves hold tensors; whoever has the model checks them."""
    count = params.num_outputs_per_prompt
    if params.resume_from is not None and len(params.resume_from) != count:
        raise InvalidRequestError(
            f"one entry a sample is needed: {count} samples, {len(params.resume_from)} entries",
            field="resume_from",
            value=len(params.resume_from),
            hint="Send num_outputs_per_prompt entries; null begins a sample anew.",
        )


def _check_noise_level(params: RolloutParams) -> None:
    _check_finite("rollout_noise_level", params.rollout_noise_level, low=0.0, high=MAX_NOISE_LEVEL)
    if params.rollout_sde_type == "cps" and params.rollout_noise_level > 1:
        raise InvalidRequestError(
            "above 1 the coefficients of cps fold back: a larger level would mean less noise",
            field="rollout_noise_level",
            value=params.rollout_noise_level,
            hint="Use a level from 0 to 1 with cps.",
        )


def _check_affine(params: RolloutParams) -> None:
    rows = params.affine_coefficients
    if (rows is not None) != (params.rollout_sde_type == "affine"):
        raise InvalidRequestError(
            "affine_coefficients and rollout_sde_type 'affine' go together",
            field="affine_coefficients",
            value=None if rows is None else f"{len(rows)} rows",
            hint="Send both, or neither.",
        )
    for row in rows or ():
        if not isinstance(row, tuple) or len(row) != 4:
            raise InvalidRequestError(
                "each row is (a, b, c, s)", field="affine_coefficients", value=row, hint="Send four numbers a step."
            )
        for value in row:
            _check_finite("affine_coefficients", value, low=-MAX_COEFFICIENT, high=MAX_COEFFICIENT)
        if row[3] < 0:
            raise InvalidRequestError(
                "a standard deviation can't be negative",
                field="affine_coefficients",
                value=row[3],
                hint="s must be >= 0.",
            )


def _check_sigmas(params: RolloutParams, limits: Limits) -> None:
    sigmas = params.sigmas
    if sigmas is None:
        return
    if not isinstance(sigmas, tuple) or not sigmas:
        raise InvalidRequestError(
            "must be a non-empty list", field="sigmas", value=sigmas, hint="Leave it out instead."
        )
    if len(sigmas) > limits.max_num_inference_steps + 1:
        raise LimitExceededError(
            f"{len(sigmas)} sigmas, at most {limits.max_num_inference_steps} steps are accepted",
            field="sigmas",
            value=len(sigmas),
            hint="Ask for fewer steps, or raise the server's --max-num-inference-steps.",
        )
    for value in sigmas:
        _check_finite("sigmas", value, low=0.0, high=1.0)
    last = sigmas[-1]
    whole = len(sigmas) > 1 and last == 0
    stepping = sigmas[:-1] if whole else sigmas
    falls = all(high > low for high, low in pairwise(sigmas))
    if not falls or not all(0 < s <= 1 for s in stepping):
        raise InvalidRequestError(
            "must fall strictly, from at most 1, and stay above 0 (but for a final 0)",
            field="sigmas",
            value=list(sigmas),
            hint="T values are shifted by the scheduler; T + 1 values that end with 0 are used as they stand.",
        )
    count = len(stepping)
    _check_integer("sigmas", count, 1, limits.max_num_inference_steps)
    if params.num_inference_steps is not None and params.num_inference_steps != count:
        raise InvalidRequestError(
            f"{count} steps in sigmas, num_inference_steps says {params.num_inference_steps}",
            field="sigmas",
            value=len(sigmas),
            hint="Leave num_inference_steps out, or make the two agree.",
        )
    if whole and params.flow_shift is not None:
        raise InvalidRequestError(
            "a final grid is not shifted",
            field="flow_shift",
            value=params.flow_shift,
            hint="Leave flow_shift out, or send the T unshifted values.",
        )


def _check_window(params: RolloutParams, steps: int) -> None:
    size, bounds = params.rollout_sde_window_size, params.rollout_sde_window_range
    if size is None:
        if bounds is not None:
            raise InvalidRequestError(
                "a range without a window size means nothing",
                field="rollout_sde_window_range",
                value=list(bounds),
                hint="Send rollout_sde_window_size too.",
            )
        return
    if params.rollout_sde_step_indices is not None:
        raise InvalidRequestError(
            "the stochastic steps are named twice",
            field="rollout_sde_window_size",
            value=size,
            hint="Send either rollout_sde_step_indices or a window.",
        )
    _check_integer("rollout_sde_window_size", size, 1, steps)
    low, high = window_range(params, steps)
    if not 0 <= low < high <= steps or high - low < size:
        raise InvalidRequestError(
            f"a window of {size} steps does not fit into steps {low} to {high - 1} of {steps}",
            field="rollout_sde_window_range",
            value=[low, high],
            hint="The range is [low, high) within 0..T and at least as long as the window.",
        )


def window_range(params: RolloutParams, steps: int) -> tuple[int, int]:
    """`[low, high)`, the steps in which the window may lie."""
    if params.rollout_sde_window_range is not None:
        bounds = params.rollout_sde_window_range
        if len(bounds) != 2 or not all(isinstance(b, int) and not isinstance(b, bool) for b in bounds):
            raise InvalidRequestError(
                "must be two steps", field="rollout_sde_window_range", value=bounds, hint="Send [low, high)."
            )
        return bounds[0], bounds[1]
    return 0, max(steps - 1, params.rollout_sde_window_size or 1)


def _check_indices(name: str, indices: tuple[int, ...] | None, top: int, top_name: str) -> None:
    if indices is None:
        return
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= top:
            raise InvalidRequestError(
                f"step {index} is outside 0..{top}", field=name, value=index, hint=f"Indices run from 0 to {top_name}."
            )
    if len(set(indices)) != len(indices):
        raise InvalidRequestError(
            "an index stands there twice", field=name, value=list(indices), hint="Send each index once."
        )


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        raise InvalidRequestError(
            f"unknown {name} {value!r}",
            code=f"unknown_{name}",
            field=name,
            value=value,
            hint=(f"Did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(known)}.",
        )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError("must be a whole number", field=name, value=value, hint="Send an integer.")
    if value < low:
        raise InvalidRequestError(f"must be at least {low}", field=name, value=value, hint=f"Send {low} or more.")
    if value > high:
        raise LimitExceededError(f"at most {high} is accepted", field=name, value=value, hint="Ask for less.")


def _check_finite(name: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError("must be a finite number", field=name, value=value, hint="Send a plain number.")
    if value < low:
        raise InvalidRequestError(f"must be at least {low:g}", field=name, value=value, hint=f"Send {low:g} or more.")
    if value > high:
        raise InvalidRequestError(f"must be at most {high:g}", field=name, value=value, hint=f"Send {high:g} or less.")
