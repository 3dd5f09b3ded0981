"""Wan 2.1 and 2.2, text to video: latents `[C, F, h, w]`, text by cross-attention, and one transformer or two.

Wan 2.2 has one transformer for noisy steps and a second for the others: which one computes a step is a matter of its
timestep alone. Its 5B model takes a timestep a token, and in text-to-video all of a sample's are equal: here they are
one timestep a sample, which has the same bits and not the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_rl.batch import FIRST, SECOND, Guidance, PromptEmbeds, Rows, Size
from diffusion_rl.models.base import ModelFamily, host_copy, refuse_bad_grid
from diffusion_rl.models.prompts import TextEncoder, TextEncoders
from diffusion_rl.parallel.sequence import SequenceSpec, Stage
from diffusion_rl.parallel.shards import IMAGE
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue
from diffusion_rl.schedulers import RolloutSchedulerMixin
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan

DECIMALS_OF_A_TIMESTEP = 1e-4  # by so much may an fp32 sigma, times 1000, lie below the whole number that it stands for


class WanFamily(ModelFamily):
    """Guidance as in the pipeline: a negative prompt, the empty one if none is given; the second transformer may have
    a scale of its own. Padding of the text is zeros that are attended to, so a prompt has one set of bits at each
    `max_sequence_length`."""

    pipeline_class_name = "WanPipeline"
    text_first = False
    sequence_spec = SequenceSpec(
        (
            Stage(
                blocks=("blocks",),
                inputs={"hidden_states": IMAGE},
                tables={"rotary_emb": (IMAGE, IMAGE)},
                cross_attention="attn2",
            ),
        )
    )
    tensor_plan = TensorPlan(
        columns=("blocks.*.attn[12].to_[qkv]", "blocks.*.ffn.net.0.proj"),
        rows=("blocks.*.attn[12].to_out.0", "blocks.*.ffn.net.2"),
        attentions=("blocks.*.attn[12]",),
        norms=("blocks.*.attn[12].norm_[qk]",),
    )

    def __init__(self, pipeline: Any, defaults_folder: Path | None = None) -> None:
        """
        Raises:
            InvalidRequestError: the checkpoint lacks a transformer that it needs, or its scheduler has no flow sigmas.
        """
        _check_transformers(pipeline)
        _check_scheduler(pipeline.scheduler)
        super().__init__(pipeline, defaults_folder)

    @property
    def transformers(self) -> Mapping[str, torch.nn.Module]:
        found = {FIRST: self.pipeline.transformer}
        return found if self.pipeline.config.boundary_ratio is None else {**found, SECOND: self.pipeline.transformer_2}

    def step_transformers(self, timesteps: torch.Tensor) -> tuple[str, ...]:
        ratio = self.pipeline.config.boundary_ratio
        if ratio is None:
            return super().step_transformers(timesteps)
        boundary = ratio * self.pipeline.scheduler.config.num_train_timesteps
        return tuple(FIRST if noisy else SECOND for noisy in (timesteps >= boundary).tolist())

    @property
    def size_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor_spatial * self.pipeline.transformer.config.patch_size[-1])

    @property
    def frame_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor_temporal)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        side = self.pipeline.vae_scale_factor_spatial
        frames = (num_frames - 1) // self.pipeline.vae_scale_factor_temporal + 1
        return self.pipeline.transformer.config.in_channels, frames, height // side, width // side

    def initial_noise_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        return self.latent_shape(height, width, num_frames)

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        super().check_size(height, width)
        multiple, longest = self.frame_multiple, self.pipeline.transformer.config.rope_max_seq_len
        below = (num_frames - 1) // multiple * multiple + 1
        if num_frames != below:
            raise InvalidRequestError(
                f"must be 1 more than a multiple of {multiple}",
                field="num_frames",
                value=num_frames,
                hint=f"Send {below} or {below + multiple}.",
            )
        steps = {"height": self.size_multiple, "width": self.size_multiple, "num_frames": multiple}
        for (name, step), value in zip(steps.items(), (height, width, num_frames - 1), strict=True):
            if value // step + (name == "num_frames") > longest:
                raise InvalidRequestError(
                    f"the model's position embeddings end at {longest} tokens a side, of {step} each",
                    field=name,
                    value=value,
                    hint="Ask for less.",
                )

    def templated(self, text: str) -> str:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return str(prompt_clean(text))

    def text_encoders(self, max_sequence_length: int) -> TextEncoders:
        return {"t5": TextEncoder(self.pipeline.tokenizer, self.pipeline.text_encoder, max_sequence_length)}

    @property
    def text_width(self) -> int:
        return int(self.pipeline.transformer.config.text_dim)

    def encode_ids(self, ids: Mapping[str, Sequence[int]], max_sequence_length: int) -> PromptEmbeds:
        encoder, true = self.text_encoders(max_sequence_length)["t5"], len(ids["t5"])
        states = encoder.module(*encoder.padded(ids["t5"], max_sequence_length)).last_hidden_state[0, :true]
        return PromptEmbeds(F.pad(states.to(encoder.module.dtype), (0, 0, 0, max_sequence_length - true)))

    def guidance(self, params: RolloutParams) -> Guidance:
        named = [s for s in (params.guidance_scale, params.true_cfg_scale) if s is not None]
        scale = named[0] if named else self.defaults.guidance_scale
        if scale <= 1:
            return Guidance()
        second = None
        if SECOND in self.transformers:
            second = scale if params.guidance_scale_2 is None else params.guidance_scale_2
        return Guidance(scale, self.prompt(params, "negative_prompt") or "", scale_2=second)

    def scheduler(self, step_kind: type[RolloutSchedulerMixin], flow_shift: float | None) -> Any:
        """As the base's; a checkpoint's multistep scheduler (UniPC) gets the step kind, and keeps its grid."""
        own = self.pipeline.scheduler
        if isinstance(own, FlowMatchEulerDiscreteScheduler):
            return super().scheduler(step_kind, flow_shift)
        mixed: Any = type(f"{step_kind.__name__.removesuffix('Mixin')}{type(own).__name__}", (step_kind, type(own)), {})
        return mixed.from_config(own.config, **({} if flow_shift is None else {"flow_shift": flow_shift}))

    def schedule(
        self, scheduler: Any, params: RolloutParams, steps: int, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base's; of a multistep scheduler its sigmas, and its timesteps, which are whole numbers."""
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            return super().schedule(scheduler, params, steps, size)
        if params.sigmas is not None and params.sigmas[-1] == 0:
            sigmas, _ = super().schedule(scheduler, params, steps, size)
            exact = sigmas.double() * scheduler.config.num_train_timesteps
            return sigmas, (exact + DECIMALS_OF_A_TIMESTEP).floor().float()
        given = {} if params.sigmas is None else {"sigmas": np.array(params.sigmas)}
        scheduler.set_timesteps(steps, device="cpu", **given)
        refuse_bad_grid(scheduler.sigmas, params)
        return scheduler.sigmas.float().cpu(), F.pad(scheduler.timesteps.float(), (0, 1))

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        text, plan = self._text_rows(rows)
        if not plan.text.absent and plan.padded_text == plan.image_tokens:  # it would pass for the image's own sequence
            text, plan = F.pad(text, (0, 0, 0, 1)), replace(plan, padded_text=plan.padded_text + 1)
        return plan, {"hidden_states": rows.latents, "timestep": rows.timesteps, "encoder_hidden_states": text}

    def decode(self, latents: torch.Tensor, height: int, width: int, num_frames: int = 1) -> torch.Tensor:
        vae = self.pipeline.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        latents = latents.to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
        videos = vae.decode(latents / inverse_std + mean, return_dict=False)[0].float()
        return (videos * 0.5 + 0.5).clamp(0, 1)

    def cond_kwargs(self, prompt: PromptEmbeds, height: int, width: int, num_frames: int = 1) -> dict[str, CondValue]:
        return {"encoder_hidden_states": host_copy(prompt.prompt_embeds)}

    def _image_tokens(self, height: int, width: int, num_frames: int = 1) -> int:
        _, frames, _, _ = self.latent_shape(height, width, num_frames)
        return frames * (height // self.size_multiple) * (width // self.size_multiple)


def _check_transformers(pipeline: Any) -> None:
    ratio = pipeline.config.boundary_ratio
    needed = (FIRST,) if ratio is None else (FIRST, SECOND)
    for name in needed:
        if getattr(pipeline, name) is None:
            raise InvalidRequestError(
                f"the pipeline has no {name}, which it needs with boundary_ratio {ratio}",
                code="unsupported_model",
                field="model_path",
                value=type(pipeline).__name__,
                hint="Load a checkpoint with all of its transformers.",
            )


def _check_scheduler(scheduler: Any) -> None:
    config = scheduler.config
    euler = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    flow = config.get("use_flow_sigmas", False) and config.get("prediction_type") == "flow_prediction"
    if not (euler or flow) or config.get("use_dynamic_shifting", False):
        raise InvalidRequestError(
            f"a {type(scheduler).__name__} without flow sigmas of its own, or that shifts them by size",
            code="unsupported_model",
            field="model_path",
            value=type(scheduler).__name__,
            hint="Use a UniPCMultistepScheduler with use_flow_sigmas, or a FlowMatchEulerDiscreteScheduler.",
        )
