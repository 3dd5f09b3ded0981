"""Qwen-Image: packed latents `[tokens, 64]`, text before image, prompts of any length, norm-rescaled guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d, QwenImageDecoder3d

from diffusion_rl.batch import Conditioning, PromptEmbeds, Rows
from diffusion_rl.models.base import host_copy
from diffusion_rl.models.fused_blocks import QWEN_IMAGE_BLOCKS
from diffusion_rl.models.packed import PackedLatentFamily
from diffusion_rl.models.prompts import TextEncoder, TextEncoders
from diffusion_rl.models.single_frame import first_frame, without_memory
from diffusion_rl.parallel.sequence import SequenceSpec, Stage
from diffusion_rl.parallel.shards import Tokens
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.sample import CondValue
from rl_kernels import AttentionPlan
from rl_kernels.replacing import Replacement, replaced_forwards, replacements


class QwenImageFamily(PackedLatentFamily):
    """Prompts keep their own lengths, and guided velocities the length of those with the prompt."""

    pipeline_class_name = "QwenImagePipeline"
    reads_padding = False
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

    def templated(self, text: str) -> str:
        return str(self.pipeline.prompt_template_encode.format(text))

    def text_encoders(self, max_sequence_length: int) -> TextEncoders:
        pipeline = self.pipeline
        longest = min(max_sequence_length, pipeline.tokenizer_max_length)
        skipped = pipeline.prompt_template_encode_start_idx
        return {"qwen": TextEncoder(pipeline.tokenizer, pipeline.text_encoder, longest, skipped=skipped)}

    def encode_ids(self, ids: Mapping[str, Sequence[int]], max_sequence_length: int) -> PromptEmbeds:
        return self.hidden_states(self.text_encoders(max_sequence_length)["qwen"], ids["qwen"])

    def hidden_states(self, encoder: TextEncoder, ids: Sequence[int], **pictures: torch.Tensor) -> PromptEmbeds:
        """The encoder's last ones, but for those of tokens that it skips. pictures: what it is told of these."""
        rows = torch.tensor([ids], device=encoder.module.device)
        inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows), **pictures}
        states = encoder.module(**inputs, output_hidden_states=True)
        return PromptEmbeds(states.hidden_states[-1][0, encoder.skipped :].to(encoder.module.dtype))

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

    def combine(
        self, negative: torch.Tensor, positive: torch.Tensor, conditioning: Sequence[Conditioning]
    ) -> torch.Tensor:
        combined = super().combine(negative, positive, conditioning)
        rescale = torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
        return combined * rescale

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        vae = self.pipeline.vae
        grid = self.unpack(latents, height, width).to(vae.dtype)
        mean, inverse_std = self._latent_statistics
        with replaced_forwards(self._first_frames):
            pictures = vae.decode(grid / inverse_std + mean, return_dict=False)[0][:, :, 0].float()
        return (pictures * 0.5 + 0.5).clamp(0, 1)

    @cached_property
    def _latent_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and 1 / standard deviation of each latent channel, `[1, C, 1, 1, 1]` where the VAE is."""
        vae = self.pipeline.vae
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
        return mean.to(self.device, vae.dtype), 1.0 / std.to(self.device, vae.dtype)

    @cached_property
    def _first_frames(self) -> tuple[Replacement, ...]:
        vae = self.pipeline.vae
        layers = replacements(vae, {QwenImageCausalConv3d: first_frame})
        return *layers, *replacements(vae, {QwenImageDecoder3d: without_memory})

    def cond_kwargs(self, prompt: PromptEmbeds, height: int, width: int) -> dict[str, CondValue]:
        return self.kwargs_of_grid(prompt, self._grid(height, width))

    def kwargs_of_grid(self, prompt: PromptEmbeds, grid: Sequence[tuple[int, int, int]]) -> dict[str, CondValue]:
        """`cond_kwargs` where the transformer's image tokens are those of all these grids."""
        length = len(prompt.prompt_embeds)
        freqs = self.pipeline.transformer.pos_embed([list(grid)], max_txt_seq_len=length, device=self.device)
        return {
            "encoder_hidden_states": host_copy(prompt.prompt_embeds),
            "encoder_hidden_states_mask": torch.ones(length, dtype=torch.bool),
            "txt_seq_lens": [length],
            "freqs_cis": [torch.cat([f.real, f.imag], dim=-1).float().cpu() for f in freqs],
            "img_shapes": [list(g) for g in grid],
        }

    def _grid(self, height: int, width: int) -> list[tuple[int, int, int]]:
        return [(1, height // self.size_multiple, width // self.size_multiple)]
