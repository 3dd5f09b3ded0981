"""What families have in common that edit pictures with Qwen-Image's transformer. The text encoder reads the prompt with
the pictures, and the transformer reads the pictures' latents as tokens behind the noisy ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image

from diffusion_rl.batch import (
    Conditioning,
    ImageLatents,
    ImageShapes,
    PicturedPrompt,
    Pictures,
    PlainPrompt,
    Prompt,
    PromptEmbeds,
    Rows,
    Size,
    TokenIds,
    size_of,
)
from diffusion_rl.condition_images import pil_image
from diffusion_rl.models.prompts import check_ids, ids_of_encoders, read_prompt, refuse_long
from diffusion_rl.models.qwen_image import QwenImageFamily
from diffusion_rl.parallel.sequence import SequenceSpec
from diffusion_rl.parallel.shards import Tokens
from diffusion_rl.params import RolloutParams
from diffusion_rl.prompt_fields import PROMPTS
from diffusion_rl.sample import CondValue, DenoisingEnv
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan

SCALED_MULTIPLE = 32  # of both sides of a picture, once it is scaled
SEEN_TOKEN_PIXELS = 28 * 28  # of a picture, that one token of the text encoder stands for
(STAGE,) = QwenImageFamily.sequence_spec.stages
LONGEST_RATIO = 200  # of a picture's sides, that the text encoder's vision takes


class PictureEditingFamily(QwenImageFamily):
    """Samples share a forward with those whose pictures have grids of the same shapes."""

    image_area = 1024 * 1024
    seen_area: ClassVar[int | None] = None  # pixels that pictures have for the text encoder; None: `image_area`

    def __init__(self, pipeline: Any, defaults_folder: Path | None = None) -> None:
        super().__init__(pipeline, defaults_folder)
        if pipeline.transformer.config.get("zero_cond_t", False):  # then each block is told which tokens are noisy
            tables = {**STAGE.tables, "modulate_index": Tokens(("image",))}
            self.sequence_spec = SequenceSpec((replace(STAGE, tables=tables),))  # type: ignore[misc]

    @abstractmethod
    def pictured_text(self, text: str, pictures: Pictures) -> str:
        """What the tokenizer gets of a text, with one placeholder a picture."""

    def prompt(self, params: RolloutParams, name: str = "prompt") -> Prompt | None:
        prompt: PlainPrompt | None = read_prompt(params, name, reads_padding=self.reads_padding)
        if prompt is None or isinstance(prompt, PromptEmbeds):
            return prompt
        pictures = self.given_pictures(params)
        assert pictures is not None
        return PicturedPrompt(prompt, pictures)

    def size(self, params: RolloutParams) -> Size:
        """By default that of the last picture, scaled."""
        if params.height is not None and params.width is not None:
            return super().size(params)
        pictures = self.given_pictures(params)
        assert pictures is not None
        height, width = self._scaled(pictures.tensors[-1], self._area)
        return size_of(params.height or height, params.width or width, None)

    def longest_embeds(self, max_sequence_length: int) -> int:
        """Room for the pictures' tokens, each of which stands for about `SEEN_TOKEN_PIXELS`, rounded up generously."""
        return (
            super().longest_embeds(max_sequence_length) + 2 * self.most_pictures * self._seen_area // SEEN_TOKEN_PIXELS
        )

    def check_pictured(self, prompt: PicturedPrompt, name: str, max_sequence_length: int) -> None:
        encoders = self.text_encoders(max_sequence_length)
        match prompt.prompt:
            case TokenIds() as given:
                extra = tuple((encoder, self._without_places(found)) for encoder, found in given.extra)
                bare = TokenIds(None if given.ids is None else self._without_places(given.ids), extra)
                check_ids(bare, name, encoders)  # the pictures' tokens don't count as the text's
                ids, field = ids_of_encoders(given, encoders)["qwen"], PROMPTS[name].ids
                wanted = sum(self._places(self._seen(prompt.pictures)))
            case text:
                pictured, reader, field = self.pictured_text(text, prompt.pictures), encoders["qwen"], name
                refuse_long(name, reader.count(pictured), reader.longest, value=text)
                ids = reader.token_ids(pictured)
                wanted = len(prompt.pictures.tensors)
        found = ids.count(self._placeholder)
        if found != wanted:
            placeholder = self.pipeline.tokenizer.decode([self._placeholder])
            raise InvalidRequestError(
                f"{found} placeholders for pictures ({placeholder}), where there should be {wanted}",
                field=field,
                value=found,
                hint=f"Send what the pipeline's processor makes of both, and no {placeholder} in a text.",
            )

    def encode_pictured(self, prompt: PicturedPrompt, max_sequence_length: int) -> PromptEmbeds:
        encoders, seen = self.text_encoders(max_sequence_length), self._seen(prompt.pictures)
        match prompt.prompt:
            case TokenIds() as given:
                ids: Sequence[int] = ids_of_encoders(given, encoders)["qwen"]
            case text:
                ids = encoders["qwen"].token_ids(self.pictured_text(text, prompt.pictures))
                ids = self._with_places(ids, self._places(seen))
        device = encoders["qwen"].module.device
        return self.hidden_states(encoders["qwen"], ids, **{name: x.to(device) for name, x in seen.items()})

    def image_shapes(self, pictures: Pictures) -> ImageShapes:
        sizes = [self._scaled(picture, self._area) for picture in pictures.tensors]
        return tuple(grid for size in sizes for grid in self._grid(*size))

    def encode_pictures(self, pictures: Pictures) -> ImageLatents:
        latents = [self._encode_picture(picture) for picture in pictures.tensors]
        return ImageLatents(torch.cat(latents).to(self.dtype), self.image_shapes(pictures))

    def probe_image(self, size: Size) -> ImageLatents:
        generator = torch.Generator().manual_seed(2)
        latents = torch.randn(*self.latent_shape(*size), generator=generator)
        return ImageLatents(latents.to(self.device, self.dtype), tuple(self._grid(*size)))

    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        plan, inputs = super().transformer_inputs(rows)
        behind = torch.stack([image.latents for image in rows.images])
        shapes = [*self._grid(rows.height, rows.width), *rows.images[0].shapes]
        return plan, {
            **inputs,
            "hidden_states": torch.cat([rows.latents, behind], dim=1),
            "img_shapes": [shapes] * len(rows.latents),
        }

    def velocity(self, output: torch.Tensor, rows: Rows) -> torch.Tensor:
        """That of the noisy tokens."""
        return output[:, : rows.latents.shape[1]].contiguous()

    def denoising_env(self, conditioning: Conditioning, *size: int) -> DenoisingEnv:
        env = super().denoising_env(conditioning, *size)
        assert conditioning.image is not None
        grid = [*self._grid(*size), *conditioning.image.shapes]

        def with_pictures(prompt: PromptEmbeds) -> Mapping[str, CondValue]:
            return self.kwargs_of_grid(prompt, grid)

        negative = conditioning.negative
        return replace(
            env,
            pos_cond_kwargs=with_pictures(conditioning.positive),
            neg_cond_kwargs=None if negative is None else with_pictures(negative),
        )

    @property
    def _area(self) -> int:
        assert self.defaults.image_area is not None
        return self.defaults.image_area

    @property
    def _seen_area(self) -> int:
        return self._area if self.seen_area is None else self.seen_area

    @property
    def _placeholder(self) -> int:
        return int(self.pipeline.text_encoder.config.image_token_id)

    def _scaled(self, picture: torch.Tensor, area: int) -> tuple[int, int]:
        """Height and width of a picture that keeps its proportions, nearly, and has about that many pixels: diffusers'
        `calculate_dimensions`."""
        height, width = picture.shape[1:]
        ratio = width / height
        scaled = math.sqrt(area * ratio), math.sqrt(area * ratio) / ratio
        wide, high = (round(side / SCALED_MULTIPLE) * SCALED_MULTIPLE for side in scaled)
        if not (wide and high) or max(ratio, 1 / ratio) > LONGEST_RATIO:
            raise InvalidRequestError(
                "too long and narrow for the model",
                field="image",
                value=f"{width} x {height}",
                hint="Crop it.",
            )
        return high, wide

    def _seen(self, pictures: Pictures) -> dict[str, torch.Tensor]:
        """What the text encoder is told of the pictures, on the CPU."""
        seen = [self._resized(picture, self._seen_area) for picture in pictures.tensors]
        inputs = self.pipeline.processor.image_processor(images=seen, return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}

    def _resized(self, picture: torch.Tensor, area: int) -> Image.Image:
        resized: Image.Image = self.pipeline.image_processor.resize(pil_image(picture), *self._scaled(picture, area))
        return resized

    def _places(self, seen: Mapping[str, torch.Tensor]) -> list[int]:
        """Tokens of each picture for the text encoder."""
        merged = self.pipeline.processor.image_processor.merge_size**2
        return [int(count) // merged for count in seen["image_grid_thw"].prod(dim=1)]

    def _with_places(self, ids: Sequence[int], places: Sequence[int]) -> list[int]:
        """The ids with each picture's placeholder as often as it has tokens."""
        counts, found = iter(places), list[int]()
        for token in ids:
            found += [token] * (next(counts) if token == self._placeholder else 1)
        return found

    def _without_places(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(token for token in ids if token != self._placeholder)

    def _encode_picture(self, picture: torch.Tensor) -> torch.Tensor:
        """`[tokens, D]`, the most likely latents of one picture, normalised."""
        pipeline = self.pipeline
        pixels = pipeline.image_processor.preprocess(self._resized(picture, self._area)).unsqueeze(2)
        latents = pipeline._encode_vae_image(pixels.to(self.device, pipeline.vae.dtype), generator=None)
        packed: torch.Tensor = self.pack(latents[:, :, 0])[0]
        return packed
