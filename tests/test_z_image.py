"""What Z-Image has to itself; the contract of all families is in `test_families.py`."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same_bits
from tiny_models import rollout_pipeline, sd3_pipeline, z_image_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.batch import Conditioning, DenoiseBatch
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import family_for
from diffusion_rl.models.graphs import _key
from diffusion_rl.parallel.arrangement import arrange
from diffusion_rl.parallel.layout import Layout
from diffusion_rl.params import params_from_mapping
from diffusion_rl.rollout.certification import probe_batch
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.schedulers.sde import SDESchedulerMixin
from diffusion_rl.trainer import exact_training
from engine_control.errors import InvalidRequestError, RefitRefusedError
from engine_control.groups import RankGroup, Rendezvous
from rl_kernels import exact_mode

LONG = "a red ball on a green table, photographed from above"  # 92 tokens in the template, so 96 of the transformer's
FIELDS: dict[str, Any] = {
    "height": 80,
    "width": 48,
    "num_inference_steps": 3,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


@pytest.fixture(scope="module")
def pipeline() -> RolloutPipeline:
    return rollout_pipeline(z_image_pipeline())


def test_a_scale_of_0_is_no_guidance_and_a_scale_of_1_is_some(pipeline: RolloutPipeline) -> None:
    without, with_1 = (
        pipeline("cat", seed=1, guidance_scale=scale, **FIELDS, output_type="latent")[0] for scale in (0.0, 1.0)
    )
    assert (without.guidance_scale, with_1.guidance_scale) == (0.0, 1.0)
    assert without.denoising_env is not None
    assert with_1.denoising_env is not None
    assert without.denoising_env.neg_cond_kwargs is None
    assert with_1.denoising_env.neg_cond_kwargs is not None
    assert not torch.equal(without.generated_latents, with_1.generated_latents)  # type: ignore[arg-type]


def test_guidance_may_be_limited_in_norm_and_time_as_in_the_stock_pipeline(pipeline: RolloutPipeline) -> None:
    limits = [{}, {"cfg_normalization": 0.9}, {"cfg_normalization": True, "cfg_truncation": 0.1}, {"cfg_truncation": 0}]
    family, size = pipeline.engine.family, {"height": 80, "width": 48, "num_inference_steps": 3}
    noise = normal_noise([4], NoiseStream.INITIAL_LATENT, [0], family.initial_noise_shape(80, 48))
    finals = []
    for limit in limits:
        with exact_mode():
            stock = family.pipeline("cat", latents=noise, guidance_scale=3.3, output_type="latent", **size, **limit)
        ours = pipeline("cat", seed=4, guidance_scale=3.3, rollout=False, output_type="latent", **size, **limit)[0]
        assert ours.generated_latents is not None
        assert torch.equal(ours.generated_latents.squeeze(1), stock.images[0])
        finals.append(ours.generated_latents)
    assert len({float(final.sum()) for final in finals}) == len(limits)


def test_limits_of_guidance_are_each_samples_own_and_replayed(pipeline: RolloutPipeline) -> None:
    fields = {**FIELDS, "guidance_scale": 3.0, "output_type": "latent"}
    limited = {"cfg_normalization": 0.9, "cfg_truncation": 0.2}
    engine_loop = pipeline._loop
    requests = [{**fields, "prompt": "cat", "seed": 2, **limit} for limit in (limited, {})]
    answers = [engine_loop.submit(str(i), params_from_mapping(r)) for i, r in enumerate(requests)]
    engine_loop.run_until_idle()
    together = [answer.result()[0] for answer in answers]
    assert [(s.cfg_normalization, s.cfg_truncation) for s in together] == [(0.9, 0.2), (None, None)]
    for sample, request in zip(together, requests, strict=True):
        assert_same_bits(sample, pipeline(**request)[0])
    rolled_out = torch.stack([s.rollout_log_probs for s in together if s.rollout_log_probs is not None])
    assert torch.equal(pipeline.replay(together).detach(), rolled_out)
    with pytest.raises(InvalidRequestError, match="at most 1"):
        pipeline("cat", cfg_truncation=1.5)
    with pytest.raises(InvalidRequestError, match="no use for cfg_normalization"):
        RolloutPipeline(sd3_pipeline(), config=EngineConfig(deterministic="off"))("cat", cfg_normalization=1.0)


def test_states_of_a_half_precision_model_are_fp32_as_in_its_pipeline() -> None:
    pipeline = rollout_pipeline(z_image_pipeline(torch.bfloat16))
    trajectory = pipeline("cat", seed=1, rollout_sde_type="ode", **FIELDS)[0].dit_trajectory
    assert trajectory is not None
    assert trajectory.latents.shape == (4, 16, 1, 10, 6)
    assert all(not torch.equal(state, state.bfloat16().float()) for state in trajectory.latents)


def test_the_environment_has_the_caption_as_the_transformer_pads_it(pipeline: RolloutPipeline) -> None:
    sample = pipeline(LONG, seed=1, guidance_scale=2.0, negative_prompt="x", **FIELDS)[0]
    assert sample.denoising_env is not None
    for kwargs, tokens, padded in (
        (sample.denoising_env.pos_cond_kwargs, 92, 96),
        (sample.denoising_env.neg_cond_kwargs, 41, 64),
    ):
        assert kwargs is not None
        caption, freqs = kwargs["encoder_hidden_states"], kwargs["freqs_cis"]
        assert isinstance(caption, torch.Tensor)
        assert isinstance(freqs, list)
        assert caption.shape == (padded, 64)
        assert kwargs["caption_valid_lens"] == [tokens]
        assert kwargs["image_seq_len_target"] == 32  # of 5 x 3 tokens
        assert [f.shape for f in freqs] == [(padded, 48), (32, 48)]


def test_a_trainers_own_call_with_captions_of_several_lengths_has_a_ratio_of_exactly_1(
    pipeline: RolloutPipeline,
) -> None:
    samples = pipeline(["cat", LONG], seed=3, guidance_scale=2.5, **FIELDS)
    policy = copy.deepcopy(pipeline.transformer).train()
    policy.enable_gradient_checkpointing()  # type: ignore[operator]
    step, trajectories = 1, [s.dit_trajectory for s in samples if s.dit_trajectory is not None]
    before, after = (torch.stack([t.latents[i] for t in trajectories]) for i in (step, step + 1))
    times = torch.stack([(1000 - t.timesteps[step]) / 1000 for t in trajectories])
    envs = [s.denoising_env for s in samples if s.denoising_env is not None]
    rows: list[Any] = [e.pos_cond_kwargs for e in envs] + [e.neg_cond_kwargs for e in envs]
    captions = [r["encoder_hidden_states"][: r["caption_valid_lens"][0]] for r in rows]
    scheduler: Any = pipeline.engine.family.scheduler(SDESchedulerMixin, None)
    scheduler.sigmas = trajectories[0].sigmas
    with exact_training(policy, pipeline.engine.family):
        output = torch.stack(
            policy(list(before.repeat(2, 1, 1, 1, 1)), times.repeat(2), captions, return_dict=False)[0]
        )
        positive, negative = output.chunk(2)
        velocity = -(positive + 2.5 * (positive - negative))
        scored = scheduler.step_with_log_prob(velocity, step, before, noise_level=0.7, prev_sample=after)
    old = torch.stack([s.rollout_log_probs[step] for s in samples if s.rollout_log_probs is not None])
    assert torch.equal(scored.log_prob.detach(), old)
    scored.log_prob.sum().backward()
    assert policy.get_submodule("context_refiner.0.attention.to_q").weight.grad.abs().sum() > 0  # type: ignore[union-attr, operator]
    with (
        exact_training(policy, pipeline.engine.family, text_lengths=[64, 96]),
        pytest.raises(InvalidRequestError, match="prompts of their own lengths"),
    ):
        policy(list(before), times, captions[:2])


@pytest.mark.parametrize("prompts", [("cat", LONG, "dog"), ("cat",)], ids=["mixed", "one"])
def test_two_ranks_that_share_tokens_predict_the_bits_of_one(
    pipeline: RolloutPipeline, prompts: tuple[str, ...], tmp_path: Path
) -> None:
    whole = pipeline.engine.family
    short = whole.encode_prompt("x", 128)
    conditioning = tuple(Conditioning(whole.encode_prompt(p, 128), short, 2.5) for p in prompts)
    latents = torch.randn(len(prompts), *whole.latent_shape(80, 48), generator=torch.Generator().manual_seed(0))
    batch = DenoiseBatch(latents, torch.linspace(900, 100, len(prompts)), conditioning, 80, 48)
    families = [family_for(copy.deepcopy(whole.pipeline)) for _ in range(2)]

    @torch.no_grad()
    def predict(rank: int) -> torch.Tensor:
        meeting, family, layout = Rendezvous(str(tmp_path / "store"), 2, timeout_s=30), families[rank], Layout(2, 1, 1)

        def join(name: str, place: int, size: int) -> RankGroup:
            return meeting.join(name, place, size, family.device, shared_device=False)

        arranged = arrange(
            rank, layout, family.transformers.values(), family.sequence_spec, guidance="batched", join=join
        )
        return family.predict(batch, arrangement=arranged)

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        expected = whole.predict(batch)
        for predicted in pool.map(predict, range(2)):
            assert torch.equal(predicted, expected)


def test_what_the_transformers_positions_do_not_reach_is_refused(pipeline: RolloutPipeline) -> None:
    with pytest.raises(InvalidRequestError, match="end at 256 pixels"):
        pipeline("cat", seed=1, **{**FIELDS, "width": 272})
    with pytest.raises(InvalidRequestError, match="multiple of 16"):
        pipeline("cat", seed=1, **{**FIELDS, "width": 40})
    longest = pipeline("x" * (128 - 40), seed=1, **FIELDS)[0]
    assert longest.denoising_env is not None
    assert longest.denoising_env.pos_cond_kwargs["caption_valid_lens"] == [128]
    with pytest.raises(InvalidRequestError, match="129 tokens, but the text encoder reads at most 128"):
        pipeline("x" * (129 - 40), seed=1, **FIELDS)
    with pytest.raises(InvalidRequestError, match="at most 50"):
        pipeline(LONG, seed=1, max_sequence_length=50, **FIELDS)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    stock = copy.copy(z_image_pipeline())
    stock.tokenizer = copy.copy(stock.tokenizer)
    stock.tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        family_for(stock)


def test_it_is_certified_with_captions_that_the_transformer_pads_to_several_lengths(pipeline: RolloutPipeline) -> None:
    family = pipeline.engine.family
    batch = probe_batch(family)
    call = {"x": list(batch.latents), "cap_feats": [c.positive.prompt_embeds for c in batch.conditioning]}
    plan = family.plan_of_call(call)
    assert plan is not None
    assert len(set(plan.text_lengths)) == 2


def test_a_refit_is_all_or_nothing_and_leaves_an_engine_that_loaded_these_weights(pipeline: RolloutPipeline) -> None:
    new = {name: tensor * 1.02 for name, tensor in pipeline.transformer.state_dict().items()}
    stock = copy.deepcopy(pipeline.engine.family.pipeline)
    stock.transformer.load_state_dict(new)
    fresh, refitted = RolloutPipeline(stock), RolloutPipeline(copy.deepcopy(pipeline.engine.family.pipeline))
    for name in ("cap_pad_token", "noise_refiner.0.attention.to_out.0.weight"):
        with pytest.raises(RefitRefusedError, match=f"{name}.*never came"):
            refitted.refit({n: t for n, t in new.items() if n != name})
    before = refitted("cat", seed=1, **FIELDS)[0]
    assert_same_bits(before, pipeline("cat", seed=1, **FIELDS)[0])
    refitted.refit(new)
    assert_same_bits(refitted("cat", seed=1, **FIELDS)[0], fresh("cat", seed=1, **FIELDS)[0])


def test_it_is_not_compiled_and_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="ZImageTransformer2DModel isn't compiled"):
        RolloutPipeline(z_image_pipeline(), config=EngineConfig(torch_compile=True))


def test_a_graph_is_found_by_the_shapes_of_captions_and_never_by_their_numbers() -> None:
    family = family_for(z_image_pipeline())
    batch = probe_batch(family)
    prompts = [c.positive.prompt_embeds for c in batch.conditioning]
    calls = []
    for captions in (prompts, [p + 1 for p in prompts], [p[:-1] for p in prompts]):
        inputs = {"x": list(batch.latents), "t": batch.timesteps, "cap_feats": captions}
        calls.append(_key(family.plan_of_call(inputs), inputs))  # type: ignore[arg-type]
    assert calls[0] == calls[1] != calls[2]
