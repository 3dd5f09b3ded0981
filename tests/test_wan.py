"""What is Wan's own: which transformer computes a step, the checkpoint's grid, padding that is attended to, and videos
through the service and the command line."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Service, free_port, start_service, stop_service
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from equality import assert_same_bits
from PIL import Image
from test_families import EulerOnUniPCsGrid
from tiny_models import rollout_pipeline, save, sd3_pipeline, wan_pipeline
from typer.testing import CliRunner

from diffusion_rl import RolloutPipeline
from diffusion_rl.batch import FIRST, SECOND
from diffusion_rl.cli import app
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily, family_for
from diffusion_rl.params import Limits, RolloutParams, params_from_mapping
from diffusion_rl.rollout.replay import replay_step
from diffusion_rl.rollout.samples import plan_request
from diffusion_rl.sample import RolloutSample
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.trainer import exact_training
from engine_control.errors import EngineError, InvalidRequestError, LimitExceededError, RefitRefusedError
from rl_kernels import exact_mode

BOUNDARY = 0.8  # of four steps, whose timesteps are 999, 900, 750 and 500, the first two are the first transformer's
SIZE = {"height": 32, "width": 32, "num_frames": 5}
SMALL: dict[str, Any] = {**SIZE, "num_inference_steps": 4, "max_sequence_length": 24}
FULL: dict[str, Any] = {
    **SMALL,
    "guidance_scale": 4.0,
    "guidance_scale_2": 2.5,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(wan_pipeline(boundary=BOUNDARY), tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> RolloutPipeline:
    return RolloutPipeline.from_pretrained(str(folder), device="cpu")


@pytest.fixture(scope="module")
def group(pipeline: RolloutPipeline) -> list[RolloutSample]:
    return pipeline("a cat", seed=3, num_outputs_per_prompt=2, **FULL)


def family_of(**options: Any) -> ModelFamily:
    return family_for(wan_pipeline(**options))


def outputs(sample: RolloutSample) -> torch.Tensor:
    assert sample.rollout_debug_tensors is not None
    return sample.rollout_debug_tensors.rollout_model_outputs


def test_the_timestep_says_which_transformer_computes_a_step_and_how_it_is_guided(group: list[RolloutSample]) -> None:
    assert group[0].rollout_step_transformers == (FIRST, FIRST, SECOND, SECOND)
    assert (group[0].guidance_scale, group[0].guidance_scale_2) == (4.0, 2.5)
    stock = copy.deepcopy(wan_pipeline(boundary=BOUNDARY))
    with torch.no_grad():
        stock.transformer_2.proj_out.weight.mul_(1.1)
    other = rollout_pipeline(stock)("a cat", seed=3, **FULL)[0]
    same = [torch.equal(a, b) for a, b in zip(outputs(group[0]), outputs(other), strict=True)]
    assert same == [True, True, False, False]


def test_samples_on_both_sides_of_the_boundary_go_on_together_with_the_bits_of_their_own(
    pipeline: RolloutPipeline, group: list[RolloutSample]
) -> None:
    loop, engine = pipeline._loop, pipeline.engine
    requests = {
        "early": {"prompt": "a cat", "seed": 3, "num_outputs_per_prompt": 2, **FULL},
        "late": {"prompt": "two dogs", "seed": 9, **FULL},
    }
    answers = {"early": loop.submit("early", params_from_mapping(requests["early"]))}
    before = engine.stats()

    def between_steps() -> None:
        if "late" not in answers and engine.stats()["steps"] - before["steps"] == 2:
            answers["late"] = loop.submit("late", params_from_mapping(requests["late"]))

    loop.run_until_idle(between_steps)
    for one, other in zip(group, answers["early"].result(), strict=True):
        assert_same_bits(one, other)
    assert_same_bits(pipeline(**requests["late"])[0], answers["late"].result()[0])
    assert engine.stats()["steps"] - before["steps"] == 2 + 2 + 2 + 2 + 4  # nothing shared, and then the comparison


def test_a_replay_takes_the_transformer_of_the_step_and_has_a_ratio_of_exactly_1(
    pipeline: RolloutPipeline, group: list[RolloutSample]
) -> None:
    policies = {name: copy.deepcopy(module) for name, module in pipeline.transformers.items()}
    rolled_out = torch.stack([s.rollout_log_probs for s in group if s.rollout_log_probs is not None])
    scored = pipeline.replay(group, transformer=policies)
    assert torch.equal(scored.detach(), rolled_out)
    pipeline.replay(group, transformer=policies, steps=[2]).sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in policies[FIRST].parameters())
    assert policies[SECOND].proj_out.weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="which of the pipeline's 2 transformers"):
        pipeline.replay(group, transformer=policies[FIRST])
    with pytest.raises(InvalidRequestError, match="the step is one of transformer_2, which was not given"):
        pipeline.replay(group, transformer={FIRST: policies[FIRST]})
    one_step = rollout_pipeline(wan_pipeline(boundary=0.95))("a cat", seed=3, **FULL)
    with pytest.raises(InvalidRequestError, match=r"must agree in .*transformer"):
        replay_step(pipeline.engine.family, [group[0], one_step[0]], 1)


def test_a_trainers_own_call_of_the_second_transformer_has_the_rollouts_bits(
    pipeline: RolloutPipeline, group: list[RolloutSample]
) -> None:
    policy: Any = copy.deepcopy(pipeline.transformers[SECOND]).train()
    policy.enable_gradient_checkpointing()
    step = 2
    trajectory, env = group[0].dit_trajectory, group[0].denoising_env
    assert trajectory is not None
    assert env is not None
    assert env.neg_cond_kwargs is not None
    state, timestep = trajectory.latents[step][None], trajectory.timesteps[step][None]
    with exact_training(policy, pipeline.engine.family):
        negative, positive = (
            policy(state, timestep, kwargs["encoder_hidden_states"][None], return_dict=False)[0]  # type: ignore[index]
            for kwargs in (env.neg_cond_kwargs, env.pos_cond_kwargs)
        )
    assert torch.equal((negative + 2.5 * (positive - negative))[0], outputs(group[0])[step])


def test_a_timestep_a_token_has_the_bits_of_one_a_sample() -> None:
    pipeline = rollout_pipeline(wan_pipeline(expand_timesteps=True))
    ours = pipeline("a cat", seed=3, rollout=False, **SMALL, output_type="latent")[0]
    own = pipeline.engine.family.pipeline
    scheduler = EulerOnUniPCsGrid()
    scheduler.unipc = own.scheduler
    stock = WanPipeline(**{**own.components, "scheduler": scheduler, "expand_timesteps": True})
    stock.set_progress_bar_config(disable=True)
    shapes = []
    hook = stock.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["timestep"].shape)), with_kwargs=True
    )
    noise = pipeline("a cat", seed=3, rollout_return_dit_trajectory=True, rollout_return_step_indices=[0], **SMALL)[0]
    assert noise.dit_trajectory is not None
    shapes.clear()
    with exact_mode():
        theirs = stock("a cat", latents=noise.dit_trajectory.latents, output_type="latent", **SMALL)[0]
    hook.remove()
    assert set(shapes) == {(1, 8)}
    assert ours.generated_latents is not None
    assert torch.equal(ours.generated_latents, theirs[0])


def test_texts_of_several_lengths_share_a_batch_and_padding_is_attended_to(pipeline: RolloutPipeline) -> None:
    fields = {name: value for name, value in FULL.items() if name != "max_sequence_length"}
    requests = [{"prompt": "a cat", "seed": 3, "max_sequence_length": n, **fields} for n in (8, 7)]  # 8 image tokens
    alone = [pipeline(**request)[0] for request in requests]
    before = pipeline.engine.stats()["steps"]
    answers = [pipeline._loop.submit(str(i), params_from_mapping(request)) for i, request in enumerate(requests)]
    pipeline._loop.run_until_idle()
    assert pipeline.engine.stats()["steps"] - before == 4
    for one, answer in zip(alone, answers, strict=True):
        assert_same_bits(one, answer.result()[0])
    assert not torch.equal(outputs(alone[0]), outputs(alone[1]))


@pytest.mark.parametrize("steps", [1, 4, 30])
def test_the_grid_is_the_checkpoints_own_also_shifted_given_or_sent_back(steps: int) -> None:
    family = family_of()

    def schedule(**fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
        params = params_from_mapping({"prompt": "x", **fields})
        kind = step_kinds.get("sde")
        return family.schedule(family.scheduler(kind, params.flow_shift), params, steps, (32, 32, 5))

    def unipc(shift: float, **given: Any) -> UniPCMultistepScheduler:
        made = UniPCMultistepScheduler.from_config(family.pipeline.scheduler.config, flow_shift=shift)
        made.set_timesteps(steps, **given)
        return made

    unshifted = torch.linspace(0.95, 0.1, steps, dtype=torch.float64)
    for fields, theirs in (
        ({}, unipc(3.0)),
        ({"flow_shift": 5.0}, unipc(5.0)),
        ({"sigmas": unshifted.tolist()}, unipc(3.0, sigmas=unshifted.numpy())),
        ({"flow_shift": 1.0, "sigmas": [0.9, 0.7, 0.3]}, unipc(1.0, sigmas=np.array([0.9, 0.7, 0.3]))),
    ):
        sigmas, timesteps = schedule(**fields)
        assert torch.equal(sigmas, theirs.sigmas)
        assert torch.equal(timesteps, torch.cat([theirs.timesteps, torch.zeros(1, dtype=torch.int64)]).float())
        again = schedule(sigmas=sigmas.tolist())
        assert torch.equal(again[0], sigmas)
        assert torch.equal(again[1], timesteps)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_frames": 7}, InvalidRequestError, r"1 more than a multiple of 4.*'num_frames'.*Send 5 or 9"),
        ({"num_frames": 0}, InvalidRequestError, r"at least 1.*'num_frames'"),
        ({"num_frames": 261}, LimitExceededError, r"at most 257.*'num_frames'"),
        ({"num_frames": 129}, InvalidRequestError, r"position embeddings end at 32.*'num_frames'"),
        ({"height": 40}, InvalidRequestError, r"multiple of 16.*'height'.*Send 32 or 48"),
        ({"height": 528, "width": 16}, InvalidRequestError, r"position embeddings end at 32.*'height'"),
        ({"height": 512, "width": 512, "num_frames": 21}, LimitExceededError, r"a latent of 393216 numbers"),
        ({"guidance_scale_2": 3.0}, InvalidRequestError, r"no use for guidance_scale_2"),
        ({"prompt": "a sentence of more than 24 letters"}, InvalidRequestError, r"reads at most 24"),
    ],
)
def test_what_the_model_can_not_do_is_refused_with_the_way_out(
    fields: dict[str, Any], error: type[EngineError], message: str
) -> None:
    config = EngineConfig(deterministic="off", limits=Limits(max_latent_elements=2**18))
    with pytest.raises(error, match=message):
        rollout_pipeline(wan_pipeline(), config=config)(**{"prompt": "x", "seed": 1, **SMALL, **fields})


def test_a_video_of_the_models_own_length_is_held_to_the_limit_too(pipeline: RolloutPipeline) -> None:
    family = pipeline.engine.family
    frames = family.defaults.num_frames
    assert frames is not None
    params = RolloutParams("x", seed=1, height=32, width=32, max_sequence_length=24)
    assert plan_request(family, Limits(max_num_frames=frames), "a", params, arrival=0).size == (32, 32, frames)
    with pytest.raises(LimitExceededError, match=rf"'num_frames', value {frames}"):
        plan_request(family, Limits(max_num_frames=frames - 1), "a", params, arrival=0)


def test_a_checkpoint_that_could_not_be_rolled_out_as_its_pipeline_does_is_refused() -> None:
    parts = wan_pipeline(boundary=BOUNDARY).components
    with pytest.raises(InvalidRequestError, match=r"no transformer_2, which it needs with boundary_ratio 0\.8"):
        family_for(WanPipeline(**{**parts, "transformer_2": None, "boundary_ratio": BOUNDARY}))
    for scheduler in (UniPCMultistepScheduler(), FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)):
        with pytest.raises(InvalidRequestError, match="without flow sigmas of its own, or that shifts them by size"):
            family_for(WanPipeline(**{**parts, "scheduler": scheduler}))
    with pytest.raises(InvalidRequestError, match="no use for num_frames"):
        RolloutPipeline(sd3_pipeline(), config=EngineConfig(deterministic="off"))("x", seed=1, num_frames=5)


def test_both_transformers_are_refitted_in_one_session_or_neither() -> None:
    pipeline = rollout_pipeline(copy.deepcopy(wan_pipeline(boundary=BOUNDARY)))
    before = pipeline("a cat", seed=3, **FULL)[0]
    new = {name: {k: t * 1.02 for k, t in m.state_dict().items()} for name, m in pipeline.transformers.items()}
    pipeline.begin_weight_update()
    pipeline.update_weights_from_tensor(new[FIRST].items(), module=FIRST)
    pipeline.update_weights_from_tensor(list(new[SECOND].items())[1:], module=SECOND)
    with pytest.raises(RefitRefusedError, match="transformer_2"):
        pipeline.end_weight_update()
    assert_same_bits(pipeline("a cat", seed=3, **FULL)[0], before)
    pipeline.begin_weight_update()
    for name, tensors in new.items():
        pipeline.update_weights_from_tensor(tensors.items(), module=name)
    pipeline.end_weight_update(weight_version="both")
    fresh = copy.deepcopy(wan_pipeline(boundary=BOUNDARY))
    fresh.transformer.load_state_dict(new[FIRST])
    fresh.transformer_2.load_state_dict(new[SECOND])
    after = pipeline("a cat", seed=3, **FULL)[0]
    assert_same_bits(after, rollout_pipeline(fresh)("a cat", seed=3, **FULL)[0])
    assert set(after.weight_versions) == {"both"}
    assert not torch.equal(outputs(after)[0], outputs(before)[0])


def test_an_adapter_of_the_second_transformer_is_in_force_at_its_steps(
    pipeline: RolloutPipeline, group: list[RolloutSample]
) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "transformer_2.blocks.0.attn1.to_q"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(4, 128, generator=generator) * 0.1,
        f"{name}.lora_B.weight": torch.randn(128, 4, generator=generator) * 0.1,
    }
    pipeline.load_lora_adapter_from_tensors("late", {"r": 4, "lora_alpha": 8, "target_modules": ["to_q"]}, tensors)
    adapted = pipeline("a cat", seed=3, lora_name="late", **FULL)[0]
    pipeline.unload_lora_adapter("late")
    same = [torch.equal(a, b) for a, b in zip(outputs(group[0]), outputs(adapted), strict=True)]
    assert same == [True, True, False, False]


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("service") / "log.txt"
    started = start_service({"model_path": str(folder)}, {"port": free_port()}, log)
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


def test_a_video_comes_over_every_wire(service: Service, group: list[RolloutSample]) -> None:
    for wire in ("json", "msgpack", "safetensors"):
        rows = service.client(wire).generate("a cat", seed=3, num_outputs_per_prompt=2, fps=16, **FULL)
        for one, other in zip(group, rows, strict=True):
            assert_same_bits(one, other)
            assert other.generated_output is not None
            assert other.generated_output.shape == (3, 5, 32, 32)
            assert other.num_frames == 5
            assert other.rollout_step_transformers == (FIRST, FIRST, SECOND, SECOND)
            assert (other.guidance_scale, other.guidance_scale_2) == (4.0, 2.5)
    whole = service.client("msgpack").generate("a cat", seed=3, rollout_video_dtype="uint8", **FULL)[0]
    assert group[0].generated_output is not None
    assert torch.equal(whole.generated_output, (group[0].generated_output * 255).round().to(torch.uint8))  # type: ignore[arg-type]
    assert service.http.get("/health_generate").status_code == 200
    refused = service.generate({"prompt": "a cat", **FULL, "num_frames": 6})
    assert (refused.status_code, refused.json()["field"]) == (400, "num_frames")
    assert "5 or 9" in refused.json()["hint"]


def test_the_command_line_writes_the_video_its_frames_and_its_filmstrip(folder: Path, tmp_path: Path) -> None:
    asked = ["--prompt", "a cat", "-k", "1", "--steps", "3", "--height", "32", "--width", "48", "--num-frames", "5"]
    done = CliRunner().invoke(app, ["rollout", *asked, "--model", str(folder), "--out", str(tmp_path), "--fps", "10"])
    assert done.exit_code == 0, done.output
    (entry,) = json.loads((tmp_path / "summary.json").read_text())["samples"]
    assert entry["num_frames"] == 5
    with Image.open(tmp_path / entry["video"]) as video:
        assert (video.n_frames, video.size) == (5, (48, 32))  # type: ignore[attr-defined]
        video.load()
        assert video.info["duration"] == 100
    for name in ("frames", "filmstrip"):
        with Image.open(tmp_path / entry[name]) as strip:
            assert strip.width > 96
