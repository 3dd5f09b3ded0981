"""Contract tests of the model families, each on a tiny pipeline of the real classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from equality import assert_same_bits
from tiny_models import (
    a_picture,
    flux_pipeline,
    qwen_image_edit_pipeline,
    qwen_image_edit_plus_pipeline,
    qwen_image_pipeline,
    rollout_pipeline,
    save,
    sd3_pipeline,
    wan_pipeline,
    z_image_pipeline,
)

from diffusion_rl import RolloutPipeline
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import families, family_for, load_family
from diffusion_rl.models.qwen_image_edit_plus import QwenImageEditPlusFamily
from diffusion_rl.params import params_from_mapping
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.sample import RolloutSample
from engine_control.errors import InvalidRequestError
from rl_kernels import exact_mode

PIPELINES: dict[tuple[str, torch.dtype], RolloutPipeline] = {}


@dataclass(frozen=True)
class Case:
    """A family under test: how to build it, how to guide it or not, what else its requests say, diffusers' shape of its
    latents and output, and the stock pipeline that takes the same steps."""

    name: str
    build: Callable[[torch.dtype], Any]
    guided: dict[str, Any]
    prompts: tuple[str, ...]
    unguided: dict[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0, "true_cfg_scale": 1.0})
    stock_latents: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    own: dict[str, Any] = field(default_factory=dict)
    output: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    stepping_alike: Callable[[Any], Any] = lambda stock: stock

    def pipeline(self, dtype: torch.dtype = torch.float32) -> RolloutPipeline:
        """One for all tests: its weights stay as they are."""
        if (self.name, dtype) not in PIPELINES:
            PIPELINES[self.name, dtype] = rollout_pipeline(self.build(dtype))
        return PIPELINES[self.name, dtype]

    @property
    def small(self) -> dict[str, Any]:
        return {**SMALL, **self.own}

    @property
    def full(self) -> dict[str, Any]:
        return {**FULL, **self.own}


class EulerOnUniPCsGrid(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler steps at a multistep scheduler's sigmas and timesteps."""

    unipc: UniPCMultistepScheduler

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        self.unipc.set_timesteps(num_inference_steps, device)
        self.num_inference_steps, self._step_index, self._begin_index = num_inference_steps, None, None
        self.sigmas, self.timesteps = self.unipc.sigmas, self.unipc.timesteps.float()  # Euler takes no integers


def with_euler_steps(stock: WanPipeline) -> WanPipeline:
    scheduler = EulerOnUniPCsGrid()
    scheduler.unipc = stock.scheduler
    made = WanPipeline(**{**stock.components, "scheduler": scheduler, "boundary_ratio": stock.config.boundary_ratio})
    made.set_progress_bar_config(disable=True)
    return made


CASES = [
    Case(
        "flux",
        flux_pipeline,
        {"guidance_scale": 2.5, "true_cfg_scale": 3.7, "negative_prompt": "blurry"},
        ("a red ball", "cat", "two blue boxes"),
        own={"max_sequence_length": 24},
    ),
    Case("stable_diffusion3", sd3_pipeline, {"guidance_scale": 4.3}, ("a red ball", "cat", "two blue boxes")),
    Case(
        "stable_diffusion3-dual-attention",
        lambda dtype: sd3_pipeline(dtype, dual_attention=True),
        {"guidance_scale": 4.3},
        ("a red ball", "cat", "two blue boxes"),
    ),
    Case(
        "qwen_image",
        qwen_image_pipeline,
        {"true_cfg_scale": 3.7, "negative_prompt": "blurry"},
        ("a red ball on a green table, photographed from above", "cat", "two blue boxes and a very small dog"),
    ),
    Case(
        "qwen_image_edit",
        qwen_image_edit_pipeline,
        {"true_cfg_scale": 3.7, "negative_prompt": "blurry"},
        ("make it a red ball on a green table", "cat", "two blue boxes"),
        own={"image": a_picture(120, 50), "num_inference_steps": 3},
    ),
    Case(
        "qwen_image_edit_plus",
        qwen_image_edit_plus_pipeline,
        {"true_cfg_scale": 3.7, "negative_prompt": "blurry"},
        ("put both on a green table", "cat", "two blue boxes"),
        own={"image": [a_picture(120, 50), a_picture(70, 90)], "num_inference_steps": 2},
    ),
    Case(
        "z_image",
        z_image_pipeline,
        {"guidance_scale": 2.6},
        ("a red ball on a green table, photographed from above", "cat", "two blue boxes"),
        {"guidance_scale": 0.0},
        lambda latents: latents.squeeze(2),
    ),
    *(
        Case(
            name,
            lambda dtype, boundary=boundary: wan_pipeline(dtype, boundary),  # type: ignore[misc]
            {"guidance_scale": 4.3, "negative_prompt": "blurry", **second},
            ("a red ball on a green table, from above", "cat", "two blue boxes"),
            own={"num_frames": 5, "height": 32, "width": 32, "max_sequence_length": 48},
            output=lambda video: video.permute(1, 0, 2, 3).float(),
            stepping_alike=with_euler_steps,
        )
        for name, boundary, second in (("wan", None, {}), ("wan-two-transformers", 0.8, {"guidance_scale_2": 2.5}))
    ),
]
SMALL = {"height": 64, "width": 64, "num_inference_steps": 4}
FULL = {**SMALL, "rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True}
DTYPES = [torch.float32, torch.bfloat16]

case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _pictures_are_scaled_to_few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stock pipelines, to what the tiny families' defaults say."""
    by_area = {1024 * 1024: 64 * 64, 384 * 384: 32 * 32}
    monkeypatch.setattr(QwenImageEditPlusFamily, "seen_area", 32 * 32)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        scaled = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda a, r, f=scaled: f(by_area.get(a, a), r))


