"""Stable Diffusion 3 and 3.5: unpacked latents `[C, h, w]`, image tokens before text tokens, batched true guidance."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_rl.batch import Conditioning, PromptEmbeds, Rows
from diffusion_rl.models.base import ModelFamily, host_copy, refuse_long_prompt
from diffusion_rl.models.fused_blocks import JOINT_TRANSFORMER_BLOCKS
from diffusion_rl.parallel.sequence import SequenceSpec
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue, DenoisingEnv
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan


class StableDiffusion3Family(ModelFamily):
    """Two CLIPs and, if the checkpoint has it, T5; without T5 the pipeline's zero tokens stand in for it."""

    pipeline_class_name = "StableDiffusion3Pipeline"
    text_first = False
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

    def guidance(self, params: RolloutParams) -> tuple[float, str | None]:
        named = [s for s in (params.guidance_scale, params.true_cfg_scale) if s is not None]
        scale = named[0] if named else self.defaults.guidance_scale
        return (scale, params.negative_prompt or "") if scale > 1 else (1.0, None)

    def dynamic_shift(self, height: int, width: int) -> float | None:
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        config = self.pipeline.scheduler.config
        return calculate_shift(
            self._image_tokens(height, width),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        text, plan = self._text_rows(rows)
        pooled = torch.stack([p.pooled for p in rows.prompts if p.pooled is not None])
        return plan, {
            "hidden_states": rows.latents,
            "timestep": rows.timesteps,
            "encoder_hidden_states": text,
            "pooled_projections": pooled.to(rows.latents.dtype),
        }

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pictures = vae.decode(scaled, return_dict=False)[0].float()
        return (pictures * 0.5 + 0.5).clamp(0, 1)

    def denoising_env(self, conditioning: Conditioning, height: int, width: int) -> DenoisingEnv:
        negative = conditioning.negative
        return DenoisingEnv(
            pos_cond_kwargs=_cond_kwargs(conditioning.positive),
            neg_cond_kwargs=None if negative is None else _cond_kwargs(negative),
            image_kwargs={},
            guidance=None,
        )

    def conditioning_from_env(self, env: DenoisingEnv, guidance_scale: float) -> Conditioning:
        def prompt(kwargs: object) -> PromptEmbeds:
            assert isinstance(kwargs, dict)
            return PromptEmbeds(
                kwargs["encoder_hidden_states"].to(self.device), kwargs["pooled_projections"].to(self.device)
            )

        negative = None if env.neg_cond_kwargs is None else prompt(env.neg_cond_kwargs)
        return Conditioning(prompt(env.pos_cond_kwargs), negative, guidance_scale)


def _cond_kwargs(prompt: PromptEmbeds) -> dict[str, CondValue]:
    pooled = None if prompt.pooled is None else host_copy(prompt.pooled)
    return {"encoder_hidden_states": host_copy(prompt.prompt_embeds), "pooled_projections": pooled}
