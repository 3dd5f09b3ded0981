"""A trainer's own loop, in `exact_training`, has the rollout's bits: whatever its micro-batches, wrappers and adapters.

The loop here is written as trainers write theirs: a module of their own, embeddings padded to the micro-batch's longest
with a mask, guidance in one forward of negative and positive rows, and a scheduler step with the log-prob.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import qwen_image_pipeline, rollout_pipeline, sd3_pipeline
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from diffusion_rl import RolloutPipeline
from diffusion_rl.models import ModelFamily, family_for
from diffusion_rl.rollout.certification import make_exact
from diffusion_rl.sample import RolloutSample
from diffusion_rl.schedulers.sde import SDESchedulerMixin
from diffusion_rl.trainer import certified_family, exact_training
from engine_control.errors import InvalidRequestError, NotExactError
from rl_kernels import exact_mode, exact_mode_is_on
from rl_kernels.settings import PROCESS_SETTINGS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "exactness.md"
STEPS = 3
FULL: dict[str, Any] = {
    "height": 32,
    "width": 32,
    "num_inference_steps": STEPS,
    "output_type": "latent",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}
GUIDED: dict[str, Any] = {"negative_prompt": "blurry", "true_cfg_scale": 3.7}
PROMPTS = ("a red ball, from above", "cat", "two blue boxes")
LORA = LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=["to_q", "to_k", "to_v", "to_out.0"])

builds = pytest.mark.parametrize("build", [sd3_pipeline, qwen_image_pipeline])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@cache
def rollout_of(build: Callable[..., Any], dtype: torch.dtype = torch.float32) -> RolloutPipeline:
    """One for all tests, which train copies of its transformer."""
    return rollout_pipeline(build(dtype))


@cache
def adapted_rollout_of(build: Callable[..., Any], dtype: torch.dtype, adapter: torch.dtype) -> RolloutPipeline:
    return rollout_pipeline(with_lora(build(dtype), dtype=adapter))


def rolled_out(pipeline: RolloutPipeline, count: int = 1, **fields: Any) -> list[RolloutSample]:
    return pipeline(PROMPTS, seed=5, num_outputs_per_prompt=count, **{**FULL, **GUIDED, **fields})


def old_log_probs(samples: Sequence[RolloutSample]) -> torch.Tensor:
    return torch.stack([s.rollout_log_probs for s in samples if s.rollout_log_probs is not None])


def final_states(samples: Sequence[RolloutSample]) -> torch.Tensor:
    return torch.stack([s.generated_latents for s in samples if s.generated_latents is not None])


def prompt_rows(samples: Sequence[RolloutSample]) -> list[Any]:
    """Conditioning of all rows of a guided forward: the negative ones first."""
    envs = [s.denoising_env for s in samples if s.denoising_env is not None]
    return [e.neg_cond_kwargs for e in envs] + [e.pos_cond_kwargs for e in envs]


def inputs(policy: Any, samples: Sequence[RolloutSample], step: int) -> dict[str, Any]:
    """Keyword arguments of diffusers' forward, as its pipelines make them, for a guided micro-batch."""
    trajectories = [s.dit_trajectory for s in samples if s.dit_trajectory is not None]
    latents = torch.stack([t.latents[step] for t in trajectories]).to(policy.dtype)
    timesteps = torch.stack([t.timesteps[step] for t in trajectories])
    rows = prompt_rows(samples)
    text = [r["encoder_hidden_states"] for r in rows]
    common = {
        "hidden_states": torch.cat([latents] * 2),
        "encoder_hidden_states": pad_sequence(text, batch_first=True),
        "return_dict": False,
    }
    if "pooled_projections" in rows[0]:
        pooled = torch.stack([r["pooled_projections"] for r in rows])
        return {**common, "timestep": torch.cat([timesteps] * 2), "pooled_projections": pooled}
    return {
        **common,
        "timestep": torch.cat([timesteps.to(policy.dtype) / 1000] * 2),
        "encoder_hidden_states_mask": pad_sequence([torch.ones(len(t)) for t in text], batch_first=True).long(),
        "img_shapes": [r["img_shapes"] for r in rows],
    }