def test_every_registered_family_is_under_test() -> None:
    assert set(families.names()) == {c.name.split("-")[0] for c in CASES}


def initial_latents(case: Case, pipeline: RolloutPipeline, seed: int) -> torch.Tensor:
    family = pipeline.engine.family
    shape = family.initial_noise_shape(*family.size(params_from_mapping({"prompt": "x", **case.small})))
    return case.stock_latents(family.pack(normal_noise([seed], NoiseStream.INITIAL_LATENT, [0], shape)))


@case
@dtypes
@pytest.mark.parametrize("guided", [True, False])
def test_an_ode_rollout_is_the_stock_pipeline_run_bit_for_bit(case: Case, dtype: torch.dtype, guided: bool) -> None:
    pipeline = case.pipeline(dtype)
    guidance = case.guided if guided else case.unguided
    ours = pipeline(case.prompts[0], seed=5, rollout=False, output_type="both", **case.small, **guidance)[0]
    stock = case.stepping_alike(pipeline.engine.family.pipeline)
    known = {"guidance_scale", "guidance_scale_2", "true_cfg_scale", "negative_prompt"} & set(
        stock.__call__.__wrapped__.__code__.co_varnames
    )
    theirs = {
        k: v for k, v in guidance.items() if k in known and not (case.name.startswith("qwen_image") and k[0] == "g")
    }
    latents = initial_latents(case, pipeline, 5).to(pipeline.engine.family.velocity_dtype)
    with exact_mode():
        out = stock(prompt=case.prompts[0], latents=latents, output_type="latent", **case.small, **theirs)[0]
    assert ours.generated_latents is not None
    assert torch.equal(case.stock_latents(ours.generated_latents[None]), out.float())
    with exact_mode():
        output = stock(prompt=case.prompts[0], latents=latents, output_type="pt", **case.small, **theirs)[0][0]
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.generated_output, case.output(output), atol=tolerance, rtol=0)


@case
def test_outside_the_exact_context_the_stock_pipeline_stays_close(case: Case) -> None:
    pipeline = case.pipeline()
    ours = pipeline(case.prompts[0], seed=5, rollout=False, output_type="latent", **case.small)[0]
    stock = case.stepping_alike(pipeline.engine.family.pipeline)
    latents = initial_latents(case, pipeline, 5)
    out = stock(prompt=case.prompts[0], latents=latents, output_type="latent", **case.small)[0]
    assert ours.generated_latents is not None
    torch.testing.assert_close(case.stock_latents(ours.generated_latents[None]), out, atol=1e-4, rtol=1e-4)


