"""What do row-invariant operations cost in the transformer's forward?

The same forward outside `exact_mode`, inside it, and inside a mode of the same kind that replaces nothing: the last
says how much of the cost is the interception of every torch call, and how much the other arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.measure import (
    Report,
    Series,
    alternate,
    command_line,
    integers,
    paired_ratios,
    print_table,
    ratio,
    settings_of,
)
from diffusion_rl.pipeline import RolloutPipeline
from rl_kernels import exact_mode

LIMIT = (
    "On a CPU the exact operations do the same multiplications, on inputs padded to a multiple of 16 rows: the limit "
    "is a ratio of 1. What is above it is the interception of each torch call in Python (a fixed time a call, so it "
    "vanishes in larger batches and models) and the padding of the few matrices with few rows."
)


class _Intercepting(TorchFunctionMode):
    """Intercepts every torch call, as exact mode does, and replaces none."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    pipeline = RolloutPipeline.from_pretrained(arguments.model)
    report = Report("exactness_cost", __doc__.strip().splitlines()[0], settings_of(arguments), limit=LIMIT)
    table = []
    for rows in arguments.rows:
        series = _measure(pipeline, rows, arguments.repeats)
        plain = series["plain"]
        for one in series.values():
            report.results.append(
                one.row(rows=rows, over_plain=ratio(one, plain), paired_over_plain=paired_ratios(one, plain))
            )
        cost = ratio(series["exact"], plain)
        python_share = (series["intercepting"].median - plain.median) / series["exact"].median
        report.ratios[f"exact_over_plain_rows_{rows}"] = cost
        report.ratios[f"interception_share_of_exact_rows_{rows}"] = python_share
        table.append([rows, *(1e3 * one.median for one in series.values()), cost, python_share])
    report.write(arguments.out)
    columns = ["rows", "plain ms", "intercepting ms", "exact ms", "exact / plain", "interception's share"]
    print_table("One transformer forward", columns, table)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("exactness_cost", __doc__ or "", repeats=100)
    parser.add_argument("--rows", type=integers, default=[2, 8, 32], help="rows of the transformer's batch")
    return parser.parse_args(argv)


@torch.no_grad()
def _measure(pipeline: RolloutPipeline, rows: int, repeats: int) -> dict[str, Series]:
    inputs = transformer_inputs(pipeline, rows)

    def plain() -> None:
        pipeline.transformer(**inputs)

    def intercepting() -> None:
        with _Intercepting():
            pipeline.transformer(**inputs)

    def exact() -> None:
        with exact_mode():
            pipeline.transformer(**inputs)

    return alternate({"plain": plain, "intercepting": intercepting, "exact": exact}, repeats, warmups=5)


def transformer_inputs(pipeline: RolloutPipeline, rows: int) -> dict[str, Any]:
    """Random latents at mid-schedule and a real prompt, for an SD3 transformer."""
    family = pipeline.engine.family
    defaults = family.defaults
    prompt = family.encode_prompt("one small red circle on the left, blue background", defaults.max_sequence_length)
    assert prompt.pooled is not None
    shape = (rows, *family.latent_shape(defaults.height, defaults.width))
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(shape, generator=generator).to(family.device, family.dtype),
        "timestep": torch.full((rows,), 500.0, device=family.device),
        "encoder_hidden_states": prompt.prompt_embeds.expand(rows, -1, -1).to(family.dtype).contiguous(),
        "pooled_projections": prompt.pooled.expand(rows, -1).to(family.dtype).contiguous(),
        "return_dict": False,
    }


if __name__ == "__main__":
    raise SystemExit(main())
