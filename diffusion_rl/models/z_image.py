"""Z-Image: latents `[C, 1, h, w]`, image before text in one stream, guidance and states in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

from diffusion_rl.batch import Conditioning, Guidance, PromptEmbeds, Rows
from diffusion_rl.models.base import ModelFamily, host_copy, vae_pictures
from diffusion_rl.models.prompts import TextEncoder, TextEncoders
from diffusion_rl.parallel.cfg import guidance_scales
from diffusion_rl.parallel.sequence import SequenceSpec, Stage
from diffusion_rl.parallel.shards import IMAGE, TEXT, Tokens
from diffusion_rl.parallel.tensor import TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan
from rl_kernels.staging import to_device

PATCH = 2  # side of a token's square of latent pixels; a transformer may have others, the pipeline knows this one
DEFAULT_SIDE = 1024  # pixels, of the pipeline's call; less where the position embeddings end before
JOINT = Tokens(("image", "text"))


class ZImageFamily(ModelFamily):
    """The transformer takes each row's caption by itself, and pads it and the image to a multiple of 32 tokens with
    learned ones that are attended to: they are the row's own. What it pads a row with to the batch's longest is not.

    Guidance is p + s (p - n), so that a scale of 0 is none and 1 already is some. The transformer's times run from 0
    (noise) to 1, and its output is the velocity's opposite.
    """

    pipeline_class_name = "ZImagePipeline"
    text_first = False
    reads_padding = False
    probe_prompts = ("a", "a " * SEQ_MULTI_OF)
    limits_guidance = True
    compiles = False  # each prompt is an argument with a length of its own: there is no one shape to compile
    sequence_spec = SequenceSpec(
        (
            Stage(("noise_refiner",), inputs={"x": IMAGE}, tables={"freqs_cis": IMAGE}, head=None),
            Stage(("context_refiner",), inputs={"x": TEXT}, tables={"freqs_cis": TEXT}, head=None, output=TEXT),
            Stage(
                ("layers",),
                inputs={"x": JOINT},
                tables={"freqs_cis": JOINT},
                head=f"all_final_layer.{PATCH}-1",
                output=JOINT,
            ),
        )
    )
    tensor_plan = TensorPlan(
        columns=("*.attention.to_[qkv]", "*.feed_forward.w[13]"),
        rows=("*.attention.to_out.0", "*.feed_forward.w2"),
        attentions=("*.attention",),
    )

    def __init__(self, pipeline: Any, defaults_folder: Path | None = None) -> None:
        """
        Raises:
            InvalidRequestError: the tokenizer has no chat template, which prompts are put into.
        """
        if pipeline.tokenizer is not None and not pipeline.tokenizer.chat_template:
            raise InvalidRequestError(
                "the tokenizer has no chat template, and Z-Image reads prompts in one",
                field="model_path",
                value=pipeline.tokenizer.name_or_path,
                hint="Put the template (chat_template.jinja) into the checkpoint's tokenizer folder.",
            )
        super().__init__(pipeline, defaults_folder)

    @property
    def attention_heads(self) -> int:
        return int(self.pipeline.transformer.config.n_heads)

    @property
    def velocity_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def default_side(self) -> int:
        return min(DEFAULT_SIDE, min(self.pipeline.transformer.config.axes_lens[1:]) * self.size_multiple)

    @property
    def size_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor * PATCH)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        channels, *grid = self.initial_noise_shape(height, width)
        return channels, 1, *grid

    def initial_noise_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels, height // factor, width // factor

    def pack(self, noise: torch.Tensor) -> torch.Tensor:
        return noise.unsqueeze(2)

    def check_size(self, height: int, width: int) -> None:
        super().check_size(height, width)
        longest = self.pipeline.transformer.config.axes_lens[1:]
        for (name, value), tokens in zip((("height", height), ("width", width)), longest, strict=True):
            if value // self.size_multiple > tokens:
                raise InvalidRequestError(
                    f"the model's position embeddings end at {tokens * self.size_multiple} pixels",
                    field=name,
                    value=value,
                    hint=f"Send at most {tokens * self.size_multiple}.",
                )

    def templated(self, text: str) -> str:
        message = [{"role": "user", "content": text}]
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
        return str(self.pipeline.tokenizer.apply_chat_template(message, **options))

    def text_encoders(self, max_sequence_length: int) -> TextEncoders:
        # The caption's positions begin at 1, and the image has the one behind them.
        positions = self.pipeline.transformer.config.axes_lens[0] - 2
        longest = min(max_sequence_length, positions // SEQ_MULTI_OF * SEQ_MULTI_OF)
        return {"qwen": TextEncoder(self.pipeline.tokenizer, self.pipeline.text_encoder, longest)}

    @property
    def text_width(self) -> int:
        return int(self.pipeline.transformer.config.cap_feat_dim)

    def encode_ids(self, ids: Mapping[str, Sequence[int]], max_sequence_length: int) -> PromptEmbeds:
        encoder = self.text_encoders(max_sequence_length)["qwen"]
        rows, mask = encoder.padded(ids["qwen"], max_sequence_length)
        states = encoder.module(input_ids=rows, attention_mask=mask.bool(), output_hidden_states=True)
        return PromptEmbeds(states.hidden_states[-2][mask.bool()])

    def guidance(self, params: RolloutParams) -> Guidance:
        named = [s for s in (params.guidance_scale, params.true_cfg_scale) if s is not None]
        scale = named[0] if named else self.defaults.guidance_scale
        if scale <= 0:
            return Guidance(0.0)
        return Guidance(
            scale,
            self.prompt(params, "negative_prompt") or "",
            normalization=float(params.cfg_normalization or 0.0),
            truncation=1.0 if params.cfg_truncation is None else params.cfg_truncation,
        )

    def default_sigmas(self, steps: int) -> list[float] | None:
        sigmas: list[float] = torch.linspace(1.0, 1 / steps, steps).tolist()
        return sigmas

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        captions = [p.prompt_embeds.to(rows.latents.dtype) for p in rows.prompts]
        return self._plan(captions, self._image_tokens(rows.height, rows.width)), {
            "x": list(rows.latents.unbind()),
            "t": (1000 - rows.timesteps) / 1000,
            "cap_feats": captions,
        }

    def plan_of_call(self, arguments: Mapping[str, Any]) -> AttentionPlan | None:
        _, _, height, width = arguments["x"][0].shape
        return self._plan(arguments["cap_feats"], (height // PATCH) * (width // PATCH))

    def velocity(self, output: torch.Tensor, rows: Rows) -> torch.Tensor:
        return -output.float()

    def combine(
        self, negative: torch.Tensor, positive: torch.Tensor, conditioning: Sequence[Conditioning]
    ) -> torch.Tensor:
        scales = to_device(guidance_scales(conditioning), positive.device).reshape((-1,) + (1,) * (positive.dim() - 1))
        guided = positive + scales * (positive - negative)
        if not any(c.cfg_normalization for c in conditioning):
            return guided
        return torch.stack([_limited(*rows) for rows in zip(guided, positive, conditioning, strict=True)])

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return vae_pictures(self.pipeline.vae, latents.squeeze(2))

    def cond_kwargs(self, prompt: PromptEmbeds, height: int, width: int) -> dict[str, CondValue]:
        """The caption is padded as the transformer pads it, by its last token, for which it takes a learned one."""
        embeds, transformer = prompt.prompt_embeds, self.pipeline.transformer
        latents = embeds.new_zeros(self.latent_shape(height, width))
        places = transformer.patchify_and_embed([latents], [embeds], PATCH, 1)
        (caption,), (image_ids,), (caption_ids,) = places[1], places[3], places[4]
        freqs = [transformer.rope_embedder(ids) for ids in (caption_ids[: len(caption)], image_ids)]
        return {
            "encoder_hidden_states": host_copy(caption),
            "caption_valid_lens": [len(embeds)],
            "freqs_cis": [torch.cat([f.real, f.imag], dim=-1).float().cpu() for f in freqs],
            "image_seq_len_target": len(image_ids),
        }

    def prompt_from_kwargs(self, kwargs: Mapping[str, Any]) -> PromptEmbeds:
        (length,) = kwargs["caption_valid_lens"]
        return PromptEmbeds(kwargs["encoder_hidden_states"][:length].to(self.device))

    def _plan(self, captions: list[torch.Tensor], image_tokens: int) -> AttentionPlan:
        lengths = tuple(_padded(len(caption)) for caption in captions)
        return AttentionPlan(lengths, max(lengths), _padded(image_tokens), text_first=self.text_first)


def _limited(guided: torch.Tensor, positive: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
    """One sample's guided velocity, shortened to `cfg_normalization` times the norm of the one with the prompt."""
    if not conditioning.cfg_normalization or not conditioning.guidance_scale:
        return guided
    norm, most = torch.linalg.vector_norm(guided), torch.linalg.vector_norm(positive) * conditioning.cfg_normalization
    return torch.where(norm > most, guided * (most / norm), guided)


def _padded(tokens: int) -> int:
    """How many the transformer makes of them with learned tokens."""
    return -(-tokens // SEQ_MULTI_OF) * SEQ_MULTI_OF
