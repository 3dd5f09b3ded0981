"""What is left of a run: a JSON report and a picture of its reward curve."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from .loop import Run


def report_of(run: Run, *, note: str | None = None) -> dict[str, Any]:
    """The run with what it takes to read it later: the machine, the versions, the commit."""
    phases: dict[str, float] = {}
    for iteration in run.iterations:
        for name, seconds in iteration["seconds"].items():
            phases[name] = round(phases.get(name, 0.0) + seconds, 2)
    before, after = run.evaluations.get("before", {}), run.evaluations.get("after", {})
    gains = {way: after[way]["correct"] - before[way]["correct"] for way in before if way in after}
    return {
        "benchmark": "grpo_arithmetic",
        "question": "Does GRPO against the service raise the checker's accuracy on held-out questions?",
        "gain_points": {way: round(100 * gain, 1) for way, gain in gains.items()},
        "note": note,
        "log_prob_gap": {
            "tokens": sum(i["tokens"] for i in run.iterations),
            "largest": max((i["largest_log_prob_gap"] for i in run.iterations), default=0.0),
        },
        "seconds_by_phase": phases,
        "machine": {
            "cpu_cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(run),
    }


def write_json(report: dict[str, Any], path: Path) -> None:
    """Writes the report; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def plot(run: Run, path: Path) -> bool:
    """Draws reward and accuracy by iteration, and both evaluations. False: matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    numbers = [iteration["iteration"] for iteration in run.iterations]
    for name, label, colour in (("reward", "reward", "tab:blue"), ("correct", "right", "tab:green")):
        values = [iteration[name] for iteration in run.iterations]
        axes.plot(numbers, values, color=colour, alpha=0.25)
        axes.plot(numbers, _smooth(values), color=colour, label=f"{label} (training, smoothed)")
    moments = [
        (at, run.evaluations[when]) for when, at in (("before", 0), ("after", run.done)) if when in run.evaluations
    ]
    for way, colour in (("sampled", "black"), ("greedy", "gray")):
        shares = [found[way]["correct"] for _, found in moments]
        axes.plot([at for at, _ in moments], shares, "o--", color=colour, label=f"held out, {way}")
    axes.set(xlabel="iteration", ylabel="share", ylim=(0.5, 1), title="GRPO of the embedded language model")
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """An exponential mean without the bias of its beginning."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
        smoothed.append(total / norm)
    return smoothed


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
