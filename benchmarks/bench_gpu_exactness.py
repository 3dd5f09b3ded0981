"""Same bits at full size on a GPU: what is certified, what is equal, and what exactness costs.

    python -m benchmarks.bench_gpu_exactness --shapes sd3.5-medium,qwen-image-6

For each shape (random weights, public configuration, bf16): the certificate; samples alone against samples in a group,
step by step; replay with autograd against the rollout; the transformer's forward in exact mode against the same forward
with the libraries left alone and against diffusers' own, and both against the matmul ceiling measured in the same run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.full_size import SHAPES
from diffusion_rl.batch import Conditioning, DenoiseBatch
from diffusion_rl.models import ModelFamily
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.replay import replay_step
from diffusion_rl.sample import RolloutSample
from rl_kernels.mode import LIBRARY

KINDS = ("sde", "cps", "dance", "ode")
LIMIT = (
    "Exact mode runs the same library kernels with split-K switched off and attention pinned to cuDNN: its limit is "
    "the non-exact forward. The forward's own limit is the matmul ceiling of the same run."
)


def main(argv: list[str] | None = None) -> int:
    parser = measure.command_line("gpu_exactness", __doc__ or "", repeats=5)
    parser.add_argument("--shapes", default="sd3.5-medium", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--size", type=int, default=512, help="pixels a side")
    parser.add_argument("--groups", type=measure.integers, default=[1, 4, 24], help="samples of the timed forwards")
    parser.add_argument("--commit", help="what is measured, where the checkout can't say it itself")
    arguments = parser.parse_args(argv)
    report = measure.Report(
        "gpu_exactness",
        "Are bits independent of the batch at full size, and what does it cost?",
        measure.settings_of(arguments),
        limit=LIMIT,
    )
    report.commit = arguments.commit or report.commit
    ceiling = matmul_ceiling()
    report.results.append({"case": "matmul ceiling, bf16 8192^3", "tflops": ceiling})
    exact = True
    for shape in arguments.shapes.split(","):
        family = SHAPES[shape]("cuda")
        began = time.perf_counter()
        engine = RolloutEngine(family)
        about = engine.exactness.describe()
        report.results.append({"case": f"{shape}: certificate", "seconds": time.perf_counter() - began, **about})
        print(shape, "certified:", about["certified"], about["refused"], flush=True)
        rows = [equality(family, kind, arguments.size) for kind in KINDS]
        report.results += [{"case": f"{shape}: equality, {kind}", **row} for kind, row in zip(KINDS, rows, strict=True)]
        exact &= all(row["differing_elements"] == 0 for row in rows)
        for group in arguments.groups:
            report.results.append({"case": f"{shape}: forward", **cost(family, group, arguments, ceiling)})
            print(report.results[-1], flush=True)
        report.write(arguments.out)
        del family, engine
        torch.cuda.empty_cache()
    return 0 if exact else 1


def matmul_ceiling() -> float:
    """TFLOP/s of a square bf16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    series = measure.alternate({"mm": lambda: torch.mm(a, b)}, 10, warmups=3)["mm"]
    return 2 * 8192**3 / series.median / 1e12


def equality(family: ModelFamily, kind: str, size: int) -> dict[str, Any]:
    """Differing elements between a group of 5 beside another prompt, and its samples alone; and replay's ratios."""
    group = roll_out(family, kind, size, seeds=(0, 1, 2, 3, 4), neighbours=3)
    differing = compared = 0
    for index in (0, 2, 4):
        alone = roll_out(family, kind, size, seeds=(index,))[0]
        for ours, theirs in zip(tensors(group[index]), tensors(alone), strict=True):
            differing += int((ours != theirs).sum())
            compared += ours.numel()
    row: dict[str, Any] = {"compared_elements": compared, "differing_elements": differing}
    if kind != "ode":
        family.transformer.requires_grad_(True)
        step = 1
        old = torch.stack([s.rollout_log_probs[step] for s in group[:2] if s.rollout_log_probs is not None])
        scored = replay_step(family, group[:2], step).log_probs
        family.transformer.requires_grad_(False)
        ratios = torch.exp(scored.detach().cpu() - old)
        row["replay_ratios"] = [float(r) for r in ratios]
        row["differing_elements"] += int((ratios != 1).sum())
    print(kind, row, flush=True)
    return row


