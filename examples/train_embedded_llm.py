"""Train the embedded language model from nothing: a Qwen3 that works out sums and differences, column by column.

The result is a complete folder in Hugging Face format: a tokenizer with a chat template, and the weights in fp32. The
questions and worked answers are made by `llm_runtime.arithmetic` as they are needed; no weights and no data come from
elsewhere. Run it from the repository's root, on a CPU:

    PYTHONPATH=. python examples/train_embedded_llm.py

Training stops at the first check at which the share of right answers, sampled at temperature 1, reaches
`--stop-accuracy`: short of what the model could learn, so that something is left for RL. The checks and the final
numbers are of different questions, and none of either is about a problem that was trained on. The same seed and number
of threads make the same model again on the same machine and library versions.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import transformers
from embedded_llm.architecture import (
    ASSISTANT,
    BOS,
    EOS,
    SYSTEM_MESSAGES,
    USER,
    Architecture,
    build_model,
    build_tokenizer,
    save_model,
)
from embedded_llm.evaluation import answers, measure, mixed_groups
from embedded_llm.model_card import model_card
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from llm_runtime.arithmetic import held_out_prompts, parse, solution, training_prompts

IGNORED = -100
"""The label of a token that no loss is taken of: of questions, and of padding."""
FINAL_SEED, CHECK_SEED = 0, 1
"""Of the held-out questions of the final numbers, and of those that decide when training stops."""


@dataclass(frozen=True)
class Settings(Architecture):
    """Every knob of a run; each is a command-line option of the same name."""

    out: str = "llm_runtime/assets/arithmetic-qwen3"
    results: str = "examples/embedded_llm/results.json"
    seed: int = 0
    threads: int = 1  # another number rounds otherwise, and makes another model
    steps: int = 6000
    batch_size: int = 16  # rows, each a conversation
    row_length: int = 128  # tokens
    chat_share: float = 0.5  # of conversations in the chat template; the others are questions and answers alone
    system_share: float = 0.2  # of the former, begin with a system message
    rate: float = 2e-3
    warmup: int = 100
    ema: float = 0.99
    check_every: int = 100
    check_questions: int = 250
    stop_accuracy: float = 0.75
    final_questions: int = 1000
    group_questions: int = 250
    group_size: int = 8


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    types = {"str": str, "int": int, "float": float}
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=types[field.type], default=field.default, help=f"default {field.default}")
    return Settings(**vars(parser.parse_args()))


@dataclass(frozen=True)
class Turn:
    """A question and its worked answer as tokens, without any special token."""

    question: list[int]
    answer: list[int]


class Conversations:
    """Rows of training tokens without end, each as many turns as fit: some in the chat template, some bare."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
        self._settings = settings
        self._choice = random.Random(settings.seed)
        self._turns = turns(tokenizer, settings.seed)
        bos, eos, user, assistant = (tokenizer.convert_tokens_to_ids(token) for token in (BOS, EOS, USER, ASSISTANT))
        self._bos, self._eos, self._user, self._assistant, self._pad = bos, eos, user, assistant, tokenizer.pad_token_id
        self._system_messages = [tokenizer(text).input_ids for text in SYSTEM_MESSAGES]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, each int64 [batch_size, row_length]."""
        rows = [self._row() for _ in range(self._settings.batch_size)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])

    def _row(self) -> tuple[list[int], list[int]]:
        length, chat = self._settings.row_length, self._choice.random() < self._settings.chat_share
        tokens = [self._bos] if chat else []
        if chat and self._choice.random() < self._settings.system_share:
            tokens += self._choice.choice(self._system_messages)
        labels = [IGNORED] * len(tokens)
        while True:
            turn = next(self._turns)
            asked = [self._user, *turn.question, self._assistant] if chat else turn.question
            answered = [*turn.answer, self._eos]
            if len(tokens) + len(asked) + len(answered) > length:
                break
            tokens += asked + answered
            labels += [IGNORED] * len(asked) + answered
        padding = length - len(tokens)
        return tokens + [self._pad] * padding, labels + [IGNORED] * padding


def turns(tokenizer: PreTrainedTokenizerFast, seed: int, *, chunk: int = 20_000) -> Iterator[Turn]:
    """Training questions with their solutions, without end; question and answer are tokenised apart, as in serving."""
    part = 0
    while True:
        questions = training_prompts(chunk, seed=seed * 1_000_000 + part)
        solutions = [solution(parse(question)) for question in questions]
        for question, answer in zip(tokenizer(questions).input_ids, tokenizer(solutions).input_ids, strict=True):
            yield Turn(question, answer)
        part += 1


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings
) -> tuple[Qwen3ForCausalLM, list[dict]]:
    """Train until the averaged weights are good enough, or the steps are used up; return them and the checks' curve."""
    average = copy.deepcopy(model).eval().requires_grad_(False)
    weights, averages = list(model.parameters()), list(average.parameters())
    optimizer = torch.optim.AdamW(weights, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01)
    conversations = Conversations(tokenizer, settings)
    check_prompts = held_out_prompts(settings.check_questions, seed=CHECK_SEED)
    curve: list[dict] = []
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=settings.steps)
        for step in range(1, settings.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * min(1.0, step / settings.warmup)
            losses.append(train_step(model, optimizer, conversations))
            share = 1.0 - min(settings.ema, step / (step + 10))
            torch._foreach_lerp_(averages, [weight.detach() for weight in weights], share)
            progress.advance(task)
            if step % settings.check_every == 0 or step == settings.steps:
                sampled = measure(tokenizer, check_prompts, answers(average, tokenizer, check_prompts))
                loss = torch.stack(losses).mean().item()
                curve.append({"step": step, "loss": loss, **asdict(sampled)})
                progress.update(task, description=f"loss {loss:.3f}, {sampled.right:.0%} right")
                progress.console.print(f"{time.perf_counter() - began:.0f} s, step {step}: loss {loss:.4f}, {sampled}")
                losses.clear()
                if sampled.right >= settings.stop_accuracy:
                    break
    return average, curve


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, conversations: Conversations) -> torch.Tensor:
    """One step of AdamW on one batch; the loss is the mean over the answers' tokens."""
    tokens, labels = conversations.batch()
    loss = model(input_ids=tokens, labels=labels).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> dict:
    """The final numbers, of held-out questions that no check has seen."""
    prompts = held_out_prompts(settings.final_questions, seed=FINAL_SEED)
    ways = {
        f"{form}, {name}": {"chat": form == "chat", "temperature": temperature}
        for form in ("text", "chat")
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0))
    }
    final = {}
    for name, way in ways.items():
        shares = measure(tokenizer, prompts, answers(model, tokenizer, prompts, **way))
        final[name] = asdict(shares)
        print(f"{name}: {shares}", flush=True)
    asked = prompts[: settings.group_questions]
    repeated = [prompt for prompt in asked for _ in range(settings.group_size)]
    sampled = answers(model, tokenizer, repeated, seed=1)
    groups = [sampled[start : start + settings.group_size] for start in range(0, len(sampled), settings.group_size)]
    mixed = mixed_groups(tokenizer, asked, groups)
    print(f"groups of {settings.group_size} that are neither all right nor all wrong: {mixed:.3f}", flush=True)
    return {"held_out": final, "mixed_groups": mixed}


def main() -> None:
    settings, began = parse_settings(), time.perf_counter()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer([*training_prompts(20_000, seed=settings.seed), *SYSTEM_MESSAGES], settings.vocab_size)
    model, curve = train(build_model(settings), tokenizer, settings)
    seconds = time.perf_counter() - began
    folder = Path(settings.out)
    save_model(model, tokenizer, folder)
    print(f"saved {folder} after {seconds:.0f} s", flush=True)
    results = {
        "settings": asdict(settings),
        "machine": f"CPU {platform.machine()} ({settings.threads} thread{'s' if settings.threads > 1 else ''})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": transformers.__version__},
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seconds": seconds,
        **evaluate(model, tokenizer, settings),
        "curve": curve,
    }
    Path(settings.results).parent.mkdir(parents=True, exist_ok=True)
    Path(settings.results).write_text(json.dumps(results, indent=1) + "\n")
    (folder / "README.md").write_text(model_card(results))


if __name__ == "__main__":
    main()