def guided_velocity(policy: Any, samples: Sequence[RolloutSample], step: int, scale: float) -> torch.Tensor:
    """One forward of negative and positive rows, combined as FlowGRPO's loop and the Qwen-Image pipeline do it."""
    negative, positive = policy(**inputs(policy, samples, step))[0].chunk(2)
    combined = negative + scale * (positive - negative)
    if negative.dim() == 4:
        return combined
    return combined * (torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True))


def score(family: ModelFamily, policy: Any, samples: Sequence[RolloutSample], step: int) -> torch.Tensor:
    """A trainer's log-probs `[n]` of step `step`, with gradients."""
    scheduler: Any = family.scheduler(SDESchedulerMixin, None)
    first = samples[0].dit_trajectory
    assert first is not None
    scheduler.sigmas = first.sigmas  # the rollout's own: nobody derives them again
    velocity = guided_velocity(policy, samples, step, samples[0].guidance_scale)
    states = [s.dit_trajectory.latents for s in samples if s.dit_trajectory is not None]
    current, stored = (torch.stack([x[i] for x in states]) for i in (step, step + 1))
    stepped = scheduler.step_with_log_prob(
        velocity, step, current, noise_level=samples[0].noise_level, prev_sample=stored
    )
    log_probs: torch.Tensor = stepped.log_prob
    return log_probs


def score_all(family: ModelFamily, policy: Any, samples: Sequence[RolloutSample], size: int) -> torch.Tensor:
    """`[n, STEPS]`, in micro-batches of `size`."""
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    return torch.cat([torch.stack([score(family, policy, p, s) for s in range(STEPS)], dim=1) for p in parts])


def checkpointed(policy: Any, reentrant: bool) -> Any:
    policy.train()
    policy.enable_gradient_checkpointing(
        lambda module, *args: checkpoint(module.__call__, *args, use_reentrant=reentrant)
    )
    return policy


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    assert len(ours) > 10
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


@builds
@dtypes
def test_a_trainers_loop_has_the_rollouts_log_probs_in_any_micro_batch_and_order(
    build: Any, dtype: torch.dtype
) -> None:
    pipeline = rollout_of(build, dtype)
    samples = rolled_out(pipeline, count=2)
    order = [3, 0, 5, 2, 4, 1]
    shuffled, old = [samples[i] for i in order], old_log_probs(samples)[order]
    policy = copy.deepcopy(pipeline.transformer).train()
    for size in (1, 2, 3):
        with torch.no_grad(), exact_training(policy, pipeline.engine.family):
            new = score_all(pipeline.engine.family, policy, shuffled, size)
        assert torch.equal(new, old), size
        assert torch.equal(torch.exp(new - old), torch.ones_like(old))


def trained(pipeline: RolloutPipeline, samples: Sequence[RolloutSample], policy: Any, inside: bool) -> Any:
    """Gradients of the log-probs of step 1, after asserting that those are the rollout's."""
    with exact_training(policy, pipeline.engine.family):
        new = score(pipeline.engine.family, policy, samples, 1)
        assert torch.equal(new.detach(), old_log_probs(samples)[:, 1])
        if inside:
            new.sum().backward()
    if not inside:
        new.sum().backward()
    return gradients(policy)


@builds
@dtypes
def test_checkpointing_and_where_backward_runs_change_no_bit_of_log_probs_or_gradients(
    build: Any, dtype: torch.dtype
) -> None:
    pipeline = rollout_of(build, dtype)
    samples = rolled_out(pipeline)
    policies = [copy.deepcopy(pipeline.transformer).train() for _ in range(3)]
    plain = trained(pipeline, samples, policies[0], inside=True)
    for policy, inside in zip(policies[1:], (True, False), strict=True):
        assert_same(trained(pipeline, samples, checkpointed(policy, reentrant=False), inside), plain)


@builds
@dtypes
def test_re_entrant_checkpointing_differs_in_nothing_but_the_order_of_sums_in_backward(
    build: Any, dtype: torch.dtype
) -> None:
    pipeline = rollout_of(build, dtype)
    samples = rolled_out(pipeline)
    policies = [copy.deepcopy(pipeline.transformer).train() for _ in range(3)]
    plain = trained(pipeline, samples, policies[0], inside=True)
    for policy in policies[1:]:  # without an input that needs gradients such a checkpoint has none for the weights
        policy.register_forward_pre_hook(_inputs_need_gradients, with_kwargs=True)
    inside, after = (
        trained(pipeline, samples, checkpointed(policy, reentrant=True), inside)
        for policy, inside in zip(policies[1:], (True, False), strict=True)
    )
    assert_same(inside, after)
    for name, gradient in plain.items():
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        assert (gradient - inside[name]).norm() <= tolerance * gradient.norm(), name


