"""Text and tokens: what a stream says adds up to what is said at once, and a stop string is found where it is."""

from __future__ import annotations

import itertools
import random

import pytest
import tiny_llms
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine_control.errors import InvalidRequestError
from llm_runtime.output import FinishReason
from llm_runtime.params import SamplingParams
from llm_runtime.text import GrowingText, StopChecker, Tokenizer

WORDS = ("naïve ", "日本語", "🙂👍🏽", " 한글", "\n\nstop", "abcabcab", "é")
LENGTH = FinishReason("length")


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte-level")
    tiny_llms.make_tiny_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def by_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As sentencepiece's: words begin with a mark, the text's first space is no part of it, other bytes are tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "▁a", "▁stop", "s"]
    backend = Backend(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("pieces")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams, reason: FinishReason) -> list[str]:
    growing = GrowingText(tokenizer, sampling)
    texts = [growing.update(ids[:count]) for count in range(len(ids))]
    return [*texts, growing.update(ids, reason)]


@pytest.mark.parametrize("name", ["by_bytes", "by_pieces"])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_says_what_is_said_at_once_and_takes_nothing_back(
    name: str, seed: int, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    chosen = random.Random(seed)
    text = "".join(chosen.choices(WORDS, k=30))
    ids = tokenizer.encode(text)
    texts = streamed(tokenizer, ids, SamplingParams(), LENGTH)
    assert texts[-1] == tokenizer.decode(ids) == text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert not any("\ufffd" in piece for piece in texts)
    assert len(texts[-2]) >= len(text) - 2  # it isn't all said at the end


def test_bytes_that_are_no_character_are_said_once_it_is_clear_that_they_are_none(by_bytes: Tokenizer) -> None:
    chosen = random.Random(0)
    ids = [chosen.randrange(259) for _ in range(400)]
    for sampling in (SamplingParams(), SamplingParams(skip_special_tokens=False)):
        texts = streamed(by_bytes, ids, sampling, LENGTH)
        assert texts[-1] == by_bytes.text_of(ids, sampling)
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_a_stop_string_is_found_at_the_token_that_completes_it_and_is_cut_off(by_bytes: Tokenizer) -> None:
    checker = StopChecker(by_bytes, ("日本語", "<|im_start|>", "cab"))
    for text, found, said in [
        ("x 日本語", "日本語", "x "),
        ("ab<|im_start|>", "<|im_start|>", "ab"),
        ("abcab", "cab", "ab"),
    ]:
        ids = by_bytes.encode(text)
        assert [checker.check(ids[:count]) for count in range(len(ids))] == [None] * len(ids)
        assert checker.check(ids) == found
        assert checker.check([*ids, ord("x")]) is None  # it is the token's before
        reason = FinishReason("stop", matched=found)
        sampling = SamplingParams(stop=("日本語", "<|im_start|>", "cab"))
        texts = streamed(by_bytes, ids, sampling, reason)
        assert texts[-1] == said
        assert all(said.startswith(piece) for piece in texts)  # no part of the stop string was ever said
        kept = SamplingParams(stop=sampling.stop, no_stop_trim=True, skip_special_tokens=False)
        assert by_bytes.output_text(ids, reason, kept) == text


def test_of_two_stop_strings_in_one_token_the_one_that_begins_first_counts(by_pieces: Tokenizer) -> None:
    ids = [by_pieces.encode("c")[-1], 261]  # ends with the piece "ab"
    assert by_pieces.decode(ids) == "cab"
    assert StopChecker(by_pieces, ("b", "ca")).check(ids) == "ca"
    assert by_pieces.output_text(ids, FinishReason("stop", matched="ca"), SamplingParams(stop=("b", "ca"))) == ""


def test_a_stop_token_is_cut_off_unless_it_is_to_stay(by_bytes: Tokenizer) -> None:
    ids = [ord("a"), ord("!")]
    reason = FinishReason("stop", matched=ord("!"))
    assert by_bytes.output_text(ids, reason, SamplingParams()) == "a"
    assert by_bytes.output_text(ids, reason, SamplingParams(no_stop_trim=True)) == "a!"


def test_a_conversation_is_written_as_the_template_says_and_refused_where_it_can_not_be(
    by_bytes: Tokenizer, by_pieces: Tokenizer
) -> None:
    ids = by_bytes.chat_prompt([{"role": "user", "content": "hi"}])
    assert by_bytes.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tiny_llms.TURN_START
    with pytest.raises(InvalidRequestError, match="no chat template"):
        by_pieces.chat_prompt([{"role": "user", "content": "hi"}])
    with pytest.raises(InvalidRequestError, match="chat_template is nothing"):
        by_bytes.chat_prompt([{"role": "user", "content": "hi"}], chat_template_kwargs={"chat_template": "x"})
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        Tokenizer("/does/not/exist")
