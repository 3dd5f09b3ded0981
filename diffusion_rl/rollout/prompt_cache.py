"""Encoded prompts, kept for the next group that asks for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from diffusion_rl.batch import Prompt, PromptEmbeds, TokenIds
from diffusion_rl.models import ModelFamily


@dataclass(frozen=True)
class _PromptKey:
    prompt: str | TokenIds
    max_sequence_length: int


class PromptCache:
    """Encoded prompts, texts and token ids, the least recently used one dropped first. A refit of a text encoder must
    `clear` it. Embeddings from outside are nobody else's, and pass by it."""

    def __init__(self, family: ModelFamily, size: int) -> None:
        self._family = family
        self._size = size
        self._entries: OrderedDict[_PromptKey, PromptEmbeds] = OrderedDict()

    def encode(self, prompt: Prompt, max_sequence_length: int) -> PromptEmbeds:
        """The embeddings of a prompt, from the cache or from the text encoders; the same tensor for equal prompts."""
        if isinstance(prompt, PromptEmbeds):
            return self._family.encode_prompt(prompt, max_sequence_length)
        key = _PromptKey(prompt, max_sequence_length)
        if key not in self._entries:
            self._entries[key] = self._family.encode_prompt(prompt, max_sequence_length)
        self._entries.move_to_end(key)
        embeds = self._entries[key]
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return embeds

    def clear(self) -> None:
        self._entries.clear()
