"""How fast does memory go and come back, as a fraction of what a copy of as many bytes takes?

    python -m benchmarks.bench_memory_saver --gib 8

Tensors of `--gib` GiB in all are released and resumed in turn, with and without a backup, by every mechanism that works
on the device. Beside it in the same run: on a GPU, copies of as many bytes from and to pinned memory; on a CPU, a copy
in memory, the first touch of as many fresh pages, a write to an unlinked file, and a read of it into fresh pages.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Report, Series, alternate, command_line, print_table, seconds_of, settings_of
from engine_control.errors import InvalidRequestError
from engine_control.memory.base import mechanisms
from engine_control.memory.saver import MemorySaver

TAG = "weights"
LIMIT = (
    "With a backup every byte crosses once each way: on a GPU the link, with pinned copies as the limit (fraction 1), "
    "on a CPU into a file and out of it, so its own write, and a read of it into fresh pages. Without a backup nothing "
    "moves, and no time but the driver's (or the kernel's) is needed; a CPU's pages come when they are touched."
)
LIMITS: Mapping[str, tuple[str, str]] = {
    "cuda": ("device to host", "host to device"),
    "cpu": ("write", "read into fresh pages"),
}


@dataclass
class Arm:
    """One mechanism, with or without a backup: its saver, and the seconds of each half of a cycle."""

    saver: MemorySaver
    held: Mapping[str, torch.Tensor]
    backup: bool
    release: list[float] = field(default_factory=list)
    resume: list[float] = field(default_factory=list)
    freed: int = 0

    def cycle(self) -> None:
        self.release.append(seconds_of(self._release))
        self.resume.append(seconds_of(lambda: self.saver.resume([TAG])))
        if not self.backup:  # as a trainer does, which sends new weights; or there would be nothing to release
            for tensor in self.held.values():
                tensor.fill_(1)

    def _release(self) -> None:
        self.freed = self.saver.release([TAG], backup=self.backup).bytes_freed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    device = torch.device(arguments.device)
    size = int(arguments.gib * 2**30) // arguments.tensors * arguments.tensors
    question = (__doc__ or "").splitlines()[0]
    report = Report("memory_saver", question, settings_of(arguments) | {"bytes": size}, limit=LIMIT)
    arms = _arms(device, size, arguments.tensors)
    with _baselines(device, size) as baselines:
        cycles: dict[str, Callable[[], object]] = {name: arm.cycle for name, arm in arms.items()}
        series = alternate({**baselines, **cycles}, arguments.repeats)
    for name in baselines:
        _add(report, series[name], size)
    limits = dict(zip(("release", "resume"), LIMITS[device.type], strict=True))
    for name, arm in arms.items():
        for half, limit in limits.items():
            timed = Series(f"{name}, {half}", getattr(arm, half)[-arguments.repeats :])
            _add(report, timed, size, bytes_freed=arm.freed)
            if arm.backup:
                report.ratios[f"{timed.name}: fraction of {limit}"] = series[limit].median / timed.median
            else:
                report.ratios[f"{timed.name}: seconds over {limit}"] = timed.median / series[limit].median
        report.ratios[f"{name}: bytes freed over bytes held"] = arm.freed / size
    report.write(arguments.out)
    columns = ("name", "median_s", "min_s", "gb_s")
    print_table(f"{size / 1e9:.3g} GB on {device}", columns, [[row[key] for key in columns] for row in report.results])
    print_table("Ratios", ("what", "ratio"), list(report.ratios.items()))
    for arm in arms.values():
        arm.saver.close()
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("memory_saver", __doc__ or "", repeats=7)
    parser.add_argument("--gib", type=float, default=0.5, help="GiB under the tag; a CPU needs twice that")
    parser.add_argument("--tensors", type=int, default=32, help="tensors under the tag, of equal size")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return parser.parse_args(argv)


def _arms(device: torch.device, size: int, tensors: int) -> dict[str, Arm]:
    """Every mechanism that works here, with and without a backup; each mechanism holds `size` bytes."""
    arms: dict[str, Arm] = {}
    for name in mechanisms.names():
        try:
            mechanism = mechanisms.get(name)(device)
        except InvalidRequestError as refusal:
            print(f"{name}: not here: {refusal}")
            continue
        with mechanism.region(TAG):
            held = {
                str(i): torch.full((size // tensors,), i % 256, dtype=torch.uint8, device=device)
                for i in range(tensors)
            }
        saver = MemorySaver(mechanism, pinned=True)
        saver.hold(TAG, partial(dict, held), discardable=lambda _: True)
        arms[f"{name}, backup"] = Arm(saver, held, backup=True)
        arms[f"{name}, no backup"] = Arm(saver, held, backup=False)
    return arms


def _add(report: Report, series: Series, size: int, **extra: Any) -> None:
    report.results.append(series.row(gb_s=size / series.median / 1e9, **extra))


@contextmanager
def _baselines(device: torch.device, size: int) -> Iterator[Mapping[str, Callable[[], object]]]:
    """What a copy of as many bytes takes, by name."""
    there = torch.ones(size, dtype=torch.uint8, device=device)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    if device.type == "cuda":
        yield {
            "device to host": partial(here.copy_, there, non_blocking=True),
            "host to device": partial(there.copy_, here, non_blocking=True),
        }
        return
    with tempfile.TemporaryFile(buffering=0) as file:
        data = memoryview(there.numpy())

        def write() -> None:
            file.truncate(0)  # as the saver's file, which takes no room while nothing is in it
            done = 0
            while done < size:
                done += os.pwrite(file.fileno(), data[done : done + 2**30], done)

        def read() -> None:
            fresh = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            done = 0
            while done < size:
                done += os.preadv(file.fileno(), [fresh[done : done + 2**30]], done)

        write()
        yield {
            "copy in memory": partial(here.copy_, there),
            "first touch": partial(torch.ones, size, dtype=torch.uint8),
            "write": write,
            "read into fresh pages": read,
        }


if __name__ == "__main__":
    raise SystemExit(main())