def roll_out(
    family: ModelFamily, kind: str, size: int, *, seeds: tuple[int, ...], neighbours: int = 0
) -> list[RolloutSample]:
    """A guided group of 4 steps, with samples of another prompt in the same batches if asked for."""
    engine = RolloutEngine(family)
    request = partial(
        RolloutParams,
        height=size,
        width=size,
        num_inference_steps=4,
        rollout_sde_type=kind,
        guidance_scale=4.5,
        true_cfg_scale=4.0,
        negative_prompt="blurry",
        rollout_return_dit_trajectory=True,
        rollout_return_denoising_env=True,
    )
    if neighbours:
        engine.add_request("neighbours", request("a much longer prompt", seed=99, num_outputs_per_prompt=neighbours))
    engine.add_request("group", request("short", seeds=seeds, num_outputs_per_prompt=len(seeds)))
    results: dict[str, list[RolloutSample]] = {}
    while engine.has_unfinished_requests():
        for finished in engine.step():
            if finished.error is not None:
                raise finished.error
            results[finished.request_id] = finished.result or []
    return results["group"]


def tensors(sample: RolloutSample) -> list[torch.Tensor]:
    """All that must not depend on the batch: picture, states, log-probs, model outputs."""
    assert sample.generated_output is not None
    assert sample.dit_trajectory is not None
    assert sample.rollout_log_probs is not None
    assert sample.rollout_debug_tensors is not None
    debug = sample.rollout_debug_tensors
    return [
        sample.generated_output,
        sample.dit_trajectory.latents,
        sample.rollout_log_probs,
        debug.rollout_model_outputs,
    ]


@torch.no_grad()
def cost(family: ModelFamily, group: int, arguments: Any, ceiling: float) -> dict[str, Any]:
    """The guided forward of `group` samples: exact; the same kernels with the libraries left alone, which is the
    fastest that isn't exact; and the stock blocks with the libraries left alone, as eager diffusers runs."""
    shape = family.latent_shape(arguments.size, arguments.size)
    positive, negative = (family.encode_prompt(p, 512) for p in ("short", "blurry"))
    batch = DenoiseBatch(
        torch.randn(group, *shape, device="cuda").to(family.dtype),
        torch.linspace(900, 100, group, device="cuda"),
        tuple(Conditioning(positive, negative, 4.5) for _ in range(group)),
        arguments.size,
        arguments.size,
    )
    exact_choices = family.choices

    def forward(choices: Any) -> None:
        family.choices = choices
        try:
            family.predict(batch)
        finally:
            family.choices = exact_choices

    arms = {
        "exact": partial(forward, exact_choices),
        "library": partial(forward, replace(LIBRARY, fused=exact_choices.fused)),
        "stock": partial(forward, LIBRARY),
    }
    series = measure.alternate(arms, arguments.repeats, warmups=2)
    with FlopCounterMode(display=False) as counter:
        family.predict(batch)
    flops = counter.get_total_flops()
    return {
        "samples": group,
        "rows": 2 * group,
        "exact_ms": series["exact"].median * 1e3,
        "library_ms": series["library"].median * 1e3,
        "stock_ms": series["stock"].median * 1e3,
        "fused": exact_choices.fused,
        "exact_over_library": measure.ratio(series["exact"], series["library"]),
        "exact_over_stock": measure.ratio(series["exact"], series["stock"]),
        "tflop": flops / 1e12,
        "exact_tflops": flops / series["exact"].median / 1e12,
        "fraction_of_ceiling": flops / series["exact"].median / 1e12 / ceiling,
    }


if __name__ == "__main__":
    sys.exit(main())
