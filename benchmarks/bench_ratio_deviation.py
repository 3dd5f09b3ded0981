"""How far from 1 is an importance ratio at equal weights, in exact mode and out of it, and do ranks change a bit?

A ratio compares the log-prob of a rollout with that of a replay of it. At equal weights it should be 1, and what it is
off by is what the two sides compute differently. Samples of several prompts are rolled out and replayed at several
sizes of micro-batch; then rolled out again by several ranks, and compared with those of one process element by element.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.bench_gpu_ranks import parallel_of
from benchmarks.measure import PromptSupply, Report, command_line, integers, print_table, settings_of
from benchmarks.ranked_engine import RankedEngine
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import RolloutSample

SEED = 42
GUIDANCE = 4.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTION_LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]
SPLIT = "split"  # the layout of one process that computes guidance in two forwards
EXACT = "exact mode on both sides"
PROMISED = (EXACT, "exact mode on both sides, unmerged LoRA")
LIMIT = (
    "With exact mode on both sides, and over ranks, the limit is 0 and is promised. The other deviations have none: "
    "they are the rounding of a dtype, magnified by a step's small variance."
)

Rollout = Callable[..., list[RolloutSample]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if something differs that must not."""
    arguments = _arguments(argv)
    report = Report("ratio_deviation", (__doc__ or "").splitlines()[0], settings_of(arguments), limit=LIMIT)
    fields = _request(arguments)
    for dtype in arguments.dtypes:
        report.results += _replays(dtype, fields, arguments)
        report.results += _layouts(dtype, fields, arguments)
    for row in report.results:
        report.ratios[f"{row['name']}, {row['dtype']}"] = row.get("largest_deviation", row.get("differing_elements"))
    report.write(arguments.out)
    _print(report)
    wrong = [row for row in report.results if _is_wrong(row)]
    for row in wrong:
        print(f"WRONG: {row['name']}, {row['dtype']}: {row}")
    return 1 if wrong else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("ratio_deviation", __doc__ or "", repeats=1)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--prompts", type=int, default=3, help="prompts of a rollout")
    parser.add_argument("--group", type=int, default=4, help="samples a prompt")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps, all stochastic")
    parser.add_argument("--micro-batches", type=integers, default=[1, 5, 12], help="samples of a replayed forward")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--layouts", default="sp2,cfg2,split", help="such as sp8,sp2cfg2; `none` for none")
    return parser.parse_args(argv)


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt": PromptSupply().take(arguments.prompts),
        "num_outputs_per_prompt": arguments.group,
        "num_inference_steps": arguments.steps,
        "guidance_scale": GUIDANCE,
        "output_type": "latent",
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": True,
    }


def _replays(dtype: str, fields: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each pair of sides."""

    def loaded(*, lora: bool = False) -> tuple[Any, Path | None]:
        pipeline, folder = load_pipeline(arguments.model, DTYPES[dtype])
        if lora:
            _add_adapter(pipeline.transformer, arguments.lora_rank)
        return pipeline, folder

    def rollout_of(loaded: tuple[Any, Path | None], config: EngineConfig | None = None) -> RolloutPipeline:
        return RolloutPipeline(loaded[0], config=config, defaults_folder=loaded[1])

    exact, unmerged = rollout_of(loaded()), rollout_of(loaded(lora=True))
    library = rollout_of(loaded(), EngineConfig(deterministic="off"))
    merged = loaded(lora=True)[0].transformer.eval()
    merged.fuse_lora()
    certified = exact.engine.exactness.enabled and unmerged.engine.exactness.enabled
    sides: dict[str, tuple[Rollout, Callable[[list[RolloutSample]], torch.Tensor]]] = {
        EXACT: (exact, exact.replay),
        "exact mode and the plain library": (exact, library.replay),
        "the plain library on both sides": (library, library.replay),
        PROMISED[1]: (unmerged, unmerged.replay),
        "merged and unmerged LoRA, exact mode on both sides": (unmerged, partial(unmerged.replay, transformer=merged)),
    }
    return [
        {"name": name, "dtype": dtype, "certified": certified, **_deviation(rollout, replay, fields, arguments)}
        for name, (rollout, replay) in sides.items()
    ]


def _add_adapter(transformer: Any, rank: int) -> None:
    """An unmerged adapter on every attention's projections, in the transformer's dtype, whose weights aren't zero."""
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION_LAYERS))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.05).to(transformer.dtype)


@torch.no_grad()
def _deviation(
    rollout: Rollout,
    replay: Callable[[list[RolloutSample]], torch.Tensor],
    fields: dict[str, Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The largest |ratio - 1| over all samples, steps and sizes of micro-batch, and over the steps one by one."""
    off, compared, differing = torch.zeros(arguments.steps), 0, 0
    for repeat in range(arguments.repeats):
        samples = rollout(seed=SEED + 1000 * repeat, **fields)
        old = torch.stack([s.rollout_log_probs for s in samples if s.rollout_log_probs is not None])
        for size in arguments.micro_batches:
            parts = [replay(samples[start : start + size]) for start in range(0, len(samples), size)]
            ratios = torch.exp(torch.cat(parts) - old)
            off = torch.maximum(off, (ratios - 1).abs().amax(dim=0))
            compared += ratios.numel()
            differing += int((ratios != 1).sum())
    return {
        "compared_ratios": compared,
        "ratios_that_are_not_1": differing,
        "largest_deviation": float(off.max()),
        "largest_deviation_by_step": off.tolist(),
    }


def _layouts(dtype: str, fields: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each layout of ranks: elements of latents, states and log-probs that aren't those of one process."""
    layouts = [] if arguments.layouts == "none" else arguments.layouts.split(",")
    if not layouts:
        return []
    config = EngineConfig(arguments.model, dtype=str(DTYPES[dtype]).removeprefix("torch."), device="cpu")
    expected, _ = _by_ranks(config, fields)
    rows = []
    for layout in layouts:
        parallel = ParallelConfig(guidance="split") if layout == SPLIT else parallel_of(layout, share_device=False)
        found, exact = _by_ranks(replace(config, parallel=parallel), fields)
        rows.append(
            {
                "name": f"one process and {layout}",
                "dtype": dtype,
                "certified": exact,
                "compared_elements": sum(x.numel() for x in found),
                "differing_elements": sum(int((a != b).sum()) for a, b in zip(expected, found, strict=True)),
            }
        )
    return rows


def _by_ranks(config: EngineConfig, fields: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
    """Latents, log-probs and states of all samples, and whether the engine that made them is exact."""
    engine = RankedEngine(config)
    try:
        exact = bool(engine.wait_ready()["enabled"])
        return engine.results(seed=SEED, **fields), exact
    finally:
        engine.close()


def _is_wrong(row: dict[str, Any]) -> bool:
    off = row.get("differing_elements", 0) or (row["name"] in PROMISED and row["ratios_that_are_not_1"])
    return bool(off) or not row["certified"]


def _print(report: Report) -> None:
    tables = {
        "Importance ratios at equal weights": ("compared_ratios", "ratios_that_are_not_1", "largest_deviation"),
        "Rollouts over ranks": ("compared_elements", "differing_elements"),
    }
    for title, keys in tables.items():
        rows = [[row[key] for key in ("name", "dtype", *keys)] for row in report.results if keys[0] in row]
        if rows:
            print_table(title, ("between", "dtype", *(key.replace("_", " ") for key in keys)), rows)


if __name__ == "__main__":
    raise SystemExit(main())
