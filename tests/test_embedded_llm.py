"""The language model in the package is small, real, and right about sums, though not always."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from llm_runtime.arithmetic import check, held_out_prompts, parse, solution
from llm_runtime.assets import embedded_model_path

FOLDER = embedded_model_path()
PROMPTS = held_out_prompts(64)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True)


def answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: list[str], **sampling: object
) -> list[str]:
    """What the model goes on with, without special tokens; an answer that does not end in 64 tokens is empty."""
    batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**batch, **sampling)[:, batch.input_ids.shape[1] :]
    ended = (output == tokenizer.eos_token_id).any(dim=1).tolist()
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    return [text if whole else "" for text, whole in zip(texts, ended, strict=True)]


def share_right(texts: list[str]) -> float:
    return sum(check(prompt, text).correct for prompt, text in zip(PROMPTS, texts, strict=True)) / len(PROMPTS)


def test_its_files_are_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 8 * 2**20


def test_it_is_a_qwen3_whose_widths_suit_exact_mode_and_whose_heads_two_ranks_can_share(
    model: Qwen3ForCausalLM,
) -> None:
    config = model.config
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.num_key_value_heads % 2 == 0
    widths = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.num_key_value_heads * config.head_dim,
    )
    assert all(width % 64 == 0 for width in widths)
    assert config.max_position_embeddings >= 2048
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in model.parameters())


def test_every_id_is_a_token_and_the_model_knows_which_end_an_answer(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert len(tokenizer) == model.config.vocab_size
    assert all(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


@given(text=st.text())
@example("<|eos|> 12+34= <|user|>")
@example("  two  spaces .  don 't\r\n\t\x00 漢字 é e\u0301 \U0001f600 ")
def test_any_text_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("1234+567=") == list("1234+567=")
    assert min(len(tokenizer(solution(parse(prompt))).input_ids) for prompt in PROMPTS) >= 8
    assert max(len(tokenizer(solution(parse(prompt))).input_ids) for prompt in PROMPTS) < 40


def test_its_chat_template_marks_turns_and_ends_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Show the steps."},
        {"role": "user", "content": [{"type": "text", "text": "1+2="}]},
        {"role": "assistant", "content": "1+2=3: 3"},
        {"role": "user", "content": "3+4="},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    wanted = "<|bos|>Show the steps.<|user|>1+2=<|assistant|>1+2=3: 3<|eos|><|user|>3+4=<|assistant|>"
    assert rendered == wanted
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
    assert ids == tokenizer(wanted, add_special_tokens=False).input_ids
    with pytest.raises(Exception, match="role 'tool' is none of"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "?"}], tokenize=False)


def test_greedy_it_is_right_about_most_held_out_questions(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert share_right(answers(model, tokenizer, PROMPTS, do_sample=False)) >= 0.8


def test_sampled_it_is_nearly_always_well_formed_and_often_but_not_always_right(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = answers(model, tokenizer, PROMPTS, do_sample=True, top_k=0)
    assert sum(check(prompt, text).well_formed for prompt, text in zip(PROMPTS, texts, strict=True)) >= 0.95 * len(
        PROMPTS
    )
    assert 0.55 <= share_right(texts) <= 0.92


def test_asked_in_a_chat_it_answers_as_well(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in PROMPTS
    ]
    assert share_right(answers(model, tokenizer, chats, do_sample=False)) >= 0.8


def test_its_card_says_what_its_training_measured() -> None:
    results = json.loads((FOLDER.parents[2] / "examples/embedded_llm/results.json").read_text())
    card = (FOLDER / "README.md").read_text()
    for way, shares in results["held_out"].items():
        assert f"| {way.replace(', ', ' | ')} | {shares['right']:.1%} |" in card
    assert 0.6 <= results["held_out"]["text, temperature 1"]["right"] <= 0.9
