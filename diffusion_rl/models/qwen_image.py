"""Qwen-Image: packed latents `[tokens, 64]`, text before image, prompts of any length, norm-rescaled guidance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from diffusion_rl.batch import Conditioning, PromptEmbeds, Rows
from diffusion_rl.models.base import ModelFamily, host_copy, refuse_long_prompt
from diffusion_rl.models.fused_blocks import QWEN_IMAGE_BLOCKS
from diffusion_rl.parallel.sequence import SequenceSpec, Stage, Tokens
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue, DenoisingEnv
from rl_kernels import AttentionPlan


class QwenImageFamily(ModelFamily):
    """True guidance needs a negative prompt, as in diffusers: without one the request runs unguided."""

    pipeline_class_name = "QwenImagePipeline"
    text_first = True
    sequence_spec = SequenceSpec(
        (Stage(tables={"image_rotary_emb": (Tokens(("image",), dim=0), Tokens(("text",), dim=0))}),)
    )
    tensor_plan = TensorPlan(
        columns=(
            "transformer_blocks.*.attn.to_[qkv]",
            "transformer_blocks.*.attn.add_[qkv]_proj",
            "transformer_blocks.*.img_mlp.net.0.proj",
            "transformer_blocks.*.txt_mlp.net.0.proj",
        ),
        rows=(
            "transformer_blocks.*.attn.to_out.0",
            "transformer_blocks.*.attn.to_add_out",
            "transformer_blocks.*.img_mlp.net.2",
            "transformer_blocks.*.txt_mlp.net.2",
        ),
        attentions=("transformer_blocks.*.attn",),
    )
    block_forwards = QWEN_IMAGE_BLOCKS

    @property
    def size_multiple(self) -> int:
        return self.pipeline.vae_scale_factor * 2

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self._image_tokens(height, width), self.pipeline.transformer.config.in_channels

    def initial_noise_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels // 4, height // factor, width // factor

    def pack(self, noise: torch.Tensor) -> torch.Tensor:
        return self.pipeline._pack_latents(noise, *noise.shape)

    def check_prompt(self, prompt: str, name: str, max_sequence_length: int) -> None:
        pipeline = self.pipeline
        text = pipeline.prompt_template_encode.format(prompt)
        tokens = len(pipeline.tokenizer(text, verbose=False).input_ids) - pipeline.prompt_template_encode_start_idx
        refuse_long_prompt(name, prompt, tokens, min(max_sequence_length, pipeline.tokenizer_max_length))

    def encode_prompt(self, prompt: str, max_sequence_length: int) -> PromptEmbeds:
        embeds, _ = self.pipeline.encode_prompt(prompt, max_sequence_length=max_sequence_length)
        return PromptEmbeds(embeds[0])

    def guidance(self, params: RolloutParams) -> tuple[float, str | None]:
        scale = self.defaults.guidance_scale if params.true_cfg_scale is None else params.true_cfg_scale
        return (scale, params.negative_prompt) if scale > 1 and params.negative_prompt is not None else (1.0, None)

    def dynamic_shift(self, height: int, width: int) -> float | None:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        config = self.pipeline.scheduler.config
        return calculate_shift(
            self._image_tokens(height, width),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )

    def default_sigmas(self, steps: int) -> list[float] | None:
        return list(np.linspace(1.0, 1 / steps, steps))

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        text, plan = self._text_rows(rows)
        return plan, {
            "hidden_states": rows.latents,
            "timestep": rows.timesteps.to(rows.latents.dtype) / 1000,  # in the latents' dtype, as the pipeline has it
            "encoder_hidden_states": text,
            "encoder_hidden_states_mask": None,
            "img_shapes": [self._grid(rows.height, rows.width)] * len(rows.latents),
            "guidance": None,
        }

    def combine(self, negative: torch.Tensor, positive: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        combined = super().combine(negative, positive, scales)
        rescale = torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
        return combined * rescale

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        pipeline, vae = self.pipeline, self.pipeline.vae
        grid = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor).to(vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(grid)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(grid)
        pictures = vae.decode(grid / inverse_std + mean, return_dict=False)[0][:, :, 0].float()
        return (pictures * 0.5 + 0.5).clamp(0, 1)

    def denoising_env(self, conditioning: Conditioning, height: int, width: int) -> DenoisingEnv:
        def kwargs(prompt: PromptEmbeds) -> dict[str, CondValue]:
            length = len(prompt.prompt_embeds)
            freqs = self.pipeline.transformer.pos_embed(
                self._grid(height, width), max_txt_seq_len=length, device=self.device
            )
            return {
                "encoder_hidden_states": host_copy(prompt.prompt_embeds),
                "encoder_hidden_states_mask": torch.ones(length, dtype=torch.bool),
                "txt_seq_lens": [length],
                "freqs_cis": [torch.cat([f.real, f.imag], dim=-1).float().cpu() for f in freqs],
                "img_shapes": [list(g) for g in self._grid(height, width)],
            }

        negative = conditioning.negative
        return DenoisingEnv(
            pos_cond_kwargs=kwargs(conditioning.positive),
            neg_cond_kwargs=None if negative is None else kwargs(negative),
            image_kwargs={},
            guidance=None,
        )

    def conditioning_from_env(self, env: DenoisingEnv, guidance_scale: float) -> Conditioning:
        def prompt(kwargs: object) -> PromptEmbeds:
            assert isinstance(kwargs, dict)
            return PromptEmbeds(kwargs["encoder_hidden_states"].to(self.device))

        negative = None if env.neg_cond_kwargs is None else prompt(env.neg_cond_kwargs)
        return Conditioning(prompt(env.pos_cond_kwargs), negative, guidance_scale)

    def _grid(self, height: int, width: int) -> list[tuple[int, int, int]]:
        return [(1, height // self.size_multiple, width // self.size_multiple)]
