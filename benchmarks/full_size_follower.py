"""A rank of a full-size shape: rank 0 has its `main()` run in a process."""

from __future__ import annotations

from benchmarks.full_size import load
from diffusion_rl.rollout import follower


def main() -> None:
    follower.main(load)
