"""Prompts before they are encoded: read from a request, and checked against the model; what a text encoder reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_rl.batch import PlainPrompt, PromptEmbeds, TokenIds
from diffusion_rl.params import RolloutParams
from diffusion_rl.prompt_fields import PROMPTS, PromptFields
from engine_control.errors import InvalidRequestError

EMBEDS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TextEncoder:
    """One of a pipeline's text encoders.

    longest: the tokens that it reads at most, `skipped` ones not counted: those that a template begins with, and that
    are no part of the embeddings. cuts: it reads the beginning of a longer text, for another one reads the whole.
    finds_end: it looks for the token that ends a text (the pooled vector of a CLIP is that token's). like: the encoder
    whose ids it reads where it isn't given its own.
    """

    tokenizer: Any
    module: Any
    longest: int
    skipped: int = 0
    cuts: bool = False
    finds_end: bool = False
    like: str | None = None

    @property
    def vocabulary(self) -> int:
        """Ids run from 0 to one less."""
        return int(self.module.get_input_embeddings().num_embeddings)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Of the text, or of as much of it as the encoder reads."""
        return tuple(self.tokenizer(text, truncation=True, max_length=self.longest + self.skipped).input_ids)

    def count(self, text: str) -> int:
        """Tokens of the whole text."""
        return len(self.tokenizer(text, verbose=False).input_ids) - self.skipped

    def padded(self, ids: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids `[1, length]` as the tokenizer pads them, and their mask, 1 where there is no padding."""
        missing = length - len(ids)
        padding, true, false = [self.tokenizer.pad_token_id] * missing, [1] * len(ids), [0] * missing
        if self.tokenizer.padding_side == "left":
            row, mask = [*padding, *ids], [*false, *true]
        else:
            row, mask = [*ids, *padding], [*true, *false]
        return torch.tensor([row], device=self.module.device), torch.tensor([mask], device=self.module.device)


TextEncoders = Mapping[str, TextEncoder]


def read_prompt(params: RolloutParams, name: str, *, reads_padding: bool) -> PlainPrompt | None:
    """The request's `prompt` or `negative_prompt` in the form that it has there, without padding and in memory of its
    own; None: there is none. reads_padding: the transformer's text has padding, so that embeddings have no mask.

    Raises:
        InvalidRequestError: ids are no list of ids, embeddings no such tensors, or a mask is not that of a prompt.
    """
    fields = PROMPTS[name]
    text, ids, extra, embeds = (getattr(params, n) for form in fields.forms for n in form)
    if embeds is not None:
        return _read_embeds(params, fields, reads_padding=reads_padding)
    if ids is None and extra is None:
        assert text is None or isinstance(text, str)
        return text
    if extra is not None and not isinstance(extra, Mapping):
        raise _refused(fields.extra_ids, "must be an object", type(extra).__name__, 'Send {"text encoder": [ids]}.')
    named = tuple((str(encoder), _read_ids(value, fields.extra_ids)) for encoder, value in (extra or {}).items())
    if ids is None:
        return TokenIds(None, named)
    read = _read_ids(ids, fields.ids)
    mask = getattr(params, fields.ids_mask)
    if mask is not None:
        first, last = _true_part(mask, fields.ids_mask, len(read))
        read = read[first:last]
    return TokenIds(read, named)


def ids_of_encoders(prompt: TokenIds, encoders: TextEncoders) -> dict[str, tuple[int, ...]]:
    """The ids by text encoder, those included that go without saying."""
    first = next(iter(encoders))
    ids = dict(prompt.extra) if prompt.ids is None else {first: prompt.ids, **dict(prompt.extra)}
    alike = {name: ids[encoder.like] for name, encoder in encoders.items() if encoder.like in ids}
    return {**alike, **ids}


def check_ids(prompt: TokenIds, name: str, encoders: TextEncoders) -> None:
    """
    Raises:
        InvalidRequestError: a text encoder would go without ids, or couldn't read those that it is given.
    """
    fields, ids = PROMPTS[name], ids_of_encoders(prompt, encoders)
    known = ", ".join(encoders)
    for encoder in ids:
        if encoder not in encoders:
            raise _refused(
                fields.extra_ids, f"the loaded model has no text encoder {encoder[:80]!r}", None, f"It has {known}."
            )
    for encoder, reader in encoders.items():
        main = prompt.ids is not None and ids.get(encoder) is prompt.ids
        field = fields.ids if main else fields.extra_ids
        if encoder not in ids:
            hint = f"Send {fields.ids} for {next(iter(encoders))}, and {fields.extra_ids} for others of {known}."
            raise _refused(field, f"ids for the text encoder {encoder} are missing", None, hint)
        _check_ids_of(encoder, reader, ids[encoder], field)


def check_embeds(
    prompt: PromptEmbeds, name: str, *, longest: int, width: int, pooled_width: int | None, dtype: torch.dtype
) -> None:
    """
    Raises:
        InvalidRequestError: they don't fit a transformer of these widths and dtype; `pooled_width` None: it takes no
            pooled vector.
    """
    fields, tokens = PROMPTS[name], len(prompt.prompt_embeds)
    if prompt.prompt_embeds.shape[-1] != width:
        hint = "Send what the pipeline's encode_prompt returns."
        raise _refused(fields.embeds, f"must be [L, {width}]", list(prompt.prompt_embeds.shape), hint)
    refuse_long(fields.embeds, tokens, longest, value=tokens)
    if pooled_width is None and prompt.pooled is not None:
        raise InvalidRequestError(
            f"the loaded model has no use for {fields.pooled}",
            code="unsupported_field",
            field=fields.pooled,
            value=list(prompt.pooled.shape),
            hint="Leave it out.",
        )
    if pooled_width is not None and (prompt.pooled is None or prompt.pooled.shape != (pooled_width,)):
        shape = None if prompt.pooled is None else list(prompt.pooled.shape)
        hint = f"The model takes the pooled vector of its text encoders with {fields.embeds}."
        raise _refused(fields.pooled, f"must be [{pooled_width}]", shape, hint)
    for field, tensor in ((fields.embeds, prompt.prompt_embeds), (fields.pooled, prompt.pooled)):
        if tensor is not None and not torch.isfinite(tensor.to(dtype)).all():
            raise _refused(field, f"is NaN or infinite somewhere, as {dtype}", None, "Send finite numbers.")


def refuse_long(field: str, tokens: int, most: int, *, value: object) -> None:
    """Refuses a prompt of more than `most` tokens, which a text encoder would cut off without a word."""
    if tokens > most:
        raise InvalidRequestError(
            f"{tokens} tokens, but the text encoder reads at most {most}",
            code="prompt_too_long",
            field=field,
            value=value,
            hint="Shorten it; a prompt is never cut off silently. A larger max_sequence_length may have room for it.",
        )


def _check_ids_of(name: str, encoder: TextEncoder, ids: tuple[int, ...], field: str) -> None:
    if len(ids) <= encoder.skipped:
        what = f"{len(ids)} ids, of which the model skips {encoder.skipped}" if encoder.skipped else "no ids"
        raise _refused(field, f"{what} ({name})", len(ids), "Send those of the whole text, its template included.")
    refuse_long(field, len(ids) - encoder.skipped, encoder.longest, value=len(ids))
    for token in ids:
        if token >= encoder.vocabulary:
            hint = f"The text encoder {name} has the ids 0 to {encoder.vocabulary - 1}."
            raise _refused(field, "no such token", token, hint)
    end = encoder.tokenizer.eos_token_id
    if encoder.finds_end and end not in ids:
        hint = f"Tokenize with special tokens: the text encoder {name} looks for {end}."
        raise _refused(field, "the token that ends a text is missing", None, hint)


def _read_ids(value: Any, field: str) -> tuple[int, ...]:
    items = _items(value, field)
    for item in items:
        if type(item) is not int or item < 0:
            raise _refused(field, "must be a list of token ids", str(item)[:80], "Send whole numbers from 0 on.")
    return tuple(items)


def _items(value: Any, field: str) -> list[Any]:
    """Of a list, or of a tensor `[L]` or `[1, L]` of whole numbers or booleans."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, torch.Tensor):
        raise _refused(field, "must be a list", type(value).__name__, "Send a list, or a tensor [L] of integers.")
    row = value.squeeze(0) if value.dim() == 2 else value
    if row.dim() != 1 or row.is_floating_point() or row.is_complex():
        raise _refused(field, "must be a tensor [L] of integers", f"{list(value.shape)}, {value.dtype}", "Send that.")
    items: list[Any] = row.tolist()
    return items


def _true_part(value: Any, field: str, length: int) -> tuple[int, int]:
    """`[first, last)` of the tokens that a mask calls true: all between its first and last one."""
    mask = _items(value, field)
    if len(mask) != length or any(m not in (0, 1) for m in mask) or not any(mask):
        hint = "One 0 or 1 a token, of which not all are 0."
        raise _refused(field, f"is no mask of {length} tokens", f"{len(mask)} items", hint)
    first, count = mask.index(1), sum(mask)
    if not all(mask[first : first + count]):
        raise _refused(field, "has gaps", None, "Padding is before or behind the prompt, not within.")
    return first, first + count


def _read_embeds(params: RolloutParams, fields: PromptFields, *, reads_padding: bool) -> PromptEmbeds:
    embeds = _floats(getattr(params, fields.embeds), fields.embeds, dim=2)
    mask, pooled = getattr(params, fields.embeds_mask), getattr(params, fields.pooled)
    last = len(embeds)
    if mask is not None:
        first, last = _true_part(mask, fields.embeds_mask, len(embeds))
        if first > 0 or (reads_padding and last < len(embeds)):
            what = "the loaded model reads padding as it reads text" if reads_padding else "the padding is in front"
            hint = "Leave the mask out." if reads_padding else "Send embeddings that are padded at their end."
            raise _refused(fields.embeds_mask, what, f"tokens {first} to {last - 1} of {len(embeds)}", hint)
    return PromptEmbeds(
        embeds[:last].clone(), None if pooled is None else _floats(pooled, fields.pooled, dim=1).clone()
    )


def _floats(value: Any, field: str, *, dim: int) -> torch.Tensor:
    """The tensor on the CPU, without a batch axis of 1."""
    if not isinstance(value, torch.Tensor):
        raise _refused(field, "must be a tensor", type(value).__name__, "Send a tensor, as a reply has them.")
    if value.dtype not in EMBEDS_DTYPES:
        raise _refused(field, "must be floating-point numbers", str(value.dtype), "Send float32, bfloat16 or float16.")
    alone = value.squeeze(0) if value.dim() == dim + 1 else value
    if alone.dim() != dim or not len(alone):
        shape = "[L, D]" if dim == 2 else "[P]"
        raise _refused(field, f"must be {shape}, or that with a batch axis of 1", list(value.shape), f"Send {shape}.")
    return alone.detach().cpu()


def _refused(field: str, what: str, value: object, hint: str) -> InvalidRequestError:
    return InvalidRequestError(what, field=field, value=value, hint=hint)
