"""Runs all benchmarks, one after the other, each in a process of its own: `python -m benchmarks.run_all`.

Needs a quiet machine and, on two cores, some twenty minutes. The processes get the thread settings that the service
gives its engine process (`OMP_NUM_THREADS` if it is set, else all cores; passive waiting).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NAMES = (
    "rollout",
    "step_batching",
    "prefix_sharing",
    "collecting",
    "exactness_cost",
    "encoding",
    "memory",
    "memory_saver",
    "refit",
    "ranks",
    "ratio_deviation",
    "llm",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; exits with 1 if one of them failed, after all have run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_all", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results", help="folder of the results")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    failed = [name for name in arguments.only if not _run(name, arguments.out.resolve())]
    print(f"{len(arguments.only)} benchmarks in {time.monotonic() - began:.0f} s; results in {arguments.out}")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, folder: Path) -> bool:
    print(f"\n== {name}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--out", str(folder / f"{name}.json")]
    done = subprocess.run(command, cwd=REPOSITORY, env=_environment())
    print(f"== {name}: {time.monotonic() - began:.0f} s, exit code {done.returncode}", flush=True)
    return done.returncode == 0


def _environment() -> dict[str, str]:
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "kernels")]
    from engine_control.config import engine_environment

    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**engine_environment(), **quiet, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


if __name__ == "__main__":
    raise SystemExit(main())
