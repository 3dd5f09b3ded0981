"""What do several ranks cost and gain on a CPU, and do they leave every bit alone?

One process with all cores against ranks that share those cores: the tokens of each forward over N ranks (`spN`), the
two halves of guidance over two (`cfg2`), or both (`sp2cfg2`). For the embedded model and a wider random one: seconds
of a group in the same run, differing elements (which must be none), and tokens and bytes of each rank.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel

from benchmarks.bench_gpu_ranks import parallel_of
from benchmarks.measure import (
    PromptSupply,
    Report,
    alternate,
    command_line,
    paired_ratios,
    print_table,
    ratio,
    settings_of,
)
from benchmarks.ranked_engine import RankedEngine
from diffusion_rl.config import EngineConfig
from diffusion_rl.models.loading import EMBEDDED, load_pipeline

ALONE = "sp1"
HEADS = 8
SEED = 42
CASES = ("model", "wide")
COLUMNS = ("name", "threads_per_rank", "median_s", "one_process_over_this", "differing_elements")
LIMIT = (
    "On one CPU the limit is 1: ranks do the work of one process on the same cores, and more, for each runs the parts "
    "around the blocks and Python's share of every forward by itself, and waits for the others. A ratio above 1 shows "
    "how much one process loses between its threads. Ranks gain where each brings a device: there 1/N of the tokens "
    "(in `ranks`) is the limit."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if an element differs, or the model isn't certified."""
    arguments = _arguments(argv)
    report = Report("ranks", __doc__.strip().splitlines()[0], settings_of(arguments), limit=LIMIT)
    table: list[list[object]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            model = arguments.model if case == "model" else _wide_model(arguments, Path(folder))
            size = arguments.size if case == "wide" else None
            rows, wrong = _measure(case, model, size, arguments)
            problems += wrong
            report.results += rows
            for row in rows:
                report.ratios[f"{case}: one process over {row['layout']}"] = row["one_process_over_this"]
                table.append([row[key] for key in COLUMNS] + list(row["ranks"][0].values()))
    report.write(arguments.out)
    headings = ["case", "threads", "group s", "one process / this", "differing", "tokens of rank 0", "its bytes"]
    print_table("Ranks on one CPU", headings, table)
    for problem in problems:
        print(f"WRONG: {problem}")
    return 1 if problems else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("ranks", __doc__ or "", repeats=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="`model` is the one of --model")
    parser.add_argument("--layouts", default="sp2,cfg2", help="such as sp2,sp4,cfg2,sp2cfg2")
    parser.add_argument("--group", type=int, default=4, help="samples of the group")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps")
    parser.add_argument("--width", type=int, default=512, help="of the wide model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the wide model")
    parser.add_argument("--size", type=int, default=256, help="pixels of the wide model's pictures")
    return parser.parse_args(argv)


def _measure(
    case: str, model: str, size: int | None, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row a layout, the process alone first, and what is wrong."""
    (prompt,) = PromptSupply().take(1)
    fields: dict[str, Any] = {"prompt": prompt, "seed": SEED, "output_type": "latent", "height": size, "width": size}
    fields |= {"num_outputs_per_prompt": arguments.group, "num_inference_steps": arguments.steps}
    fields |= {"guidance_scale": 4.5, "rollout_debug_mode": False}
    layouts = (ALONE, *arguments.layouts.split(","))
    engines: dict[str, RankedEngine] = {}
    try:
        for layout in layouts:
            parallel = parallel_of(layout, share_device=False)
            engines[layout] = RankedEngine(EngineConfig(model, device="cpu", parallel=parallel))
        exact = {layout: engine.wait_ready()["enabled"] for layout, engine in engines.items()}
        kept = {**fields, "rollout_return_dit_trajectory": True}
        found = {layout: engine.results(**kept) for layout, engine in engines.items()}
        work = {layout: engine.work(**fields) for layout, engine in engines.items()}
        arms = {layout: partial(engine.roll_out, **fields) for layout, engine in engines.items()}
        series = alternate(arms, arguments.repeats)
    finally:
        for engine in engines.values():
            engine.close()
    rows, problems = [], []
    for layout in layouts:
        pairs = list(zip(found[ALONE], found[layout], strict=True))
        differing = sum(int((a != b).sum()) for a, b in pairs)
        row = series[layout].row(
            layout=layout,
            exact=exact[layout],
            threads_per_rank=engines[layout].threads,
            ranks=[vars(one) for one in work[layout]],
            compared_elements=sum(b.numel() for _, b in pairs),
            differing_elements=differing,
            one_process_over_this=ratio(series[ALONE], series[layout]),
            paired=paired_ratios(series[ALONE], series[layout]),
        )
        rows.append({**row, "name": f"{case}: {layout}"})
        problems += [f"{case}, {layout}: {differing} elements differ"] if differing else []
        problems += [] if exact[layout] else [f"{case}, {layout}: not certified"]
    return rows, problems


def _wide_model(arguments: argparse.Namespace, folder: Path) -> str:
    """The embedded pipeline around a wider transformer of random weights, as a diffusers folder."""
    pipeline, _ = load_pipeline(EMBEDDED)
    own = pipeline.transformer.config
    torch.manual_seed(0)
    side = arguments.size // pipeline.vae_scale_factor
    transformer = SD3Transformer2DModel(
        sample_size=side,
        patch_size=own.patch_size,
        in_channels=own.in_channels,
        out_channels=own.out_channels,
        num_layers=arguments.layers,
        attention_head_dim=arguments.width // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=own.joint_attention_dim,
        caption_projection_dim=arguments.width,
        pooled_projection_dim=own.pooled_projection_dim,
        pos_embed_max_size=side // own.patch_size,
        qk_norm="rms_norm",
    )
    for parameter in transformer.parameters():  # zero-initialised layers would leave nothing to compare
        if parameter.abs().sum() == 0:
            torch.nn.init.normal_(parameter, std=0.02)
    pipeline.register_modules(transformer=transformer.eval())
    pipeline.save_pretrained(folder / "wide")
    return str(folder / "wide")


if __name__ == "__main__":
    raise SystemExit(main())
