"""Tiny random language models of the real transformers classes, with a real tokenizer, written into a folder without a
hub. Every width is a multiple of 64, as the row-invariant operations on a CPU need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB_SIZE = 320  # of the models; the tokenizer has 259 tokens, the bytes and these
END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 64}),  # heads are wider together than the hidden state
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 64,
            "moe_intermediate_size": 64,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
}


def make_tiny_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer: the id of a byte's token is the byte; then end of text, and a turn's two ends."""
    characters = bytes_to_unicode()
    vocabulary = {characters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_tiny_llm(
    folder: str | Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = VOCAB_SIZE,
    context_length: int = 512,
    tied: bool = False,
    rope: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Writes a model of hidden size 128 and its tokenizer into `folder`, and returns the folder.

    Weights depend on the seed, the family and the sizes alone; norms and biases are random too, so that one that is
    left out shows. rope: transformers' `rope_parameters`. config: more fields of the family's config.
    """
    config_class, model_class, own = FAMILIES[family]
    settings = config_class(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context_length,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope) if rope else {"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=TURN_END,
        pad_token_id=END_OF_TEXT,
        dtype=str(dtype).removeprefix("torch."),
        **{**own, **config},
    )
    with torch.random.fork_rng(devices=[]):  # making the modules draws numbers
        model = model_class(settings).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(drawn + 1 if name.endswith("norm.weight") else drawn)
    model.generation_config.eos_token_id = [TURN_END, END_OF_TEXT]
    path = Path(folder)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        make_tiny_tokenizer(path)
    return path