@case
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("sde", torch.float32), ("cps", torch.bfloat16), ("ode", torch.bfloat16)],
    ids=str,
)
def test_a_sample_has_the_same_bits_alone_in_a_group_and_beside_other_prompts(
    case: Case, kind: str, dtype: torch.dtype
) -> None:
    pipeline = case.pipeline(dtype)
    fields = {**case.full, **case.guided, "rollout_sde_type": kind}
    group = pipeline(case.prompts[0], seed=20, num_outputs_per_prompt=3, **fields)
    mixed = pipeline(case.prompts, seed=18, num_outputs_per_prompt=3, **fields)
    for index in (0, 2):
        alone = pipeline(case.prompts[0], seed=20 + index, **fields)[0]
        assert_same_bits(group[index], alone)
        if index == 0:
            assert_same_bits(mixed[2], alone)
    longest = pipeline(case.prompts[2], seed=18 + 2 * 3, **fields)[0]
    assert_same_bits(mixed[6], longest)


@case
@dtypes
def test_replay_at_unchanged_weights_gives_the_rollouts_log_probs_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    pipeline = case.pipeline(dtype)
    for kind, no_const in (("sde", False), ("cps", True), ("dance", False)):
        samples = pipeline(
            case.prompts[:2],
            seed=3,
            num_outputs_per_prompt=2,
            rollout_sde_type=kind,
            rollout_log_prob_no_const=no_const,
            **case.full,
            **case.guided,
        )
        steps = [i for i, k in enumerate(samples[0].rollout_step_kinds) if k != "ode"]
        rolled_out = torch.stack([s.rollout_log_probs[steps] for s in samples if s.rollout_log_probs is not None])
        scored = pipeline.replay(samples)
        assert scored.requires_grad
        assert torch.equal(scored.detach(), rolled_out)
        assert torch.equal(torch.exp(scored.detach() - rolled_out), torch.ones_like(rolled_out))
        assert torch.equal(pipeline.replay(samples[1:2]).detach(), rolled_out[1:2])


@case
def test_a_picture_lies_between_0_and_1_and_uint8_is_the_same_picture_rounded(case: Case) -> None:
    pipeline = case.pipeline()
    floats = pipeline(case.prompts[0], seed=1, **case.small)[0].generated_output
    whole = pipeline(case.prompts[0], seed=1, output_dtype="uint8", **case.small)[0].generated_output
    assert floats is not None
    assert whole is not None
    frames = [case.own["num_frames"]] if "num_frames" in case.own else []
    assert floats.shape == whole.shape == (3, *frames, case.small["height"], case.small["width"])
    assert floats.dtype == torch.float32
    assert 0 <= floats.min() <= floats.max() <= 1
    assert torch.equal(whole, (floats * 255).round().to(torch.uint8))


@case
def test_the_conditioning_travels_through_the_denoising_env(case: Case) -> None:
    pipeline = case.pipeline()
    sample: RolloutSample = pipeline(case.prompts[0], seed=1, **case.full, **case.guided)[0]
    env = sample.denoising_env
    assert env is not None
    assert env.neg_cond_kwargs is not None
    family = pipeline.engine.family
    back = family.conditioning_from_env(env, sample.guidance_scale)
    assert (back.guidance_scale, back.embedded_guidance) == (sample.guidance_scale, sample.embedded_guidance)
    again = family.denoising_env(back, 64, 64)
    assert again.guidance == env.guidance == sample.embedded_guidance
    embeds = env.pos_cond_kwargs["encoder_hidden_states"]
    assert isinstance(embeds, torch.Tensor)
    assert embeds.dim() == 2
    assert torch.equal(embeds, again.pos_cond_kwargs["encoder_hidden_states"])  # type: ignore[arg-type]


@case
def test_a_saved_folder_loads_and_rolls_out_the_same_bits(case: Case, tmp_path: Any) -> None:
    folder = save(case.build(torch.float32), tmp_path / "model")
    loaded = RolloutPipeline.from_pretrained(str(folder), device="cpu")
    assert_same_bits(
        loaded(case.prompts[0], seed=1, **case.full, **case.guided)[0],
        case.pipeline()(case.prompts[0], seed=1, **case.full, **case.guided)[0],
    )