def _inputs_need_gradients(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    needed = {k: kwargs[k].requires_grad_() for k in ("hidden_states", "encoder_hidden_states")}
    return args, {**kwargs, **needed}


@builds
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_has_the_bits_of_the_forward(build: Any, reentrant: bool) -> None:
    pipeline = rollout_of(build, torch.bfloat16)
    family, samples = pipeline.engine.family, rolled_out(pipeline)
    policy = checkpointed(copy.deepcopy(pipeline.transformer), reentrant)
    policy.register_forward_pre_hook(_inputs_need_gradients, with_kwargs=True)
    seen: list[list[torch.Tensor]] = []
    attention = policy.transformer_blocks[-1].attn
    attention.register_forward_hook(lambda module, args, out: seen.append([o.detach() for o in out if o is not None]))
    with exact_training(policy, family):
        new = score(family, policy, samples, 1)
    new.sum().backward()
    first, again = seen
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@builds
def test_blocks_that_the_rollout_runs_fused_run_fused_in_the_trainer(build: Any) -> None:
    pipeline = rollout_pipeline(build(torch.bfloat16))
    family, stock = pipeline.engine.family, rolled_out(pipeline)
    family.choices = replace(family.choices, fused=True)
    samples = rolled_out(pipeline)
    assert not torch.equal(final_states(samples), final_states(stock))
    policy = checkpointed(copy.deepcopy(pipeline.transformer), reentrant=False)
    with exact_training(policy, family):
        new = score_all(family, policy, samples, 2)
        new.sum().backward()
    assert torch.equal(new.detach(), old_log_probs(samples))


@builds
def test_an_optimizer_step_moves_the_ratio_away_from_one(build: Any) -> None:
    pipeline = rollout_of(build)
    family, samples = pipeline.engine.family, rolled_out(pipeline)
    policy = copy.deepcopy(pipeline.transformer).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    old = old_log_probs(samples)[:, 1]
    ratios = []
    for _ in range(2):
        with exact_training(policy, family):
            ratio = torch.exp(score(family, policy, samples, 1) - old)
            ratio.mean().backward()
        optimizer.step()
        ratios.append(ratio.detach())
    assert torch.equal(ratios[0], torch.ones(3))
    assert not (ratios[1] == 1).any()
    assert ratios[1].mean() < 1  # it was minimised


def test_without_the_context_the_same_loop_differs() -> None:
    pipeline = rollout_of(qwen_image_pipeline, torch.bfloat16)
    family, samples = pipeline.engine.family, rolled_out(pipeline)
    with torch.no_grad():
        plain = score_all(family, pipeline.transformer, samples, 3)
    assert not torch.equal(plain, old_log_probs(samples))
    torch.testing.assert_close(plain, old_log_probs(samples), atol=1e-2, rtol=1e-2)


def test_a_trainer_with_a_pipeline_of_its_own_needs_no_rollout_pipeline() -> None:
    samples = rolled_out(rollout_of(qwen_image_pipeline))
    own = copy.deepcopy(qwen_image_pipeline())
    family = certified_family(own)
    assert family.certificate is not None
    with torch.no_grad(), exact_training(own.transformer, family):
        assert torch.equal(score_all(family, own.transformer, samples, 2), old_log_probs(samples))


@pytest.fixture
def qwen() -> Iterator[tuple[RolloutPipeline, list[RolloutSample], Any]]:
    pipeline = rollout_of(qwen_image_pipeline)
    yield pipeline, rolled_out(pipeline), copy.deepcopy(pipeline.transformer)
    assert not exact_mode_is_on()


Qwen = tuple[RolloutPipeline, list[RolloutSample], Any]


def test_lengths_may_be_told_where_no_mask_tells_them(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    given = inputs(policy, samples, 1)
    lengths = given["encoder_hidden_states_mask"].sum(1).tolist()
    assert len(set(lengths)) > 2
    with torch.no_grad(), exact_training(policy, pipeline.engine.family):
        by_mask = policy(**given)[0]
    with torch.no_grad(), exact_training(policy, pipeline.engine.family, text_lengths=lengths):
        assert torch.equal(policy(**{**given, "encoder_hidden_states_mask": None})[0], by_mask)
        assert torch.equal(policy(**given)[0], by_mask)
        with (
            exact_training(policy, pipeline.engine.family, text_lengths=lengths[:3]),
            pytest.raises(InvalidRequestError, match=r"6 rows.*both halves"),
        ):
            policy(**given)
        assert torch.equal(policy(**given)[0], by_mask)


def test_lengths_are_told_to_one_module_and_not_to_another_one_inside(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    reference, family = copy.deepcopy(policy), pipeline.engine.family
    given, short = inputs(policy, samples, 1), inputs(policy, samples[1:2], 1)
    lengths = given["encoder_hidden_states_mask"].sum(1).tolist()
    unmasked = {**given, "encoder_hidden_states_mask": None}
    with torch.no_grad(), exact_training(policy, family, text_lengths=lengths):
        expected = policy(**given)[0]
        with exact_training(reference, family):
            alone = reference(**short)[0]
            assert torch.equal(policy(**unmasked)[0], expected)
    assert torch.equal(alone, expected[[1, 4]])


def test_arguments_by_position_and_padding_to_a_fixed_length_give_the_same_bits(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    given = inputs(policy, samples, 1)
    text, mask = given["encoder_hidden_states"], given["encoder_hidden_states_mask"]
    more = torch.full((len(text), 9, text.shape[2]), 1e4)
    with torch.no_grad(), exact_training(policy, pipeline.engine.family):
        expected = policy(**given)[0]
        wider = torch.cat([text, more], dim=1), torch.cat([mask, torch.zeros(len(mask), 9)], dim=1).bool()
        rest = {k: given[k] for k in ("timestep", "img_shapes", "return_dict")}
        assert torch.equal(policy(given["hidden_states"], *wider, **rest)[0], expected)


def test_a_mask_with_holes_is_refused(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    given = inputs(policy, samples, 1)
    given["encoder_hidden_states_mask"][0, 0] = 0
    with exact_training(policy, pipeline.engine.family), pytest.raises(InvalidRequestError, match="Pad on the right"):
        policy(**given)


def test_the_familys_own_calls_are_not_changed_inside(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    checkpointed(policy, reentrant=False)
    for transformer in (policy, pipeline.transformer):
        with exact_training(transformer, pipeline.engine.family):
            scored = pipeline.replay(samples, transformer=transformer)
            assert torch.equal(scored.detach(), old_log_probs(samples))
            scored.sum().backward()
    with exact_training(pipeline.transformer, pipeline.engine.family):
        again = rolled_out(pipeline)
    assert torch.equal(old_log_probs(again), old_log_probs(samples))


def test_blocks_nest_and_everything_is_restored_even_after_an_error(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    family, old = pipeline.engine.family, old_log_probs(samples)
    reference = copy.deepcopy(policy)
    with torch.no_grad(), exact_training(policy, family):
        with exact_training(policy, family), exact_training(reference, family):
            assert torch.equal(score_all(family, policy, samples, 3), old)
            assert torch.equal(score_all(family, reference, samples, 3), old)
            assert exact_mode_is_on()
            assert PROCESS_SETTINGS.active  # what backward needs on a GPU, forward or not
        assert "forward" not in vars(reference)
        assert torch.equal(score_all(family, policy, samples, 3), old)
        with pytest.raises(RuntimeError, match="mine"), exact_training(policy, family):
            raise RuntimeError("mine")
        assert torch.equal(score_all(family, policy, samples, 3), old)
    assert "forward" not in vars(policy)
    assert not exact_mode_is_on()


def test_a_forward_that_somebody_had_replaced_is_called_and_put_back(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(exact_mode_is_on())
        return type(policy).forward(policy, *args, **kwargs)

    policy.forward = theirs
    with torch.no_grad(), exact_training(policy, pipeline.engine.family):
        score(pipeline.engine.family, policy, samples, 1)
    assert policy.forward is theirs
    assert calls == [True]


def test_a_copy_that_is_made_inside_is_an_ordinary_module(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    given = inputs(policy, samples, 1)
    with torch.no_grad():
        plain = policy(**given)[0]
        with exact_training(policy, pipeline.engine.family):
            reference = copy.deepcopy(policy)
        for parameter in policy.parameters():
            parameter.zero_()
        assert torch.equal(reference(**given)[0], plain)


def test_two_threads_may_train_one_module_and_the_first_to_leave_takes_nothing_from_the_other(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    family, old = pipeline.engine.family, old_log_probs(samples)
    both_in, first_out, right = threading.Barrier(2, timeout=60), threading.Event(), []

    def stays() -> None:
        with torch.no_grad(), exact_training(policy, family):
            both_in.wait()
            assert first_out.wait(60)
            right.append(torch.equal(score_all(family, policy, samples, 3), old))

    thread = threading.Thread(target=stays)
    thread.start()
    with exact_training(policy, family):
        both_in.wait()
    first_out.set()
    thread.join()
    assert right == [True]
    assert "forward" not in vars(policy)


def test_the_callers_autocast_and_accelerates_wrapper_change_no_bit() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    pipeline = rollout_of(sd3_pipeline)
    family, samples = pipeline.engine.family, rolled_out(pipeline)
    own = copy.deepcopy(pipeline.transformer)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        policy = accelerator.prepare(own)
        wrapped = vars(own)["forward"]
        for around in (True, False):
            with torch.no_grad(), exact_training(policy, family), torch.autocast("cpu", torch.bfloat16, enabled=around):
                assert torch.equal(score_all(family, policy, samples, 3), old_log_probs(samples))
        assert vars(own)["forward"] is wrapped
        with torch.autocast("cpu", torch.bfloat16), exact_training(policy, family):
            assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            assert not torch.equal(score_all(family, policy, samples, 3), old_log_probs(samples))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def with_dropout(policy: Any) -> Any:
    policy.transformer_blocks[0].attn.to_out[1].p = 0.1
    return policy.train()


def with_another_checkpointing(policy: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy.transformer_blocks[0] = checkpoint_wrapper(policy.transformer_blocks[0])
    return policy


def compiled_in_place(policy: Any) -> Any:
    policy.compile()
    return policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.to(torch.bfloat16), r"bfloat16 on cpu, the rollout's is torch.float32 on cpu"),
        (with_dropout, r"dropout, p = 0.1"),
        (with_another_checkpointing, "enable_gradient_checkpointing"),
        (torch.compile, "before torch.compile"),
        (compiled_in_place, "before torch.compile"),
        (lambda p: torch.nn.Linear(2, 2), "is a QwenImageTransformer2DModel, and there is none"),
    ],
)
def test_what_would_change_the_bits_is_refused_by_name(qwen: Qwen, change: Callable[[Any], Any], message: str) -> None:
    pipeline, _, policy = qwen
    changed = change(policy)
    with pytest.raises(InvalidRequestError, match=message), exact_training(changed, pipeline.engine.family):
        pass
    assert "forward" not in vars(policy)


def test_a_family_that_is_not_certified_or_runs_the_plain_library_is_refused() -> None:
    family = family_for(sd3_pipeline())
    with pytest.raises(NotExactError, match="certified_family"), exact_training(family.transformer, family):
        pass
    make_exact(family, "off")
    with pytest.raises(NotExactError, match="certified_family"), exact_training(family.transformer, family):
        pass


def test_two_families_that_chose_differently_cannot_hold_one_module(qwen: Qwen) -> None:
    pipeline, _, policy = qwen
    other = certified_family(copy.deepcopy(qwen_image_pipeline()))
    key = next(iter(other.choices.linear))
    other.choices = type(other.choices)(linear={**other.choices.linear, key: "fixed_tiles"})
    with exact_training(policy, pipeline.engine.family):
        with pytest.raises(InvalidRequestError, match="with other choices"), exact_training(policy, other):
            pass
        assert "forward" in vars(policy)


def with_lora(pipeline: Any, rank: int = 4, dtype: torch.dtype | None = None) -> Any:
    """A copy of the pipeline with an unmerged adapter of non-zero weights; only those need gradients."""
    pipeline = copy.deepcopy(pipeline)
    transformer = pipeline.transformer.requires_grad_(False)
    config = copy.deepcopy(LORA)
    config.r = rank
    transformer.add_adapter(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data = values.to(dtype or parameter.dtype)
    return pipeline


adapters = pytest.mark.parametrize(
    ("dtype", "adapter"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)


@builds
@adapters
def test_an_unmerged_adapter_has_the_same_bits_on_both_sides(
    build: Any, dtype: torch.dtype, adapter: torch.dtype
) -> None:
    pipeline = adapted_rollout_of(build, dtype, adapter)
    family, samples = pipeline.engine.family, rolled_out(pipeline)
    plain = rolled_out(rollout_of(build, dtype))
    assert not torch.equal(final_states(plain), final_states(samples))  # the adapter does something
    policy = copy.deepcopy(pipeline.transformer).train()
    for checkpointing in (False, True):
        if checkpointing:
            checkpointed(policy, reentrant=False)
        policy.zero_grad()
        with exact_training(policy, family):
            new = score_all(family, policy, samples, 2)
            new.sum().backward()
        assert torch.equal(new.detach(), old_log_probs(samples))
        assert torch.equal(torch.exp(new.detach() - old_log_probs(samples)), torch.ones(3, STEPS))
        reached = gradients(policy)
        assert reached
        assert all("lora_" in name for name in reached)
    replayed = pipeline.replay(samples, transformer=policy)
    assert torch.equal(replayed.detach(), old_log_probs(samples))


@adapters
@pytest.mark.parametrize("rank", [4, 16])
def test_an_adapters_small_layers_are_certified_if_they_are_there_at_start_up(
    dtype: torch.dtype, adapter: torch.dtype, rank: int
) -> None:
    family = certified_family(with_lora(sd3_pipeline(dtype), rank, adapter))
    assert family.certificate is not None
    name = str(adapter).removeprefix("torch.")
    found = {v.operation for v in family.certificate.verdicts if v.exact}
    assert {f"linear 128x{rank} {name}", f"linear {rank}x128 {name}"} <= found


def test_an_adapter_that_comes_later_runs_by_the_default_way_and_can_be_certified_again() -> None:
    base = copy.deepcopy(sd3_pipeline())
    pipeline = RolloutPipeline(base)
    before = rolled_out(pipeline)
    base.transformer = with_lora(base).transformer
    family = pipeline.engine.family
    assert (128, 4, torch.float32) not in family.choices.linear
    samples = rolled_out(pipeline)
    assert not torch.equal(final_states(samples), final_states(before))
    policy = copy.deepcopy(base.transformer)
    with torch.no_grad(), exact_training(policy, family):
        assert torch.equal(score_all(family, policy, samples, 1), old_log_probs(samples))
    again = certified_family(base)
    assert again.choices.linear[128, 4, torch.float32] == "padded_rows"  # what the default was, so the bits stay
    with torch.no_grad(), exact_training(policy, again):
        assert torch.equal(score_all(again, policy, samples, 2), old_log_probs(samples))


@builds
@dtypes
def test_an_adapter_that_is_merged_on_one_side_gives_ratios_near_one_but_not_one(
    build: Any, dtype: torch.dtype
) -> None:
    pipeline = adapted_rollout_of(build, dtype, dtype)
    family, samples = pipeline.engine.family, rolled_out(pipeline, count=3)
    merged = copy.deepcopy(pipeline.transformer)
    merged.fuse_lora()
    with torch.no_grad(), exact_training(merged, family):
        ratio = torch.exp(score_all(family, merged, samples, 3) - old_log_probs(samples))
    assert not torch.equal(ratio, torch.ones_like(ratio))
    assert (ratio - 1).abs().max() < (1e-3 if dtype == torch.float32 else 0.2)


def test_a_mode_of_ones_own_inside_is_left_alone(qwen: Qwen) -> None:
    pipeline, samples, policy = qwen
    given = inputs(policy, samples, 1)
    with torch.no_grad():
        with exact_mode(choices=pipeline.engine.family.choices):
            expected = policy(**given)[0]
        with exact_training(policy, pipeline.engine.family), exact_mode(choices=pipeline.engine.family.choices):
            assert torch.equal(policy(**given)[0], expected)


def test_the_documents_example_runs() -> None:
    found = re.search(r"<!-- example: trainer -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found
    exec(compile(found.group(1), str(DOCUMENT), "exec"), {})
