"""Which runner serves an engine's forwards: CUDA graphs where they give the eager forward's bits, else eager calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from diffusion_rl.models import ModelFamily
from diffusion_rl.models.graphs import MAX_TOKENS, CudaGraphs
from diffusion_rl.models.offload import offload_of
from diffusion_rl.models.runner import eager
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.rollout.certification import SAMPLES, part_of, probe_batches
from engine_control.groups import RankGroup
from rl_kernels.certify import Exactness, Verdict

RUNS = 3  # of a probed shape: eager, captured, replayed


def choose_runner(
    family: ModelFamily, exactness: Exactness, *, cuda_graphs: bool, arrangement: Arrangement | None = None
) -> Exactness:
    """Sets the family's runner for the choices that it computes by now, and adds what was found to the table. Of an
    arrangement whose ranks share each forward every rank calls it at the same time; another one is not looked at.

    Without exact mode graphs are taken unprobed: they hold the same kernels, and nothing was promised. A transformer
    whose blocks are offloaded gets none: a graph can't wait for a copy that depends on what ran before.
    """
    arrangement = arrangement if arrangement is not None and arrangement.splits_forward else Arrangement()
    cuda_graphs = cuda_graphs and arrangement.capturable
    cuda_graphs = cuda_graphs and all(offload_of(module) is None for module in family.transformers.values())
    if not cuda_graphs or family.device.type != "cuda":
        family.runner = eager
        return exactness
    if not exactness.enabled or exactness.certificate is None:
        family.runner = _graphs(arrangement)
        return exactness
    verdict = _graphs_equal_eager(family, arrangement)
    family.runner = _graphs(arrangement) if verdict.implementation == "CUDA graph" else eager
    certificate = exactness.certificate
    return replace(exactness, certificate=replace(certificate, verdicts=(*certificate.verdicts, verdict)))


def _graphs(arrangement: Arrangement) -> CudaGraphs:
    """For forwards of which each rank has its share of the tokens."""
    return CudaGraphs(max_tokens=MAX_TOKENS * arrangement.sharing, group=_sharers(arrangement))


def _sharers(arrangement: Arrangement) -> RankGroup | None:
    return None if arrangement.sequence is None else arrangement.sequence.exchange.group


@torch.no_grad()
def _graphs_equal_eager(family: ModelFamily, arrangement: Arrangement) -> Verdict:
    """Whether guided forwards of several samples and of one have the eager bits when they are captured and replayed.

    All of them are computed, whatever is found: other ranks may wait for this one.
    """
    ranks = f", {arrangement.sharing} ranks" if arrangement.sharing > 1 else ""
    name, tried = f"launches of {type(family.transformer).__name__}{ranks}", ("CUDA graph", "eager")
    failures = []
    for whole, count in product(probe_batches(family), (SAMPLES, 1)):
        batch = part_of(whole, 0, count)
        family.runner = eager
        expected = family.predict(batch, arrangement=arrangement)
        family.runner = graphs = _graphs(arrangement)
        found = [family.predict(batch, arrangement=arrangement) for _ in range(RUNS)]
        if not all(torch.equal(velocity, expected) for velocity in found):
            failures.append(f"CUDA graph: {count} samples")
        elif graphs.replayed == 0:
            failures.append("CUDA graph: the forward can't be captured")
    group = _sharers(arrangement)
    if group is not None and not group.all_can(not failures, family.device):  # one alone would call more often
        failures.append("CUDA graph: another rank has no use of it")
    return Verdict(name, "eager", tried, failures[0]) if failures else Verdict(name, "CUDA graph", tried)
