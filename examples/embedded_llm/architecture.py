"""The embedded language model's parts before training: its tokenizer, its chat template and its Qwen3 configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, USER, ASSISTANT = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
"""The tokens 0 to 4. The 256 bytes follow, then pieces of the questions' words."""

MAX_POSITIONS = 2048

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a calculator. Show the steps, then the answer.",
    "Please answer each question step by step.",
    "Work out the sum or the difference column by column, from the right.",
)
"""What some conversations of the training begin with, so that a system message does not throw the model off."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['content'] is string -%}
    {%- set content = message['content'] -%}
  {%- else -%}
    {%- set content = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
  {%- endif -%}
  {%- if message['role'] == 'system' -%}
    {{- content -}}
  {%- elif message['role'] == 'user' -%}
    {{- '<|user|>' + content -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<|assistant|>' + content + eos_token -}}
  {%- else -%}
    {{- raise_exception("role '" + message['role'] + "' is none of system, user, assistant") -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Architecture:
    """The model's shape. All widths are multiples of 64, and the key-value heads can be split over two ranks."""

    vocab_size: int = 320
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges are learned from `texts`: any text goes in and comes out again, each digit is a
    token of its own, and every id below `vocab_size` is a token. Nothing is added to a text that is encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}: ask for fewer")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(shape: Architecture) -> Qwen3ForCausalLM:
    """An untrained model in fp32; its weights come from torch's global generator."""
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        max_new_tokens=64,
    )
    return model


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load without a network."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes names that 4.57 does not know; both read these.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights are written for their owner alone
