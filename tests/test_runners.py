"""Which runner serves a family's forwards, where there is no GPU to capture anything on."""

from __future__ import annotations

import torch
from tiny_models import sd3_pipeline

from diffusion_rl.models import family_for
from diffusion_rl.models.runner import eager
from diffusion_rl.rollout.certification import probe_batch
from diffusion_rl.rollout.engine import RolloutEngine
from rl_kernels import AttentionPlan


def test_without_a_gpu_every_forward_is_eager_and_nothing_is_promised_of_graphs() -> None:
    engine = RolloutEngine(family_for(sd3_pipeline()))
    assert engine.family.runner is eager
    assert not any("launches" in verdict.operation for verdict in engine.exactness.certificate.verdicts)  # type: ignore[union-attr]


def test_a_familys_runner_serves_its_own_transformer_without_gradients_alone() -> None:
    family, called = family_for(sd3_pipeline()), []

    def counting(transformer: torch.nn.Module, plan: AttentionPlan, inputs: dict[str, object]) -> torch.Tensor:
        called.append(len(plan.text_lengths))
        return eager(transformer, plan, inputs)

    family.runner = counting
    batch = probe_batch(family)
    with torch.no_grad():
        family.predict(batch)
        assert called == [2 * len(batch.latents)]
        family.predict(batch, family.transformer)
    family.predict(batch)
    assert len(called) == 1
