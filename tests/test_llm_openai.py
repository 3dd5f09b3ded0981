"""OpenAI's routes, as OpenAI's own client sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Service
from openai import BadRequestError, NotFoundError, OpenAI

from llm_runtime.params import SamplingParams
from llm_runtime.server.openai_fields import read_chat, read_completion
from llm_runtime.text import Tokenizer

MODEL = "tiny-llm"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
HELLO: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def openai(llm_service: Service) -> OpenAI:
    return OpenAI(base_url=f"{llm_service.base_url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tokenizer(tiny_llm_folder: Path) -> Tokenizer:
    return Tokenizer(tiny_llm_folder)


def native(service: Service, **body: Any) -> Any:
    return service.http.post("/generate", json=body).json()


def test_a_completion_is_what_generate_makes_of_the_same_prompt(openai: OpenAI, llm_service: Service) -> None:
    same = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    rows = native(llm_service, text=["ab", "c"], sampling_params=same, return_logprob=True, top_logprobs_num=2)
    for prompt in (["ab", "c"], [[97, 98], [99]]):
        reply = openai.completions.create(prompt=prompt, logprobs=2, **GREEDY)
        assert [choice.text for choice in reply.choices] == [row["text"] for row in rows]
        for choice, row in zip(reply.choices, rows, strict=True):
            assert choice.finish_reason == "length"
            assert choice.logprobs is not None
            triples = row["meta_info"]["output_token_logprobs"]
            assert choice.logprobs.token_logprobs == [log_prob for log_prob, _, _ in triples]
            assert choice.logprobs.top_logprobs is not None
            assert all(1 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 16)
        assert reply.object == "text_completion"
        assert reply.metadata["weight_version"] == "default"  # type: ignore[attr-defined]
    assert openai.completions.create(prompt="c", **GREEDY).choices[0].text == rows[1]["text"]
    assert openai.completions.create(prompt=[99], **GREEDY).choices[0].text == rows[1]["text"]


def test_an_echo_scores_the_prompt(openai: OpenAI, llm_service: Service) -> None:
    scored = native(
        llm_service,
        text="abc",
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    for max_tokens in (0, 2):
        reply = openai.completions.create(prompt="abc", echo=True, logprobs=1, **{**GREEDY, "max_tokens": max_tokens})
        choice = reply.choices[0]
        assert choice.text.startswith("abc")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
        assert len(choice.logprobs.tokens) == 3 + max_tokens
        assert choice.logprobs.token_logprobs is not None
        expected = [log_prob for log_prob, _, _ in scored["meta_info"]["input_token_logprobs"]]
        assert choice.logprobs.token_logprobs[:3] == expected
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[:3] == [0, 1, 2]


def test_samples_have_seeds_that_count_on(openai: OpenAI) -> None:
    sampled: dict[str, Any] = {**GREEDY, "temperature": 1.0}
    pair = openai.completions.create(prompt="x", n=2, seed=11, **sampled)
    second = openai.completions.create(prompt="x", seed=12, **sampled)
    assert [choice.index for choice in pair.choices] == [0, 1]
    assert pair.choices[1].text == second.choices[0].text
    assert pair.usage is not None
    assert (pair.usage.prompt_tokens, pair.usage.completion_tokens) == (1, 16)


def test_a_stop_string_and_a_streamed_completion(openai: OpenAI) -> None:
    whole = openai.completions.create(prompt="hello", **{**GREEDY, "max_tokens": 40}).choices[0].text
    stop = next(c for c in whole[1:] if c.isascii())
    stopped = openai.completions.create(prompt="hello", stop=stop, **{**GREEDY, "max_tokens": 40}).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", whole[: whole.index(stop)])
    options: Any = {"include_usage": True}
    chunks = list(
        openai.completions.create(
            prompt=["hello", "x"], stream=True, stream_options=options, logprobs=1, echo=True, **GREEDY
        )
    )
    pieces = [c for chunk in chunks for c in chunk.choices if c.index == 0]
    assert pieces[0].text == "hello"
    assert whole.startswith("".join(piece.text for piece in pieces[1:-1]))
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    tokens = [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens or []]
    assert len(tokens) == 5 + 8
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 16)


def test_a_chat_is_written_with_the_template_and_answered(openai: OpenAI, llm_service: Service) -> None:
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    row = native(
        llm_service,
        text=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    reply = openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True, "return_meta_info": True, "return_token_ids": True},
    )
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", row["text"])
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [e.logprob for e in choice.logprobs.content] == [t[0] for t in row["meta_info"]["output_token_logprobs"]]
    assert [len(e.top_logprobs) for e in choice.logprobs.content] == [2] * 6
    assert choice.model_extra is not None
    info = choice.model_extra["meta_info"]
    assert info["output_token_logprobs"] == row["meta_info"]["output_token_logprobs"]
    assert info["weight_version"] == "default"
    assert choice.model_extra["token_ids"] == row["output_ids"]
    assert reply.metadata == {  # type: ignore[attr-defined]
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 6}],
    }


def test_a_streamed_chat_says_who_speaks_then_what_is_new_then_the_count(openai: OpenAI) -> None:
    said = openai.chat.completions.create(messages=HELLO, **GREEDY)
    options: Any = {"include_usage": True}
    chunks = list(openai.chat.completions.create(messages=HELLO, stream=True, stream_options=options, n=2, **GREEDY))
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == said.choices[0].message.content
        assert choices[-1].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert said.usage is not None
    assert chunks[-1].usage.prompt_tokens == said.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == 16


def test_models_are_listed_and_a_request_to_another_one_is_refused(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).to_dict()["max_model_len"] == 512
    with pytest.raises(NotFoundError, match="no model 'other'"):
        openai.models.retrieve("other")
    with pytest.raises(NotFoundError, match="no model 'other'"):
        openai.completions.create(model="other", prompt="a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "temperature": -1}, "sampling_params.temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": "a", "best_of": 4}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "max_tokens": 600}, "input_ids"),
        ({"prompt": "a", "extra_body": {"guided_json": "{}"}}, "guided_json"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_not_be_done_is_refused_by_name(
    openai: OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    create: Any = openai.chat.completions.create if "messages" in fields else openai.completions.create
    with pytest.raises(BadRequestError) as refused:
        create(model=MODEL, stream=stream, **fields)
    assert refused.value.param == param


def test_every_sampling_field_arrives(tokenizer: Tokenizer) -> None:
    body = b"""{"prompt": "a", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "n": 2,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"5": -1},
        "seed": 3, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [7], "ignore_eos": true,
        "skip_special_tokens": false,
        "include_stop_str_in_output": true, "user": "somebody"}"""
    assert read_completion(body, tokenizer).prompts[0].sampling == SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        n=2,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.0},
        sampling_seed=3,
        min_new_tokens=2,
        stop=("x",),
        stop_token_ids=(7,),
        ignore_eos=True,
        skip_special_tokens=False,
        no_stop_trim=True,
    )
    assert read_completion(b'{"prompt": "a", "top_k": 0}', tokenizer).prompts[0].sampling.max_new_tokens == 16
    parts = (
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]}'
    )
    chat = read_chat(parts, tokenizer).prompts[0]
    assert chat.sampling.max_new_tokens is None
    assert "user\nhi<" in tokenizer.decode(chat.input_ids)
