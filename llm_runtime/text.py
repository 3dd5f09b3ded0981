"""Between text and tokens: a model's tokenizer, text that grows token by token, and stop strings.

A text is what its tokens say, without clean-up afterwards: so that what a stream hands out piece by piece adds up to
what is handed out at once. Importing this loads no tokenizer library; making a `Tokenizer` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_control.errors import InvalidRequestError
from llm_runtime.output import FinishReason
from llm_runtime.params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character, or not yet one, decode to
CHARACTER_BYTES = 4  # at most, in UTF-8
WINDOW_TOKENS = 32  # that a growing text decodes at a time, before it moves on
CONTEXT_TOKENS = 8  # that it decodes again then: how a token is written depends on those in front

NOT_THE_TEMPLATES = ("conversation", "tools", "chat_template", "tokenize", "return_tensors", "return_dict")
"""What `chat_template_kwargs` can't set: the template is the model's, and what becomes of its text is settled here."""

Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a model's folder. Every method may be called from any thread."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the folder's tokenizer.json (or what can be made one), and its chat template.

        Raises:
            InvalidRequestError: there is none that can be read.
        """
        from transformers import AutoTokenizer

        try:
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the model has no tokenizer that can be read: {error}",
                code="bad_tokenizer",
                field="tokenizer_path",
                value=str(folder),
                hint="Name one with --tokenizer-path, or serve token ids alone with --skip-tokenizer-init.",
            ) from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequestError(
                f"a {type(loaded).__name__} has no tokenizer.json",
                code="bad_tokenizer",
                field="tokenizer_path",
                value=str(folder),
                hint="Save it as one (`save_pretrained` of a fast tokenizer), or use --skip-tokenizer-init.",
            )
        self._loaded = loaded
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        eos = loaded.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids; with `add_special_tokens`, also those that the model wants around every prompt."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """The tokens' text. Bytes that are no character become U+FFFD, and ids that are no token nothing.

        `spaces_between_special_tokens` changes nothing, as with every tokenizer that has a tokenizer.json: its decoder
        says where spaces are. It is a parameter because those who sample send it.
        """
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token's text by itself, special ones included."""
        texts: list[str] = self._backend.decode_batch([[token] for token in ids], skip_special_tokens=False)
        return texts

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation as the model's chat template writes it, up to where the assistant begins.

        Raises:
            InvalidRequestError: there is no template, or it can't write these messages.
        """
        from jinja2 import TemplateError

        if not self._loaded.chat_template:
            raise InvalidRequestError(
                "the model's tokenizer has no chat template",
                code="no_chat_template",
                field="messages",
                hint="Send the prompt as text to /v1/completions or /generate.",
            )
        options = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        for name in NOT_THE_TEMPLATES:
            if name in options:
                raise InvalidRequestError(
                    f"{name} is nothing that the chat template reads",
                    field="chat_template_kwargs",
                    value=name,
                    hint="Send only what the model's template has a use for.",
                )
        given = [dict(message) for message in messages]
        try:
            text = self._loaded.apply_chat_template(
                given, tools=None if tools is None else list(tools), tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequestError(
                f"the model's chat template can't write these messages: {error}",
                field="messages",
                hint="See the template in the model's folder for the roles and fields that it takes.",
            ) from error
        return self.encode(text, add_special_tokens=False)

    def output_text(self, ids: Sequence[int], finish_reason: FinishReason | None, sampling: SamplingParams) -> str:
        """The text of an output: without the stop token or string that ended it, unless `no_stop_trim`; and, of one
        that goes on, without an end that may be half a character or half a stop string."""
        if finish_reason is None:
            return _without_open_end(self.text_of(ids, sampling), sampling)
        matched = finish_reason.matched if finish_reason.type == "stop" and not sampling.no_stop_trim else None
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        text = self.text_of(ids, sampling)
        if isinstance(matched, str):
            at = _find_new(text, matched, self.text_of(ids[:-1], sampling))
            return text if at < 0 else text[:at]
        return text

    def is_token(self, token: int) -> bool:
        """Whether it has a text. A model's vocabulary is often padded with ids that have none."""
        return self._backend.id_to_token(token) is not None

    def text_of(self, ids: Sequence[int], sampling: SamplingParams) -> str:
        """The tokens' text, all of it, with or without special tokens as the parameters have it."""
        return self.decode(
            ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )


class StopChecker:
    """Says of an output, token by token, whether it has come to one of some strings. Keeps nothing between calls.

    Strings are looked for in the text with special tokens, as the model wrote it, so that they may name those.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        # A token has at least one byte. The ones in front say how the first one that matters is written.
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + CHARACTER_BYTES

    def check(self, output_ids: Sequence[int]) -> str | None:
        """The string whose last character the last token has written; of several the one that begins first.

        To be called after each token. A string that earlier tokens had completed is not found again: what a caller
        ignored then, before `min_new_tokens`, stays ignored.
        """
        if not self._stops or not output_ids or not self._tokenizer.is_token(output_ids[-1]):
            return None
        tail = self._last_texts(output_ids)
        text = self._tokenizer.decode(tail)
        if not any(stop in text for stop in self._stops):
            return None
        before = self._tokenizer.decode(tail[:-1])
        found = [(at, stop) for stop in self._stops if (at := _find_new(text, stop, before)) >= 0]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _last_texts(self, ids: Sequence[int]) -> list[int]:
        """The last ids that have a text, as many as matter."""
        found: list[int] = []
        for token in reversed(ids):
            if self._tokenizer.is_token(token):
                found.append(token)
                if len(found) == self._tail:
                    break
        return found[::-1]


class GrowingText:
    """The text of one output while it grows, for a stream: each update takes the time of what is new. What has been
    said stays said."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._settled = ""  # the text of the tokens in front of the window
        self._start = 0  # the window's first token
        self._said = ""

    def update(self, ids: Sequence[int], finish_reason: FinishReason | None = None) -> str:
        """All tokens so far -> the text so far, without an end that may yet change; with a finish reason, all of it,
        as `Tokenizer.output_text` has it."""
        if finish_reason is not None:
            self._said = self._tokenizer.output_text(ids, finish_reason, self._sampling)
            return self._said
        text = self._settled + self._decode(ids[self._start :])
        if len(ids) - self._start > WINDOW_TOKENS:
            self._move(ids, text)
        said = _without_open_end(text, self._sampling)
        if said.startswith(self._said):
            self._said = said
        return self._said

    def _move(self, ids: Sequence[int], text: str) -> None:
        """Settles all but the last tokens, unless the cut would go through a character (then the window's text would
        be another one) or that can't be told yet."""
        start = len(ids) - CONTEXT_TOKENS
        window = self._decode(ids[start:])
        if text.endswith(window) and not text.endswith(REPLACEMENT):
            self._settled, self._start = text[: len(text) - len(window)], start

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.text_of(ids, self._sampling)


def _find_new(text: str, stop: str, before: str) -> int:
    """Where `stop` begins in the text, of which `before` was there already, without lying in that altogether; -1 if it
    doesn't."""
    known = len(before.rstrip(REPLACEMENT))  # what comes behind may have been half a character
    return text.find(stop, max(known - len(stop) + 1, 0))


def _without_open_end(text: str, sampling: SamplingParams) -> str:
    """Without bytes at the end that may become a character, and characters that may become a stop string to trim."""
    text = text.rstrip(REPLACEMENT)
    if sampling.no_stop_trim:
        return text
    held = 0
    for stop in sampling.stop:
        lengths = range(min(len(stop) - 1, len(text)), held, -1)
        held = next((length for length in lengths if text.endswith(stop[:length])), held)
    return text[: len(text) - held]
