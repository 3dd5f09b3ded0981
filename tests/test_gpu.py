"""The promises on a GPU. Skipped without one; the numbers for full-size shapes come from benchmarks/."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from equality import assert_same_bits
from tiny_models import (
    a_picture,
    flux_pipeline,
    qwen_image_edit_pipeline,
    qwen_image_edit_plus_pipeline,
    qwen_image_pipeline,
    save,
    sd3_pipeline,
    wan_pipeline,
    z_image_pipeline,
)

from diffusion_rl import RolloutPipeline
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.noise import NoiseStream, normal_noise, random_words
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.transfer import HostCopies
from rl_kernels import exact_mode, linear, row_sum
from rl_kernels.settings import PROCESS_SETTINGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FULL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 4,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


def wan_two(dtype: torch.dtype) -> Any:
    """A video model with two transformers, each of which computes two of four steps."""
    return wan_pipeline(dtype, boundary=0.8)


def fields_for(build: Any) -> dict[str, Any]:
    if build is wan_two:
        return {**FULL, "num_frames": 5, "max_sequence_length": 24}
    return {**FULL, "image": a_picture(64, 64)} if build in EDITING else FULL


EDITING = [qwen_image_edit_pipeline, qwen_image_edit_plus_pipeline]
BUILDS = [sd3_pipeline, qwen_image_pipeline, z_image_pipeline, flux_pipeline, wan_two, *EDITING]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", ["sde", "cps", "dance", "ode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sample_has_the_same_bits_alone_in_a_group_and_replayed(build: Any, kind: str, dtype: torch.dtype) -> None:
    pipeline = RolloutPipeline(copy.deepcopy(build(dtype)).to("cuda"))
    if not pipeline.engine.exactness.enabled:
        pytest.skip(f"not certified here: {pipeline.engine.exactness.describe()['refused']}")
    fields = {**fields_for(build), "rollout_sde_type": kind, "negative_prompt": "blurry", "true_cfg_scale": 4.0}
    group = pipeline(["a red ball", "cat"], seed=3, num_outputs_per_prompt=4, **fields)
    for index, prompt in ((1, "a red ball"), (6, "cat")):
        alone = pipeline(prompt, seed=3 + index, **fields)[0]
        assert_same_bits(group[index], alone)
    if kind != "ode":
        steps = [i for i, k in enumerate(group[0].rollout_step_kinds) if k != "ode"]
        rolled_out = torch.stack([s.rollout_log_probs[steps] for s in group if s.rollout_log_probs is not None])
        scored = pipeline.replay(group)
        assert scored.requires_grad
        assert torch.equal(scored.detach().cpu(), rolled_out)
        assert torch.equal(pipeline.replay(group[5:6]).detach().cpu(), rolled_out[5:6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_ode_step_is_diffusers_own_step(dtype: torch.dtype) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10, device="cuda")
    x, v = (torch.randn(10, 16, 8, 8, device="cuda").to(dtype) for _ in range(2))
    terms = step_kinds.get("ode").schedule_terms(scheduler.sigmas.cpu(), noise_level=0.0)
    columns = type(terms).from_columns(terms.columns().cuda())
    mean, _ = step_kinds.get("ode").transition(x, v, columns)
    for step, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(v[step : step + 1], timestep, x[step : step + 1]).prev_sample
        assert torch.equal(mean[step : step + 1].to(dtype), theirs), step


def test_the_random_integers_are_the_cpus_and_the_normals_too_up_to_the_last_bit() -> None:
    seeds, steps = [1, 2**63 + 5, 7], [0, 3, 9]
    assert torch.equal(
        random_words(seeds, NoiseStream.STEP, steps, 4096, "cuda").cpu(),
        random_words(seeds, NoiseStream.STEP, steps, 4096),
    )
    gpu, cpu = (normal_noise(seeds, NoiseStream.STEP, steps, (16, 64, 64), d).cpu() for d in ("cuda", "cpu"))
    torch.testing.assert_close(gpu, cpu, atol=1e-6, rtol=1e-6)
    assert (gpu != cpu).float().mean() < 1e-4


def test_the_library_switches_are_set_inside_and_restored_outside() -> None:
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda

    def switches() -> tuple[object, ...]:
        return (
            cuda.preferred_blas_library(),
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_tf32,
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        )

    before = switches()
    with exact_mode():
        inside = switches()
        with exact_mode():
            pass
        assert switches() == inside
        assert PROCESS_SETTINGS.active
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
        assert not cuda.flash_sdp_enabled()
    assert switches() == before
    with pytest.raises(RuntimeError), exact_mode():
        torch.ones(2, device="cuda") @ torch.ones(3, device="cuda")
    assert switches() == before
    assert not PROCESS_SETTINGS.active


@pytest.mark.parametrize(("k", "n"), [(1536, 1536), (1536, 6144), (6144, 1536), (256, 1536), (4096, 1536)])
def test_a_row_of_a_linear_layer_has_the_same_bits_at_every_row_count(k: int, n: int) -> None:
    x, w, b = (torch.randn(*s, device="cuda").bfloat16() for s in ((4096, k), (n, k), (n,)))
    with exact_mode():
        whole = linear(x, w, b)
        for rows in (1, 2, 3, 5, 8, 16, 48, 205, 410, 1024, 3000):
            for start in (0, 77):
                assert torch.equal(linear(x[start : start + rows], w, b), whole[start : start + rows]), (rows, start)


def test_attention_does_not_depend_on_the_batch_or_the_heads() -> None:
    q, k, v = (torch.randn(8, 24, 1229, 64, device="cuda").bfloat16() for _ in range(3))
    with exact_mode():
        whole = F.scaled_dot_product_attention(q, k, v)
        for part in (slice(0, 1), slice(1, 3), slice(2, 5)):
            assert torch.equal(F.scaled_dot_product_attention(q[part], k[part], v[part]), whole[part])
        heads = F.scaled_dot_product_attention(q[:, :6], k[:, :6], v[:, :6])
        assert torch.equal(heads, whole[:, :6])


def test_a_row_sum_does_not_depend_on_the_batch() -> None:
    x = torch.randn(24, 65536, device="cuda")
    assert torch.equal(row_sum(x[5:6]), row_sum(x)[5:6])


@pytest.mark.parametrize("build", BUILDS)
def test_replayed_cuda_graphs_have_the_bits_of_eager_forwards(build: Any) -> None:
    pipelines = [
        RolloutPipeline(copy.deepcopy(build(torch.bfloat16)).to("cuda"), config=EngineConfig(cuda_graphs=graphs))
        for graphs in (True, False)
    ]
    runner = pipelines[0].engine.family.runner
    assert isinstance(runner, CudaGraphs)
    fields = {**fields_for(build), "negative_prompt": "blurry", "true_cfg_scale": 4.0}
    for count in (1, 3):
        replayed, eager = (p("a cat", seed=5, num_outputs_per_prompt=count, **fields) for p in pipelines)
        for one, other in zip(replayed, eager, strict=True):
            assert_same_bits(one, other)
    # What tells that model's clean tokens from the others is copied from the host in its forward: no graph holds that.
    assert runner.replayed > 0 or build is qwen_image_edit_plus_pipeline


def test_weights_that_are_written_in_place_are_read_by_the_next_replay() -> None:
    pipeline = RolloutPipeline(copy.deepcopy(sd3_pipeline(torch.bfloat16)).to("cuda"))
    runner = pipeline.engine.family.runner
    assert isinstance(runner, CudaGraphs)
    before = pipeline("cat", seed=1, **FULL)[0]
    with torch.no_grad():
        for parameter in pipeline.transformer.parameters():
            parameter.mul_(1.01)
    fresh = RolloutPipeline(copy.deepcopy(pipeline.engine.family.pipeline), config=EngineConfig(cuda_graphs=False))
    replayed = runner.replayed
    after = pipeline("cat", seed=1, **FULL)[0]
    assert runner.replayed > replayed
    assert_same_bits(after, fresh("cat", seed=1, **FULL)[0])
    assert not torch.equal(after.generated_latents, before.generated_latents)


@pytest.mark.parametrize("build", [sd3_pipeline, qwen_image_pipeline])
def test_nobody_waits_for_the_device_inside_a_step(build: Any) -> None:
    pipeline = RolloutPipeline(build(torch.bfloat16).to("cuda"))
    fields = {**FULL, "negative_prompt": "blurry", "true_cfg_scale": 4.0, "seed": 3, "num_outputs_per_prompt": 2}
    expected = pipeline("cat", **fields)  # with what is done once: graphs, constants, autotuning
    pipeline("cat", **fields)
    engine = pipeline.engine
    engine.add_request("one", RolloutParams("cat", **fields))
    engine.step()  # encodes the prompt, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            assert not engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    result = None
    while engine.has_unfinished_requests():
        for finished in engine.step():
            result = finished.result
    assert result is not None
    for one, other in zip(result, expected, strict=True):
        assert_same_bits(one, other)


def test_a_copy_holds_what_was_there_when_it_was_begun() -> None:
    device = torch.device("cuda")
    copies, made = HostCopies(device), []
    for value in range(50):
        source = torch.full((1 << 20,), float(value), device=device)
        made.append(copies.copy(source))
        del source  # its memory is free for the next one, which must not overtake the copy
    copies.landing().wait()
    assert all(copy.is_pinned() and (copy == value).all() for value, copy in enumerate(made))


def test_a_forward_too_large_to_gain_by_it_is_never_captured() -> None:
    pipeline = RolloutPipeline(copy.deepcopy(sd3_pipeline(torch.bfloat16)).to("cuda"))
    pipeline.engine.family.runner = small = CudaGraphs(max_tokens=1)
    pipeline("cat", seed=1, **FULL)
    assert (small.captured, small.replayed) == (0, 0)


@pytest.mark.parametrize("parallel", [{"sp_degree": 2}, {"enable_cfg_parallel": True}], ids=str)
def test_ranks_that_share_one_gpu_have_the_bits_of_one_device(parallel: Any, tmp_path: Path) -> None:
    folder = str(save(copy.deepcopy(sd3_pipeline(torch.bfloat16, dual_attention=True)), tmp_path))
    alone = RolloutPipeline.from_config(EngineConfig(folder, dtype="bfloat16", device="cuda"))
    shared = ParallelConfig(**parallel, share_device=True)
    with RolloutPipeline.from_config(EngineConfig(folder, dtype="bfloat16", device="cuda", parallel=shared)) as ranks:
        assert ranks.engine.exactness.enabled
        for pipelines in (alone, ranks):
            pipelines("a dog", seed=1, num_outputs_per_prompt=3, **FULL)
        for one, other in zip(alone("cat", seed=4, **FULL), ranks("cat", seed=4, **FULL), strict=True):
            assert_same_bits(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", [{"sp_degree": 2}, {"enable_cfg_parallel": True}], ids=str)
def test_ranks_on_gpus_of_their_own_have_the_bits_of_one_device(parallel: Any, tmp_path: Path) -> None:
    folder = str(save(copy.deepcopy(sd3_pipeline(torch.bfloat16, dual_attention=True)), tmp_path))
    alone = RolloutPipeline.from_config(EngineConfig(folder, dtype="bfloat16", device="cuda"))
    config = EngineConfig(folder, dtype="bfloat16", device="cuda", parallel=ParallelConfig(**parallel))
    with RolloutPipeline.from_config(config) as ranks:
        for _ in range(2):
            for one, other in zip(alone("cat", seed=4, **FULL), ranks("cat", seed=4, **FULL), strict=True):
                assert_same_bits(one, other)


SHARED_WEIGHTS = [
    ParallelConfig(tp_size=2, share_device=True),
    pytest.param(
        ParallelConfig(tp_size=2), marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    ),
    pytest.param(
        ParallelConfig(tp_size=2, sp_degree=2),
        marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    ),
]


@pytest.mark.parametrize("parallel", SHARED_WEIGHTS, ids=str)
def test_ranks_that_share_weights_have_one_set_of_bits_and_are_refitted(parallel: Any, tmp_path: Path) -> None:
    folder = str(save(copy.deepcopy(sd3_pipeline(torch.bfloat16, dual_attention=True)), tmp_path / "model"))
    alone = RolloutPipeline.from_config(EngineConfig(folder, dtype="bfloat16", device="cuda"))
    config = EngineConfig(folder, dtype="bfloat16", device="cuda", parallel=parallel, deterministic="on")
    new = {name: tensor * 1.02 for name, tensor in alone.transformer.state_dict().items()}
    with RolloutPipeline.from_config(config) as ranks:
        before = alone("cat", seed=4, **FULL)[0], ranks("cat", seed=4, **FULL)[0]
        pictures = [sample.generated_output.float() for sample in before if sample.generated_output is not None]
        assert torch.allclose(*pictures, atol=0.05)
        assert_same_bits(ranks(["dog", "cat"], seed=2, num_outputs_per_prompt=2, **FULL)[2], before[1])
        assert ranks.get_weights_checksum() == alone.get_weights_checksum()
        for pipeline in (alone, ranks):
            pipeline.refit(new)
        assert ranks.get_weights_checksum() == alone.get_weights_checksum()
        refitted = ranks("cat", seed=4, **FULL)[0]
    alone.engine.family.pipeline.save_pretrained(tmp_path / "new")
    config = EngineConfig(str(tmp_path / "new"), "bfloat16", "cuda", parallel=parallel)
    with RolloutPipeline.from_config(config) as fresh:
        assert_same_bits(fresh("cat", seed=4, **FULL)[0], refitted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_whose_ranks_had_gpus_of_their_own_ends_by_itself(tmp_path: Path) -> None:
    folder = str(save(copy.deepcopy(sd3_pipeline(torch.bfloat16)), tmp_path))
    lines = (
        "from diffusion_rl import RolloutPipeline",
        "from diffusion_rl.config import EngineConfig, ParallelConfig",
        f"config = EngineConfig({folder!r}, dtype='bfloat16', device='cuda', parallel=ParallelConfig(sp_degree=2))",
        "with RolloutPipeline.from_config(config) as pipeline:",
        "    pipeline('cat', seed=4, height=64, width=64, num_inference_steps=2)",
        "kept = pipeline  # until the interpreter ends",
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, check=True, timeout=120)
