"""Encoded prompts and pictures, kept for the next group that asks for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from diffusion_rl.batch import ImageLatents, PicturedPrompt, Pictures, Prompt, PromptEmbeds, TokenIds
from diffusion_rl.models import ModelFamily

T = TypeVar("T")


@dataclass(frozen=True)
class _PromptKey:
    """A prompt that is read with pictures is known by their digest: they themselves aren't kept."""

    prompt: str | TokenIds
    pictures: str | None
    max_sequence_length: int


class _Recent(Generic[T]):
    """The values made last, the least recently used one dropped first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.entries: OrderedDict[object, T] = OrderedDict()

    def get(self, key: object, make: Callable[[], T]) -> T:
        if key not in self.entries:
            self.entries[key] = make()
        self.entries.move_to_end(key)
        value = self.entries[key]
        while len(self.entries) > self._size:
            self.entries.popitem(last=False)
        return value


class PromptCache:
    """Encoded prompts, texts and token ids, and encoded pictures. A refit of a text encoder or of the VAE must `clear`
    it. Embeddings from outside are nobody else's, and pass by it."""

    def __init__(self, family: ModelFamily, size: int) -> None:
        self._family = family
        self._prompts: _Recent[PromptEmbeds] = _Recent(size)
        self._images: _Recent[ImageLatents] = _Recent(size)

    def encode(self, prompt: Prompt, max_sequence_length: int) -> PromptEmbeds:
        """The embeddings of a prompt, from the cache or from the text encoders; the same tensor for equal prompts."""
        if isinstance(prompt, PromptEmbeds):
            return self._family.encode_prompt(prompt, max_sequence_length)
        if isinstance(prompt, PicturedPrompt):
            key = _PromptKey(prompt.prompt, prompt.pictures.digest, max_sequence_length)
        else:
            key = _PromptKey(prompt, None, max_sequence_length)
        return self._prompts.get(key, lambda: self._family.encode_prompt(prompt, max_sequence_length))

    def encode_pictures(self, pictures: Pictures) -> ImageLatents:
        """The latents of pictures, from the cache or from the VAE; the same tensor for equal pictures."""
        return self._images.get(pictures.digest, lambda: self._family.encode_pictures(pictures))

    def clear(self) -> None:
        self._prompts.entries.clear()
        self._images.entries.clear()
