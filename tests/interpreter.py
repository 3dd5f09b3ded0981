"""Test files run again in Triton's interpreter, which a process has from its start or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = "only 0-dimensional arrays can be converted to Python scalars"


def passed_in_interpreter(target: str) -> int:
    """How many tests of `target` (a file, or one test of it) pass there; it is a failure if any fails. Triton up to 3.6
    has loops that take numbers out of arrays as numpy no longer allows: with such a numpy the test is skipped."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", target]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0 and BROKEN in done.stdout:
        pytest.skip("Triton's interpreter doesn't run with this numpy")
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0