def parameters_to_cast(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those that the module's class doesn't want to stay in fp32."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return [parameter for name, parameter in module.named_parameters() if not kept & set(name.split("."))]


@case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_folder_loads_in_the_dtype_that_is_asked_for(case: Case, dtype: torch.dtype, tmp_path: Any) -> None:
    family = load_family(str(save(case.build(torch.float32), tmp_path / "model")), dtype=dtype)
    modules = [m for m in family.pipeline.components.values() if isinstance(m, torch.nn.Module)]
    assert len(modules) >= 3
    assert {p.dtype for m in modules for p in parameters_to_cast(m)} == {dtype}
    assert family.dtype == dtype


@case
def test_a_folder_loads_in_the_dtypes_that_it_is_stored_in(case: Case, tmp_path: Any) -> None:
    built = case.build(torch.bfloat16)
    built.vae.to(torch.float32)
    family = load_family(str(save(built, tmp_path / "model")))
    modules = {n: m for n, m in family.pipeline.components.items() if isinstance(m, torch.nn.Module)}
    found = {name: {p.dtype for p in parameters_to_cast(module)} for name, module in modules.items()}
    assert found == {name: {torch.float32 if name == "vae" else torch.bfloat16} for name in modules}
    assert family.dtype == torch.bfloat16


@case
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_schedules_are_diffusers_own_bit_for_bit(case: Case, steps: int) -> None:
    pipeline = case.pipeline()
    if steps == 1 and case.name.startswith("qwen_image"):
        pytest.skip("diffusers divides by zero here; see the next test")
    fields = {**case.small, "num_inference_steps": steps, "rollout_return_dit_trajectory": True}
    trajectory = pipeline(case.prompts[0], seed=1, rollout_return_step_indices=[0], **fields)[0].dit_trajectory
    stock = pipeline.engine.family.pipeline
    stock(prompt=case.prompts[0], output_type="latent", **{**case.small, "num_inference_steps": steps})
    assert trajectory is not None
    assert trajectory.sigmas.dtype == torch.float32
    assert torch.equal(trajectory.sigmas, stock.scheduler.sigmas)
    assert torch.equal(trajectory.timesteps[:-1], stock.scheduler.timesteps.float())
    assert trajectory.timesteps[-1] == 0


def test_a_single_step_is_finite_where_diffusers_stretched_grid_is_not() -> None:
    pipeline = RolloutPipeline(qwen_image_pipeline())
    fields = {**SMALL, "num_inference_steps": 1, "rollout_return_dit_trajectory": True}
    for kind in ("sde", "cps", "dance", "ode"):
        sample = pipeline("cat", seed=1, rollout_sde_type=kind, **fields)[0]
        assert sample.dit_trajectory is not None
        assert sample.dit_trajectory.sigmas.tolist() == [1.0, 0.0]
        assert sample.rollout_log_probs is not None
        assert sample.rollout_log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"flow_shift": 9999.0, "num_inference_steps": 200}, "flow_shift"),
        ({"sigmas": [1.0, 0.99999999999, 0.0]}, "sigmas"),
        ({"sigmas": [1.0, 1e-30, 0.0]}, "sigmas"),
    ],
)
def test_a_grid_that_collapses_in_fp32_is_refused(fields: dict[str, Any], field: str) -> None:
    own = {k: v for k, v in SMALL.items() if k not in ("num_inference_steps",)}
    with pytest.raises(InvalidRequestError, match=rf"don't fall strictly.*{field}"):
        RolloutPipeline(sd3_pipeline())("cat", seed=1, **{**own, **fields})


def test_a_pipeline_that_no_family_serves_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"no model family serves a ndarray.*QwenImagePipeline"):
        family_for(np.zeros(1))


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./missing", "a/b/c"])
def test_a_model_path_that_is_no_model_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="no such folder"):
        RolloutPipeline.from_pretrained(path)


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"model_index\.json"):
        RolloutPipeline.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_damaged_file_of_a_checkpoint_is_named(dtype: str, tmp_path: Any) -> None:
    folder = save(sd3_pipeline(), tmp_path / "model")
    file, index = folder / "transformer/diffusion_pytorch_model.safetensors", folder / "model_index.json"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\xff" * 100, b""):
        file.write_bytes(damaged)
        with pytest.raises(InvalidRequestError, match=r"transformer/diffusion_.*no whole safetensors file"):
            RolloutPipeline.from_config(EngineConfig(str(folder), dtype=dtype))  # type: ignore[arg-type]
    index.write_text(index.read_text()[:-20])
    with pytest.raises(InvalidRequestError, match=r"model_index\.json.*is no JSON"):
        RolloutPipeline.from_config(EngineConfig(str(folder), dtype=dtype))  # type: ignore[arg-type]
