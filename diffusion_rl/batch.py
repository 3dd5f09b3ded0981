"""What a transformer is asked to compute: samples under their conditioning, and the rows of one of its forwards."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

Size = tuple[int, ...]
"""Of a picture `(height, width)` in pixels, of a video `(height, width, num_frames)`."""
FIRST, SECOND = "transformer", "transformer_2"
"""A pipeline's transformers by their names in it. Few have a second; each step is computed by one of them."""


def size_of(height: int, width: int, num_frames: int | None) -> Size:
    return (height, width) if num_frames is None else (height, width, num_frames)


@dataclass(frozen=True)
class PromptEmbeds:
    """One encoded prompt without a batch axis and without padding: embeddings `[L, D]`, and pooled `[P]` or None."""

    prompt_embeds: torch.Tensor
    pooled: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenIds:
    """A prompt as tokenizers make it: with special tokens and a template's, without padding.

    ids: of the pipeline's first text encoder. extra: `(text encoder, ids)` by name; they go before `ids`.
    """

    ids: tuple[int, ...] | None
    extra: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, eq=False)
class Pictures:
    """What a request brings for the model to edit, in its order: uint8 `[3, H, W]`, each of a size of its own, on the
    CPU."""

    tensors: tuple[torch.Tensor, ...]

    @cached_property
    def digest(self) -> str:
        """Equal where all pixels are."""
        found = hashlib.sha256()
        for picture in self.tensors:
            found.update(str(tuple(picture.shape)).encode())
            found.update(picture.contiguous().numpy())
        return found.hexdigest()


@dataclass(frozen=True)
class PicturedPrompt:
    """A prompt that the text encoder reads together with pictures."""

    prompt: str | TokenIds
    pictures: Pictures


PlainPrompt: TypeAlias = str | TokenIds | PromptEmbeds
Prompt: TypeAlias = PlainPrompt | PicturedPrompt
"""What a prompt is, wherever it is not encoded yet: text, token ids, either with pictures, or embeddings that somebody
else has made."""
ImageShapes: TypeAlias = tuple[tuple[int, int, int], ...]
"""Of each picture that a model edits, the grid of its tokens: (1, height, width)."""


@dataclass(frozen=True)
class ImageLatents:
    """Encoded pictures, as tokens that a transformer reads behind the noisy ones: `[tokens, D]` in its dtype."""

    latents: torch.Tensor
    shapes: ImageShapes


@dataclass(frozen=True)
class Guidance:
    """How a request is guided; the two ways go together or alone.

    scale, negative_prompt: classifier-free guidance, away from that prompt; 1 and None without it. embedded: the number
    that a guidance-distilled transformer is told; None for one that isn't. scale_2: the scale under the second
    transformer, of pipelines that have two.

    Of families whose scale of 0 is no guidance: normalization: the most that a guided velocity's norm may be, in norms
    of the one with the prompt; 0: as it comes. truncation: from 0 (noise) to 1, the time after which nothing is guided.
    """

    scale: float = 1.0
    negative_prompt: Prompt | None = None
    embedded: float | None = None
    scale_2: float | None = None
    normalization: float = 0.0
    truncation: float = 1.0

    def scale_at(self, transformer: str, timestep: torch.Tensor) -> float:
        """The scale of a step that this transformer computes, at that timestep (fp32, 1000 is noise)."""
        if self.truncation < 1 and float((1000 - timestep) / 1000) > self.truncation:
            return 0.0
        return self.scale if self.scale_2 is None or transformer == FIRST else self.scale_2


@dataclass(frozen=True)
class Conditioning:
    """What one sample is denoised under: its request's `Guidance` with the prompts encoded. negative is None, and
    guidance_scale 1, without classifier-free guidance. image: the pictures that are edited; None: there are none."""

    positive: PromptEmbeds
    negative: PromptEmbeds | None
    guidance_scale: float
    embedded_guidance: float | None = None
    cfg_normalization: float = 0.0
    image: ImageLatents | None = None


@dataclass(frozen=True)
class DenoiseBatch:
    """n samples of one size, one guidance mode and one set of sizes of pictures to edit, each at its own step, and all
    at steps of one transformer.

    latents `[n, ...]` in the transformer's dtype, timesteps `[n]` fp32 on the scheduler's scale (0..1000).
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    conditioning: tuple[Conditioning, ...]
    height: int
    width: int
    num_frames: int | None = None
    transformer: str = field(default=FIRST, kw_only=True)


@dataclass(frozen=True)
class Rows:
    """What one forward of the transformer computes: latents `[r, ...]`, timesteps `[r]`, and a prompt for each row.

    guidance `[r]` fp32 on the latents' device: each row's embedded guidance; None for a transformer that takes none.
    images: what each row edits, all of the same shapes; empty for transformers that take none.
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    prompts: tuple[PromptEmbeds, ...]
    height: int
    width: int
    guidance: torch.Tensor | None = None
    num_frames: int | None = None
    images: tuple[ImageLatents, ...] = ()

    @property
    def condition_tokens(self) -> int:
        """Of the pictures that a row edits."""
        return len(self.images[0].latents) if self.images else 0

    @property
    def size(self) -> Size:
        return size_of(self.height, self.width, self.num_frames)
