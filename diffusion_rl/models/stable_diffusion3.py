"""Stable Diffusion 3 and 3.5: unpacked latents `[C, h, w]`, image tokens before text tokens, batched true guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from diffusion_rl.batch import Guidance, PromptEmbeds, Rows
from diffusion_rl.models.base import ModelFamily, host_copy, vae_pictures
from diffusion_rl.models.fused_blocks import JOINT_TRANSFORMER_BLOCKS
from diffusion_rl.models.prompts import TextEncoder, TextEncoders
from diffusion_rl.parallel.sequence import SequenceSpec
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan


class StableDiffusion3Family(ModelFamily):
    """Two CLIPs and, if the checkpoint has it, T5; without T5 the pipeline's zero tokens stand in for it."""

    pipeline_class_name = "StableDiffusion3Pipeline"
    text_first = False
    max_shift = 1.16
    sequence_spec = SequenceSpec()
    tensor_plan = TensorPlan(
        columns=(
            "transformer_blocks.*.attn.to_[qkv]",
            "transformer_blocks.*.attn.add_[qkv]_proj",
            "transformer_blocks.*.attn2.to_[qkv]",
            "transformer_blocks.*.ff.net.0.proj",
            "transformer_blocks.*.ff_context.net.0.proj",
        ),
        rows=(
            "transformer_blocks.*.attn.to_out.0",
            "transformer_blocks.*.attn.to_add_out",
            "transformer_blocks.*.attn2.to_out.0",
            "transformer_blocks.*.ff.net.2",
            "transformer_blocks.*.ff_context.net.2",
        ),
        attentions=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
    )
    block_forwards = JOINT_TRANSFORMER_BLOCKS

    @property
    def size_multiple(self) -> int:
        return self.pipeline.vae_scale_factor * self.pipeline.transformer.config.patch_size

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels, height // factor, width // factor

    def initial_noise_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.latent_shape(height, width)

    def check_size(self, height: int, width: int) -> None:
        super().check_size(height, width)
        largest = self.pipeline.transformer.config.pos_embed_max_size
        for name, value in (("height", height), ("width", width)):
            if largest is not None and value // self.size_multiple > largest:
                raise InvalidRequestError(
                    f"the model's position embeddings end at {largest * self.size_multiple} pixels",
                    field=name,
                    value=value,
                    hint=f"Send at most {largest * self.size_multiple}.",
                )

    def text_encoders(self, max_sequence_length: int) -> TextEncoders:
        pipeline, longest = self.pipeline, self.pipeline.tokenizer_max_length
        cuts = pipeline.text_encoder_3 is not None
        clip = TextEncoder(pipeline.tokenizer, pipeline.text_encoder, longest, cuts=cuts, finds_end=True)
        encoders = {
            "clip": clip,
            "clip_2": replace(clip, tokenizer=pipeline.tokenizer_2, module=pipeline.text_encoder_2, like="clip"),
        }
        if cuts:
            encoders["t5"] = TextEncoder(pipeline.tokenizer_3, pipeline.text_encoder_3, max_sequence_length)
        return encoders

    @property
    def pooled_width(self) -> int:
        return int(self.pipeline.transformer.config.pooled_projection_dim)

    def longest_embeds(self, max_sequence_length: int) -> int:
        return int(self.pipeline.tokenizer_max_length) + max_sequence_length

    def encode_ids(self, ids: Mapping[str, Sequence[int]], max_sequence_length: int) -> PromptEmbeds:
        """CLIP's tokens `[77, D]`, both encoders' side by side, then T5's (or zeros) `[max_sequence_length, D]`."""
        encoders, dtype = self.text_encoders(max_sequence_length), self.pipeline.text_encoder.dtype
        inputs = {name: encoder.padded(ids[name], encoder.longest)[0] for name, encoder in encoders.items()}
        clips = [encoders[n].module(inputs[n], output_hidden_states=True) for n in ("clip", "clip_2")]
        beside = torch.cat([clip.hidden_states[-2].to(dtype) for clip in clips], dim=-1)
        beside = F.pad(beside, (0, self.text_width - beside.shape[-1]))
        if "t5" in encoders:
            behind = encoders["t5"].module(inputs["t5"])[0].to(encoders["t5"].module.dtype)
        else:
            behind = beside.new_zeros(1, max_sequence_length, self.text_width)
        return PromptEmbeds(torch.cat([beside, behind], dim=1)[0], torch.cat([clip[0] for clip in clips], dim=-1)[0])

    def guidance(self, params: RolloutParams) -> Guidance:
        named = [s for s in (params.guidance_scale, params.true_cfg_scale) if s is not None]
        scale = named[0] if named else self.defaults.guidance_scale
        return Guidance(scale, self.prompt(params, "negative_prompt") or "") if scale > 1 else Guidance()

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        text, plan = self._text_rows(rows)
        return plan, {
            "hidden_states": rows.latents,
            "timestep": rows.timesteps,
            "encoder_hidden_states": text,
            "pooled_projections": self._pooled_rows(rows),
        }

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return vae_pictures(self.pipeline.vae, latents)

    def cond_kwargs(self, prompt: PromptEmbeds, height: int, width: int) -> dict[str, CondValue]:
        pooled = None if prompt.pooled is None else host_copy(prompt.pooled)
        return {"encoder_hidden_states": host_copy(prompt.prompt_embeds), "pooled_projections": pooled}
