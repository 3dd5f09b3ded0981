"""How many samples a second does the embedded model give, and what fraction of the machine is that?

Groups of several sizes with guidance, text and pictures included, each time a prompt that no cache knows; the time is
broken down into text, denoising and pictures. The ceiling is a large fp32 matrix product, timed in turn with the
rollouts; the model's operations are counted, not estimated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bench_exactness_cost import transformer_inputs
from benchmarks.measure import (
    PromptSupply,
    Report,
    alternate,
    command_line,
    integers,
    print_table,
    settings_of,
)
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import Timings

SEED = 42
MATMUL = "matmul"
LIMIT = (
    "The machine's matrix product is the ceiling for the transformer and the VAE: `denoise_fraction` and "
    "`decode_fraction` are what share of it their counted operations reach. Small matrices (width 128), memory traffic "
    "of the elementwise operations between them and the calls themselves take the rest; the fraction grows with the "
    "group until the activations leave the caches."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _arguments(argv)
    pipeline = RolloutPipeline.from_pretrained(arguments.model)
    report = Report("rollout", __doc__.strip().splitlines()[0], settings_of(arguments), limit=LIMIT)
    timings: dict[int, list[Timings]] = {group: [] for group in arguments.groups}
    supply = PromptSupply()
    arms: dict[str, Callable[[], object]] = {
        f"group {group}": _rollout(pipeline, arguments.steps, group, supply, timings[group])
        for group in arguments.groups
    }
    size = arguments.matmul_size
    matrix = torch.randn(size, size, device=pipeline.engine.family.device)
    series = alternate({**arms, MATMUL: lambda: torch.mm(matrix, matrix)}, arguments.repeats)
    ceiling = 2 * size**3 / series[MATMUL].minimum
    flops = counted_flops(pipeline)
    report.results.append(series[MATMUL].row(size=size, flop_per_s=ceiling))
    report.results.append({"name": "counted_flop", **flops})
    table = []
    for group in arguments.groups:
        one = series[f"group {group}"]
        parts = _breakdown(timings[group][-arguments.repeats :])
        denoise = flops["guided_evaluation"] * arguments.steps * group / parts["denoise_s"] / ceiling
        decode = flops["picture"] * group / parts["decode_s"] / ceiling
        rate = group / one.median
        fractions = {"denoise_fraction": denoise, "decode_fraction": decode}
        report.results.append(one.row(group=group, samples_per_s=rate, **parts, **fractions))
        report.ratios[f"denoise_fraction_of_ceiling_group_{group}"] = denoise
        table.append([group, one.median, rate, *parts.values(), denoise, decode])
    report.write(arguments.out)
    columns = ["group", "median s", "samples/s", "encode s", "denoise s", "decode s", "denoise / ceiling"]
    print_table(f"Rollout; ceiling {ceiling / 1e9:.0f} GFLOP/s", [*columns, "decode / ceiling"], table)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("rollout", __doc__ or "", repeats=9)
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--groups", type=integers, default=[1, 4, 8, 16, 32], help="samples of a request")
    parser.add_argument("--matmul-size", type=int, default=1024, help="side of the ceiling's square matrices")
    return parser.parse_args(argv)


def _rollout(
    pipeline: RolloutPipeline, steps: int, group: int, supply: PromptSupply, timings: list[Timings]
) -> Callable[[], None]:
    def work() -> None:
        (prompt,) = supply.take(1)
        samples = pipeline(
            prompt,
            seed=SEED,
            num_outputs_per_prompt=group,
            num_inference_steps=steps,
            rollout_return_dit_trajectory=True,
            rollout_debug_mode=False,
        )
        timings.append(samples[0].timings)

    return work


def _breakdown(timings: Sequence[Timings]) -> dict[str, float]:
    plain = [asdict(one) for one in timings]
    return {part: statistics.median(one[part] for one in plain) for part in ("encode_s", "denoise_s", "decode_s")}


@torch.no_grad()
def counted_flops(pipeline: RolloutPipeline) -> dict[str, int]:
    """Operations (a multiply-add is two) of one guided sample-step, and of one picture."""
    family = pipeline.engine.family
    inputs = transformer_inputs(pipeline, 2)
    latent = inputs["hidden_states"][0]
    return {
        "guided_evaluation": _count(lambda: pipeline.transformer(**inputs)),
        "picture": _count(lambda: family.decode(latent[None], family.defaults.height, family.defaults.width)),
    }


def _count(work: Callable[[], object]) -> int:
    # torch knows the operations of attention on GPUs; the CPU's own attention operator has to be told
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={attention: _attention_flops}) as counter:
        work()
    return int(counter.get_total_flops())


def _attention_flops(query: Sequence[int], key: Sequence[int], *others: Any, **options: Any) -> int:
    """Two products of queries with keys and of weights with values, given the shapes `[B, heads, tokens, D]`."""
    batch, heads, tokens, width = query
    return 2 * 2 * batch * heads * tokens * key[2] * width


if __name__ == "__main__":
    raise SystemExit(main())
