"""From a request's prompts to their embeddings. Text becomes token ids, and these become embeddings, in one way: ids
that the tokenizer would have made have the bits of their text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from diffusion_rl.batch import PicturedPrompt, Prompt, PromptEmbeds, TokenIds
from diffusion_rl.models.prompts import (
    TextEncoders,
    check_embeds,
    check_ids,
    ids_of_encoders,
    read_prompt,
    refuse_long,
)
from diffusion_rl.params import RolloutParams
from rl_kernels.staging import to_device


class PromptEncoding(ABC):
    """What of a family has to do with prompts that are not encoded yet."""

    reads_padding: ClassVar[bool] = True  # whether its text has padding, which the transformer attends to
    pipeline: Any
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def text_encoders(self, max_sequence_length: int) -> TextEncoders:
        """The pipeline's text encoders by name. The first is that of a request's `prompt_ids`, the last reads all of a
        text."""

    @abstractmethod
    def encode_ids(self, ids: Mapping[str, Sequence[int]], max_sequence_length: int) -> PromptEmbeds:
        """Encodes one prompt, alone, from its token ids by text encoder; as the pipeline does, bit for bit."""

    def templated(self, text: str) -> str:
        """What the tokenizers get of a text."""
        return text

    @property
    def text_width(self) -> int:
        """D of the embeddings `[L, D]` that the transformer takes."""
        return int(self.pipeline.transformer.config.joint_attention_dim)

    @property
    def pooled_width(self) -> int | None:
        """P of the pooled vector `[P]` beside them; None: it takes none."""
        return None

    def longest_embeds(self, max_sequence_length: int) -> int:
        """The most tokens that a prompt's embeddings have."""
        *_, last = self.text_encoders(max_sequence_length).values()
        return last.longest

    def prompt(self, params: RolloutParams, name: str = "prompt") -> Prompt | None:
        """The request's `prompt`, or its `negative_prompt`, in whatever form it has there; None: there is none.

        Raises:
            InvalidRequestError: it is not of that form.
        """
        return read_prompt(params, name, reads_padding=self.reads_padding)

    def check_prompt(self, prompt: Prompt, name: str, max_sequence_length: int) -> None:
        """Refuses what the model can't read, or would cut off. `name` is that of `prompt`."""
        match prompt:
            case PromptEmbeds():
                check_embeds(
                    prompt,
                    name,
                    longest=self.longest_embeds(max_sequence_length),
                    width=self.text_width,
                    pooled_width=self.pooled_width,
                    dtype=self.dtype,
                )
            case TokenIds():
                check_ids(prompt, name, self.text_encoders(max_sequence_length))
            case PicturedPrompt():
                self.check_pictured(prompt, name, max_sequence_length)
            case _:
                self.check_text(prompt, name, max_sequence_length)

    def check_text(self, text: str, name: str, max_sequence_length: int) -> None:
        """Refuses a text that the text encoders would cut off."""
        templated = self.templated(text)
        for encoder in self.text_encoders(max_sequence_length).values():
            if not encoder.cuts:
                refuse_long(name, encoder.count(templated), encoder.longest, value=text)

    def encode_prompt(self, prompt: Prompt, max_sequence_length: int) -> PromptEmbeds:
        """Encodes one prompt, alone, so that no other prompt can change its bits. A text has those of its token ids;
        embeddings are what they are."""
        match prompt:
            case PromptEmbeds():
                pooled = None if prompt.pooled is None else to_device(prompt.pooled, self.device)
                return PromptEmbeds(to_device(prompt.prompt_embeds, self.device), pooled)
            case TokenIds():
                ids = ids_of_encoders(prompt, self.text_encoders(max_sequence_length))
                return self.encode_ids(ids, max_sequence_length)
            case PicturedPrompt():
                return self.encode_pictured(prompt, max_sequence_length)
            case _:
                return self.encode_text(prompt, max_sequence_length)

    def check_pictured(self, prompt: PicturedPrompt, name: str, max_sequence_length: int) -> None:
        """As `check_prompt`, of families that take pictures."""
        raise NotImplementedError

    def encode_pictured(self, prompt: PicturedPrompt, max_sequence_length: int) -> PromptEmbeds:
        """As `encode_prompt`, of families that take pictures."""
        raise NotImplementedError

    def encode_text(self, text: str, max_sequence_length: int) -> PromptEmbeds:
        templated, encoders = self.templated(text), self.text_encoders(max_sequence_length)
        return self.encode_ids({name: e.token_ids(templated) for name, e in encoders.items()}, max_sequence_length)
