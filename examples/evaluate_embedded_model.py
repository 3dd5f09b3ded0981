"""How often does a model draw what its caption says? Rolls out all held-out captions and reads the pictures.

    python examples/evaluate_embedded_model.py --out examples/embedded_model/accuracy.json

Each row is a way of sampling; `correct` is the share of pictures in which the rule-based checker finds every attribute
of the caption. The first row is what the base model is measured by: 10 ODE steps with guidance.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from diffusion_rl import RolloutPipeline
from diffusion_rl.shapes import check, held_out_captions

ATTRIBUTES = ("correct", "score", "count", "size", "colour", "shape", "position", "background")
WAYS = {
    "ode, guidance 3.0": {"rollout": False},
    "ode, guidance 4.5": {"rollout": False, "guidance_scale": 4.5},
    "sde, noise level 0.7": {"rollout_sde_type": "sde", "rollout_debug_mode": False},
    "cps, noise level 0.7": {"rollout_sde_type": "cps", "rollout_debug_mode": False},
}


def evaluate(pipeline: RolloutPipeline, fields: dict, seed: int) -> dict:
    """Shares of the captions' attributes that the checker finds, and samples per second."""
    captions = held_out_captions()
    began = time.perf_counter()
    samples = pipeline(captions, seed=seed, **fields)
    seconds = time.perf_counter() - began
    found: Counter[str] = Counter()
    for sample in samples:
        verdict = check(sample.generated_output, sample.prompt)
        found.update({name: float(getattr(verdict, name)) for name in ATTRIBUTES})
    shares = {name: round(count / len(samples), 4) for name, count in found.items()}
    return {"seed": seed, "captions": len(captions), **shares, "samples_per_s": round(len(samples) / seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1000])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pipeline = RolloutPipeline.from_pretrained(arguments.model)
    rows = []
    for way, fields in WAYS.items():
        for seed in arguments.seeds:
            rows.append({"sampling": way, **evaluate(pipeline, fields, seed)})
            row = rows[-1]
            print(f"{way:24} seed {seed:5}: {row['correct']:.3f} right, {row['samples_per_s']} samples/s", flush=True)
    if arguments.out is not None:
        report = {"model": arguments.model, "steps": 10, "torch": torch.__version__, "results": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
