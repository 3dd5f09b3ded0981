"""A rank of a full-size shape: `python -m benchmarks.full_size_follower DESCRIPTOR`, started by rank 0."""

from __future__ import annotations

from benchmarks.full_size import load
from diffusion_rl.rollout.follower import main

if __name__ == "__main__":
    main(load)
