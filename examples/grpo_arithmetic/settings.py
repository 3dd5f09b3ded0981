"""What a run is: everything that decides its numbers, in one frozen object that goes into the checkpoint and report."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

NOTES = {
    "seed": "decides questions and the noise of their answers",
    "iterations": "how many times to generate, train and refit",
    "minutes": "stop before the iteration that would begin after so many minutes (0: no limit)",
    "prompts": "questions an iteration, drawn from those that aren't held out",
    "group": "answers a question, compared with each other",
    "pool": "train on so many questions, again and again (0: new ones each time)",
    "temperature": "of the answers, in training and evaluation; the trainer's log-probs are of it too",
    "max_new_tokens": "a longer answer is cut, and worth nothing",
    "lr": "AdamW's learning rate",
    "decay": "the learning rate falls linearly, to a last one of lr / iterations",
    "updates": "optimizer steps an iteration, each on its share of the groups",
    "clip_range": "of the importance ratio of a token",
    "kl": "weight of the KL to the base model (0: none is computed)",
    "max_grad_norm": "longer gradients are shortened to this",
    "micro_batch": "answers of one forward and backward",
    "shuffle_rewards": "control: rewards change places between all answers, so that there is nothing to learn",
    "held_out": "held-out questions of the evaluations (0: there are none)",
    "log_prob_bound": "the run ends if trainer and engine are further apart than this at equal weights",
}


@dataclass(frozen=True)
class Settings:
    """See `NOTES`, one line a field; they are the command line's help."""

    seed: int = 0
    iterations: int = 80
    minutes: float = 0.0
    prompts: int = 64
    group: int = 8
    pool: int = 0
    temperature: float = 1.0
    max_new_tokens: int = 48
    lr: float = 3e-4
    decay: bool = True
    updates: int = 1
    clip_range: float = 0.2
    kl: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch: int = 64
    shuffle_rewards: bool = False
    held_out: int = 500
    log_prob_bound: float = 1e-3


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each field of `Settings`."""
    for field in fields(Settings):
        name, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=NOTES[field.name])
        else:
            parser.add_argument(name, type=type(default), default=default, help=NOTES[field.name])


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The settings among the parsed options."""
    return Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})


@dataclass(frozen=True)
class Places:
    """Where a run talks to and writes to. url None: the run starts a service of its own. note: goes into
    the report."""

    folder: Path
    url: str | None = None
    out: Path | None = None
    note: str | None = None
    resume: bool = False


MAY_CHANGE = ("iterations", "minutes", "micro_batch", "held_out")  # between a run and its resumption


def differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that a resumed run must not change, but does: name to (before, now)."""
    return {
        name: (before.get(name), value)
        for name, value in now.items()
        if name not in MAY_CHANGE and before.get(name) != value
    }
