"""Which runner serves an engine's forwards: CUDA graphs where they give the eager forward's bits, else eager calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from diffusion_rl.models import ModelFamily
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.models.offload import offload_of
from diffusion_rl.models.runner import eager
from diffusion_rl.rollout.certification import SAMPLES, part_of, probe_batches
from rl_kernels.certify import Exactness, Verdict

RUNS = 3  # of a probed shape: eager, captured, replayed


def choose_runner(family: ModelFamily, exactness: Exactness, *, cuda_graphs: bool) -> Exactness:
    """Sets the family's runner for the choices that it computes by now, and adds what was found to the table.

    Without exact mode graphs are taken unprobed: they hold the same kernels, and nothing was promised. A transformer
    whose blocks are offloaded gets none: a graph can't wait for a copy that depends on what ran before.
    """
    cuda_graphs = cuda_graphs and all(offload_of(module) is None for module in family.transformers.values())
    if not cuda_graphs or family.device.type != "cuda":
        family.runner = eager
        return exactness
    if not exactness.enabled or exactness.certificate is None:
        family.runner = CudaGraphs()
        return exactness
    verdict = _graphs_equal_eager(family)
    family.runner = CudaGraphs() if verdict.implementation == "CUDA graph" else eager
    certificate = exactness.certificate
    return replace(exactness, certificate=replace(certificate, verdicts=(*certificate.verdicts, verdict)))


@torch.no_grad()
def _graphs_equal_eager(family: ModelFamily) -> Verdict:
    """Whether guided forwards of several samples and of one have the eager bits when they are captured and replayed."""
    name, tried = f"launches of {type(family.transformer).__name__}", ("CUDA graph", "eager")
    for whole, count in product(probe_batches(family), (SAMPLES, 1)):
        batch = part_of(whole, 0, count)
        family.runner = eager
        expected = family.predict(batch)
        family.runner = graphs = CudaGraphs()
        for _ in range(RUNS):
            if not torch.equal(family.predict(batch), expected):
                return Verdict(name, "eager", tried, f"CUDA graph: {count} samples")
        if graphs.replayed == 0:
            return Verdict(name, "eager", tried, "CUDA graph: the forward can't be captured")
    return Verdict(name, "CUDA graph", tried)
