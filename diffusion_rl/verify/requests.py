"""The requests of a record: a default set for any loaded model, or one's own, completed so that all is returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from diffusion_rl.params import RolloutParams, params_from_mapping
from diffusion_rl.shapes import held_out_captions
from engine_control.errors import InvalidRequestError

RequestFields: TypeAlias = "RolloutParams | Mapping[str, object]"
DEFAULT_KINDS = ("sde", "cps", "dance", "ode")
DEFAULT_STEPS = 4
DEFAULT_OUTPUTS = 2
DEFAULT_SIDE = 64  # pixels, or the next multiple that the model takes
GUIDANCE_SCALE = 3.0
FIRST_SEED = 42
EVERYTHING: Mapping[str, object] = {
    "output_type": "both",
    "rollout_debug_mode": True,
    "rollout_return_denoising_env": True,
    "rollout_return_dit_trajectory": True,
}


def default_requests(
    size_multiple: int,
    *,
    frame_multiple: int | None = None,
    prompts: Sequence[str] = (),
    kinds: Sequence[str] = (),
    size: tuple[int, int] | None = None,
    steps: int | None = None,
) -> list[RolloutParams]:
    """Each prompt (one held-out caption) by each step kind (sde, cps, dance, ode), with guidance and without, K = 2.

    size is `(width, height)` in pixels; left out, it is a small square that a model of this `size_multiple` takes.
    Videos, of models with a `frame_multiple`, are the shortest of more than one frame.
    Guidance is `true_cfg_scale` with an empty negative prompt, which every family understands.
    """
    side = -(-DEFAULT_SIDE // size_multiple) * size_multiple
    width, height = size or (side, side)
    frames = {} if frame_multiple is None else {"num_frames": 1 + frame_multiple}
    requests: list[RolloutParams] = []
    for prompt in prompts or held_out_captions()[:1]:
        for kind in kinds or DEFAULT_KINDS:
            for scale in (GUIDANCE_SCALE, 1.0):
                requests.append(
                    completed(
                        {
                            "prompt": prompt,
                            "negative_prompt": "",
                            "true_cfg_scale": scale,
                            "rollout_sde_type": kind,
                            "width": width,
                            "height": height,
                            **frames,
                            "num_inference_steps": steps or DEFAULT_STEPS,
                            "num_outputs_per_prompt": DEFAULT_OUTPUTS,
                            "seed": FIRST_SEED + DEFAULT_OUTPUTS * len(requests),
                        }
                    )
                )
    return requests


def completed(request: RequestFields) -> RolloutParams:
    """The request with a seed, and returning everything (`EVERYTHING`) wherever it doesn't say otherwise itself.

    Raises:
        InvalidRequestError: a field that no request has, or no prompt.
    """
    own = fields_of(request) if isinstance(request, RolloutParams) else request
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise InvalidRequestError(
            "a request must be an object of fields",
            field="requests",
            value=own,
            hint='Write {"prompt": "a red circle"}.',
        )
    params = params_from_mapping({**EVERYTHING, **own})
    return replace(params, seed=FIRST_SEED) if params.seed is None and params.seeds is None else params


def fields_of(params: RolloutParams) -> dict[str, Any]:
    """The fields that differ from their defaults, as plain JSON values: what a client sends and a file keeps."""
    kept = {f.name: getattr(params, f.name) for f in fields(params) if getattr(params, f.name) != f.default}
    return {name: _plain(value) for name, value in kept.items()}


def describe(params: RolloutParams) -> str:
    """A request in a few words."""
    scale = params.true_cfg_scale if params.guidance_scale is None else params.guidance_scale
    parts = [params.rollout_sde_type if params.rollout else "evaluation"]
    parts += [f"guidance {scale:g}"] if scale is not None else []
    parts += [f"{params.width} x {params.height}"] if params.width is not None and params.height is not None else []
    return ", ".join([*parts, f"K = {params.num_outputs_per_prompt}"])


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
