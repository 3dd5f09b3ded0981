"""Stable Diffusion 3 and 3.5: unpacked latents `[C, h, w]`, image tokens before text tokens, batched true guidance."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_rl.batch import Guidance, PromptEmbeds, Rows
from diffusion_rl.models.base import ModelFamily, host_copy, refuse_long_prompt, vae_pictures
from diffusion_rl.models.fused_blocks import JOINT_TRANSFORMER_BLOCKS
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

    def check_prompt(self, prompt: str, name: str, max_sequence_length: int) -> None:
        pipeline = self.pipeline
        if pipeline.text_encoder_3 is not None:
            tokens = len(pipeline.tokenizer_3(prompt, verbose=False).input_ids)
            refuse_long_prompt(name, prompt, tokens, max_sequence_length)
            return
        for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2):
            refuse_long_prompt(
                name, prompt, len(tokenizer(prompt, verbose=False).input_ids), pipeline.tokenizer_max_length
            )

    def encode_prompt(self, prompt: str, max_sequence_length: int) -> PromptEmbeds:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return PromptEmbeds(embeds[0], pooled[0])

    def guidance(self, params: RolloutParams) -> Guidance:
        named = [s for s in (params.guidance_scale, params.true_cfg_scale) if s is not None]
        scale = named[0] if named else self.defaults.guidance_scale
        return Guidance(scale, params.negative_prompt or "") if scale > 1 else Guidance()

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
