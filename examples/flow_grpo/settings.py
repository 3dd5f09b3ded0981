"""What a run is: everything that decides its numbers, in one frozen object that goes into the checkpoint and report."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

NOTES = {
    "seed": "decides prompts, noise and stochastic steps",
    "epochs": "how many times to roll out, train and refit",
    "minutes": "stop before the epoch that would begin after so many minutes (0: no limit)",
    "prompts": "prompts a rollout, drawn from the training captions",
    "captions": "only captions with all these words are trained on and evaluated (empty: all)",
    "group": "samples a prompt, compared with each other",
    "focus": "draw a caption the more often, the less often its size and shape succeed",
    "steps": "denoising steps of a rollout",
    "sde_steps": "how many neighbouring steps are stochastic and trained on (FlowGRPO-Fast)",
    "sde_from": "the first stochastic step is drawn, once an epoch, from here ...",
    "sde_to": "... to here",
    "noise_level": "eta of the stochastic steps",
    "guidance": "guidance of rollout and training (1: none, which halves the cost)",
    "same_noise": "a group begins at one initial latent, so that its rewards differ by the trained steps alone",
    "lr": "AdamW's learning rate",
    "decay": "the learning rate falls linearly, to a last step of lr / epochs",
    "updates": "optimizer steps an epoch, each on its share of the groups",
    "clip_range": "of the importance ratio, whose log is a mean over a latent's elements",
    "kl": "weight of the KL to the base model",
    "max_grad_norm": "longer gradients are shortened to this",
    "micro_batch": "samples of one forward and backward; no bit of a log-prob depends on it",
    "lora": "rank of a LoRA adapter to train instead of all weights (0: all weights)",
    "shuffle_rewards": "control: rewards change places within their group, so that there is nothing to learn",
    "advantage_scale": "what rewards are divided by: the group's deviation, the batch's, or none",
    "held_out": "held-out captions of the evaluations",
}


@dataclass(frozen=True)
class Settings:
    """See `NOTES`, one line a field; they are the command line's help."""

    seed: int = 0
    epochs: int = 100
    minutes: float = 0.0
    prompts: int = 16
    group: int = 16
    captions: str = ""
    focus: bool = True
    steps: int = 6
    sde_steps: int = 2
    sde_from: int = 2
    sde_to: int = 2
    noise_level: float = 1.0
    guidance: float = 1.0
    same_noise: bool = True
    lr: float = 8e-5
    decay: bool = True
    advantage_scale: Literal["group", "batch", "none"] = "group"
    updates: int = 1
    clip_range: float = 1e-3
    kl: float = 0.02
    max_grad_norm: float = 1.0
    micro_batch: int = 32
    lora: int = 0
    shuffle_rewards: bool = False
    held_out: int = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each field of `Settings`."""
    for field in fields(Settings):
        name, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=NOTES[field.name])
        elif field.name == "advantage_scale":
            parser.add_argument(name, choices=["group", "batch", "none"], default=default, help=NOTES[field.name])
        else:
            parser.add_argument(name, type=type(default), default=default, help=NOTES[field.name])


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The settings among the parsed options."""
    return Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})


@dataclass(frozen=True)
class Places:
    """Where a run talks to and writes to. url None: the run starts a service of its own."""

    folder: Path
    url: str | None = None
    out: Path | None = None
    resume: bool = False


MAY_CHANGE = ("epochs", "minutes", "micro_batch", "held_out")  # between a run and its resumption


def differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that a resumed run must not change, but does: name to (before, now)."""
    return {
        name: (before.get(name), value)
        for name, value in now.items()
        if name not in MAY_CHANGE and before.get(name) != value
    }
