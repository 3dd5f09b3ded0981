"""How often a causal language model answers held-out questions right, as transformers runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from llm_runtime.arithmetic import check

BATCH_SIZE = 250


@dataclass(frozen=True)
class Shares:
    """Of `answers` answers: the shares that are right, that have the right form, and whose steps are the problem's."""

    right: float
    well_formed: float
    steps_right: float
    tokens: float
    """An answer's tokens on average, its end token included."""
    answers: int

    def __str__(self) -> str:
        return f"{self.right:.3f} right, {self.well_formed:.3f} well formed, {self.tokens:.1f} tokens"


@torch.no_grad()
def answers(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    temperature: float = 1.0,
    chat: bool = False,
    seed: int = 0,
) -> list[list[int]]:
    """The tokens of one answer to each question, up to and with the end token; temperature 0 is greedy.

    chat: the question is put through the chat template; else it is all that the model sees. At other temperatures than
    0 torch's global generator is seeded with `seed`.
    """
    rows = [_encode(tokenizer, prompt, chat) for prompt in prompts]
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    found: list[list[int]] = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = tokenizer.pad({"input_ids": rows[start : start + BATCH_SIZE]}, padding_side="left", return_tensors="pt")
        output = model.generate(**batch, **sampling)[:, batch.input_ids.shape[1] :]
        found += [_up_to(row, tokenizer.eos_token_id) for row in output.tolist()]
    return found


def measure(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], found: Sequence[Sequence[int]]) -> Shares:
    """Judge answers, given as tokens. One that does not end in the end token is not well formed, and not right."""
    counts: Counter[str] = Counter()
    for prompt, tokens in zip(prompts, found, strict=True):
        ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
        verdict = check(prompt, tokenizer.decode(tokens[:-1]) if ended else "")
        counts.update(
            {"right": verdict.correct, "form": verdict.well_formed, "steps": verdict.steps, "tokens": len(tokens)}
        )
    total = len(prompts)
    return Shares(*(counts[name] / total for name in ("right", "form", "steps", "tokens")), total)


def mixed_groups(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], groups: Sequence[Sequence[list[int]]]
) -> float:
    """The share of questions whose answers are neither all right nor all wrong: those that teach GRPO something."""
    mixed = 0
    for prompt, group in zip(prompts, groups, strict=True):
        right = [check(prompt, tokenizer.decode(tokens, skip_special_tokens=True)).correct for tokens in group]
        mixed += any(right) and not all(right)
    return mixed / len(prompts)


def _encode(tokenizer: PreTrainedTokenizerFast, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(prompt).input_ids)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _up_to(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
