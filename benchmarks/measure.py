"""What the benchmarks share: arms that are timed alternately, and a report with what is needed to read it later."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from rich.console import Console
from rich.table import Table

import diffusion_rl
from diffusion_rl.shapes import held_out_captions, training_captions

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
TABLE_WIDTH = 120


@dataclass
class Series:
    """The seconds that one arm took, a number a repeat."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    def row(self, **extra: object) -> dict[str, Any]:
        """The series as an entry of a report's results."""
        low, high = quartiles(self.seconds)
        return {
            "name": self.name,
            "min_s": self.minimum,
            "median_s": self.median,
            "quartiles_s": [low, high],
            "repeats": len(self.seconds),
            **extra,
        }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def alternate(
    arms: Mapping[str, Callable[[], object]], repeats: int, *, warmups: int = 1, budget: Budget | None = None
) -> dict[str, Series]:
    """Times each arm `repeats` times, in turn: A B, B A, A B, ..., so that neither drift nor the neighbour favours one.

    With more than two arms each round also begins with another one. Garbage that earlier work left is collected
    before, outside the clock. With a budget there is one round, and further ones as long as there is time for them.
    """
    for _ in range(warmups):
        for arm in arms.values():
            arm()
    synchronise()
    gc.collect()
    gc.freeze()
    series = {name: Series(name) for name in arms}
    names = list(arms)
    try:
        for repeat in range(repeats):
            round_s = sum(one.seconds[-1] for one in series.values()) if repeat else 0.0
            if budget is not None and repeat and not budget.allows(round_s):
                break
            shift = repeat // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in order if repeat % 2 == 0 else reversed(order):
                series[name].seconds.append(seconds_of(arms[name]))
    finally:
        gc.unfreeze()
    return series


class Budget:
    """Seconds of wall-clock time that a benchmark may take; what comes last is left out when they are spent."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def allows(self, seconds: float) -> bool:
        """Whether there is still time for work that takes that long."""
        return time.monotonic() + seconds < self._end


def now() -> float:
    """The clock's seconds, when the device has done all it was told."""
    synchronise()
    return time.perf_counter()


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    began = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - began


def matmul_ceiling(side: int, dtype: torch.dtype, device: torch.device | str) -> float:
    """TFLOP/s of a square product of random numbers."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    series = alternate({"mm": lambda: torch.mm(a, b)}, 10, warmups=3)["mm"]
    return 2 * side**3 / series.median / 1e12


def synchronise() -> None:
    """Returns when the GPU, if there is one, has done all it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(numerator: Series, denominator: Series) -> float:
    """The ratio of the two medians."""
    return numerator.median / denominator.median


def paired_ratios(numerator: Series, denominator: Series) -> dict[str, float]:
    """Median and quartiles of the ratios within each repeat: what is left of drift that both arms saw is gone."""
    each = [a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)]
    low, high = quartiles(each)
    return {"median": statistics.median(each), "quartile_1": low, "quartile_3": high}


class PromptSupply:
    """Captions of the shapes world, each handed out once, so that no cache has seen it; then from the start again."""

    def __init__(self) -> None:
        self._captions: Iterator[str] = itertools.cycle([*held_out_captions(), *training_captions()])

    def take(self, count: int) -> list[str]:
        """The next `count` captions."""
        return list(itertools.islice(self._captions, count))


@dataclass
class Report:
    """What a benchmark found.

    results: one entry an arm or case. ratios: the numbers that answer the question, by name.
    limit: what physics (or arithmetic) allows, and how far from it the measurement is.
    """

    benchmark: str
    question: str
    settings: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, Any] = field(default_factory=dict)
    limit: str = ""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    hardware: dict[str, Any] = field(default_factory=lambda: hardware())
    versions: dict[str, str] = field(default_factory=lambda: versions())
    commit: str | None = field(default_factory=lambda: commit())

    def __post_init__(self) -> None:
        self.commit = self.settings.get("commit") or self.commit

    def write(self, path: Path) -> None:
        """Writes the report as JSON; the folder is made if need be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(asdict(self)), indent=2) + "\n")


def hardware() -> dict[str, Any]:
    """The machine, by what it says of itself, and how busy it was when the run began."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "gpu": gpu,
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "diffusion_rl": diffusion_rl.__version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str | None:
    """The commit that is checked out, with `+changes` if the source differs from it; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changed else "")


def command_line(name: str, description: str, *, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has; `name` is the benchmark's, and the result file's."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.bench_{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the result goes")
    parser.add_argument("--model", default="embedded", help="a model's folder, a hub id, or `embedded`")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds, each of all arms in turn")
    parser.add_argument("--commit", help="what is measured, where the checkout can't say it itself")
    return parser


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a run, without the place of its result."""
    return {name: value for name, value in vars(arguments).items() if name != "out"}


def integers(text: str) -> list[int]:
    """`1,4,8` as a list, for an option."""
    return [int(part) for part in text.split(",")]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A short table on standard output; numbers with four significant digits."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=TABLE_WIDTH).print(table)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _rounded(value: Any) -> Any:
    """Floats with six significant digits: a clock has no more."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
