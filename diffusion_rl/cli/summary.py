"""What is written and shown about samples: `summary.json`, tables, and the shapes checker's verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from diffusion_rl.pictures import Tile
from diffusion_rl.sample import RolloutSample
from diffusion_rl.shapes import PICTURE_SIZE, CaptionError, CheckResult, check, parse


@dataclass(frozen=True)
class Verdict:
    """What the rule-based checker says of a picture: the attributes that are right and those that are wrong."""

    result: CheckResult

    @property
    def right(self) -> list[str]:
        return [f.name for f in fields(self.result) if getattr(self.result, f.name)]

    @property
    def wrong(self) -> list[str]:
        return [f.name for f in fields(self.result) if not getattr(self.result, f.name)]

    def __str__(self) -> str:
        count = f"{len(self.right)}/{len(fields(self.result))}"
        return count if self.result.correct else f"{count}, not {', '.join(self.wrong)}"


def verdict_on(sample: RolloutSample) -> Verdict | None:
    """The checker's verdict, or None for prompts outside the shapes grammar and pictures of another size."""
    picture = sample.generated_output
    if picture is None or tuple(picture.shape) != (3, PICTURE_SIZE, PICTURE_SIZE):
        return None
    try:
        scene = parse(sample.prompt)
    except CaptionError:
        return None
    return Verdict(check(picture if picture.dtype != torch.uint8 else picture.float() / 255, scene))


def log_probs_of(sample: RolloutSample) -> list[float]:
    """The log-probs of all T steps; empty for an evaluation sample."""
    return [] if sample.rollout_log_probs is None else sample.rollout_log_probs.tolist()


def summary_of(sample: RolloutSample, files: Mapping[str, Path | None], root: Path) -> dict[str, Any]:
    """One sample's entry in `summary.json`. Paths of `files` (name -> path) are written relative to `root`."""
    verdict, log_probs = verdict_on(sample), log_probs_of(sample)
    checker = None
    if verdict is not None:
        checker = {"correct": verdict.result.correct, "score": verdict.result.score, **asdict(verdict.result)}
    return {
        "prompt": sample.prompt,
        "sample_index": sample.sample_index,
        "seed": sample.seed,
        **{name: path.relative_to(root).as_posix() if path is not None else None for name, path in files.items()},
        "log_probs": log_probs,
        "log_prob_sum": sum(log_probs) if log_probs else None,
        "step_kinds": list(sample.rollout_step_kinds),
        "sigma_max": sample.sigma_max,
        "num_elements": sample.num_elements,
        "noise_level": sample.noise_level,
        "guidance_scale": sample.guidance_scale,
        "height": sample.height,
        "width": sample.width,
        **({} if sample.num_frames is None else {"num_frames": sample.num_frames}),
        "weight_version": sample.weight_versions[-1] if sample.weight_versions else None,
        "num_evaluations": sample.num_evaluations,
        "timings": asdict(sample.timings),
        "checker": checker,
    }


def write_json(content: Mapping[str, Any], path: Path) -> Path:
    """Writes indented JSON that any parser reads (no NaN) and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def tile_of(sample: RolloutSample) -> Tile | None:
    """The sample as a tile of a contact sheet; None if it has no picture."""
    if sample.generated_output is None:
        return None
    verdict = verdict_on(sample)
    note = f"seed {sample.seed}" + (f": {verdict}" if verdict is not None else "")
    return Tile(sample.generated_output, note, verdict.result.correct if verdict is not None else None)


def group_table(group: Sequence[RolloutSample], title: str) -> Table:
    """One row a sample: its seed, its log-prob at each step, their sum, and the checker's verdict if there is one."""
    table = Table(title=Text(title, "bold"), title_justify="left")  # a Text: square brackets of a prompt are no markup
    table.add_column("seed", justify="right", no_wrap=True)
    table.add_column("log-prob per step")
    table.add_column("sum", justify="right", no_wrap=True)
    checked = [verdict_on(sample) for sample in group]
    if any(checked):
        table.add_column("checker")
    for sample, verdict in zip(group, checked, strict=True):
        log_probs = log_probs_of(sample)
        steps = zip(log_probs, sample.rollout_step_kinds, strict=False)  # an evaluation sample has kinds alone
        shown = " ".join(f"{value:+.3f}" if kind != "ode" else "ode" for value, kind in steps)
        row: list[str | Text] = [str(sample.seed), shown or "none: evaluation"]
        row.append(f"{sum(log_probs):+.4f}" if log_probs else "-")
        if any(checked):
            style = "green" if verdict is not None and verdict.result.correct else "red"
            row.append(Text(str(verdict), style))
        table.add_row(*row)
    return table
