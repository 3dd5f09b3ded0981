"""FLUX.1 (dev, schnell): packed latents `[tokens, 64]`, text before image, embedded and true guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from diffusion_rl.batch import Guidance, Prompt, PromptEmbeds, Rows
from diffusion_rl.models.base import host_copy, vae_pictures
from diffusion_rl.models.fused_flux import FLUX_BLOCKS
from diffusion_rl.models.packed import PackedLatentFamily
from diffusion_rl.models.prompts import TextEncoder, TextEncoders
from diffusion_rl.parallel.sequence import SequenceSpec, Stage
from diffusion_rl.parallel.shards import Tokens
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan

LONGEST_TEXT = 512  # tokens; the stock pipeline refuses more
JOINT_TABLE = Tokens(("text", "image"), dim=0)


class FluxFamily(PackedLatentFamily):
    """T5 padded to `max_sequence_length` without a mask, so that the transformer reads the padding too, as it was
    trained to; and CLIP's pooled vector, of a prompt's first tokens if it has more than CLIP reads.

    `guidance_scale` is embedded where the checkpoint was distilled for it (dev), and has no effect where it wasn't
    (schnell).
    """

    pipeline_class_name = "FluxPipeline"
    sequence_spec = SequenceSpec(
        (
            Stage(
                blocks=("transformer_blocks", "single_transformer_blocks"),
                tables={"image_rotary_emb": (JOINT_TABLE, JOINT_TABLE)},
            ),
        )
    )
    tensor_plan = TensorPlan(
        columns=(
            "*transformer_blocks.*.attn.to_[qkv]",
            "transformer_blocks.*.attn.add_[qkv]_proj",
            "transformer_blocks.*.ff.net.0.proj",
            "transformer_blocks.*.ff_context.net.0.proj",
            "single_transformer_blocks.*.proj_mlp",
        ),
        rows=(
            "transformer_blocks.*.attn.to_out.0",
            "transformer_blocks.*.attn.to_add_out",
            "transformer_blocks.*.ff.net.2",
            "transformer_blocks.*.ff_context.net.2",
            "single_transformer_blocks.*.proj_out",
        ),
        attentions=("*transformer_blocks.*.attn",),
        joined={"single_transformer_blocks.*.proj_out": ("attn.to_v", "proj_mlp")},
    )
    block_forwards = FLUX_BLOCKS

    def check_prompt(self, prompt: Prompt, name: str, max_sequence_length: int) -> None:
        if max_sequence_length > LONGEST_TEXT:
            raise InvalidRequestError(
                f"FLUX reads at most {LONGEST_TEXT} text tokens",
                field="max_sequence_length",
                value=max_sequence_length,
                hint=f"Send {LONGEST_TEXT} or less.",
            )
        super().check_prompt(prompt, name, max_sequence_length)

    def text_encoders(self, max_sequence_length: int) -> TextEncoders:
        pipeline, longest = self.pipeline, self.pipeline.tokenizer_max_length
        return {
            "clip": TextEncoder(pipeline.tokenizer, pipeline.text_encoder, longest, cuts=True, finds_end=True),
            "t5": TextEncoder(pipeline.tokenizer_2, pipeline.text_encoder_2, max_sequence_length),
        }

    @property
    def pooled_width(self) -> int:
        return int(self.pipeline.transformer.config.pooled_projection_dim)

    def encode_ids(self, ids: Mapping[str, Sequence[int]], max_sequence_length: int) -> PromptEmbeds:
        encoders = self.text_encoders(max_sequence_length)
        inputs = {name: encoder.padded(ids[name], encoder.longest)[0] for name, encoder in encoders.items()}
        clip, t5 = (encoders[name].module for name in ("clip", "t5"))
        pooled, states = clip(inputs["clip"]).pooler_output, t5(inputs["t5"])[0]
        return PromptEmbeds(states[0].to(t5.dtype), pooled[0].to(clip.dtype))

    def guidance(self, params: RolloutParams) -> Guidance:
        scale = self.defaults.embedded_guidance if params.guidance_scale is None else params.guidance_scale
        distilled = self.pipeline.transformer.config.guidance_embeds
        return replace(super().guidance(params), embedded=scale if distilled else None)

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        text, plan = self._text_rows(rows)
        text_ids, image_ids = self._positions(plan.padded_text, rows.height, rows.width, rows.latents.dtype)
        return plan, {
            "hidden_states": rows.latents,
            "timestep": rows.timesteps.to(rows.latents.dtype) / 1000,  # in the latents' dtype, as the pipeline has it
            "guidance": rows.guidance,
            "pooled_projections": self._pooled_rows(rows),
            "encoder_hidden_states": text,
            "txt_ids": text_ids,
            "img_ids": image_ids,
        }

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return vae_pictures(self.pipeline.vae, self.unpack(latents, height, width))

    def cond_kwargs(self, prompt: PromptEmbeds, height: int, width: int) -> dict[str, CondValue]:
        """`freqs_cis` are the cosines and sines `[text + image tokens, head width]` of the joint sequence."""
        assert prompt.pooled is not None
        positions = self._positions(len(prompt.prompt_embeds), height, width, self.dtype)
        freqs = self.pipeline.transformer.pos_embed(torch.cat(positions))
        return {
            "encoder_hidden_states": host_copy(prompt.prompt_embeds),
            "pooled_projections": host_copy(prompt.pooled),
            "txt_ids": host_copy(positions[0]),
            "img_ids": host_copy(positions[1]),
            "freqs_cis": [host_copy(f) for f in freqs],
        }

    def _positions(
        self, text_tokens: int, height: int, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of text `[text_tokens, 3]`, all zero, and of the image's tokens `[tokens, 3]`: (0, row, column)."""
        grid = height // self.size_multiple, width // self.size_multiple
        with torch.device(self.device):  # made there, not copied there at every step
            image = self.pipeline._prepare_latent_image_ids(1, *grid, self.device, dtype)
            return torch.zeros(text_tokens, 3, dtype=dtype), image
