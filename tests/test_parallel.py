"""Several ranks, one set of bits: real follower processes over gloo, on the tiny pipelines of every family."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same_bits
from tiny_models import flux_pipeline, qwen_image_pipeline, save, sd3_pipeline, wan_pipeline, z_image_pipeline

from diffusion_rl import RolloutPipeline
from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.parallel.layout import device_of, layout_of
from diffusion_rl.parallel.ranks import RanksDisagreeError
from diffusion_rl.params import params_from_mapping
from engine_control.errors import EngineDiedError, InvalidRequestError, NonFiniteOutputError, RequestAbortedError

KINDS = ("sde", "cps", "dance", "ode")
GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 4.0}
FULL: dict[str, Any] = {
    "height": 72,
    "width": 40,
    "num_inference_steps": 3,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "rollout_debug_mode": True,
}


@dataclass(frozen=True)
class Case:
    """A pipeline, how it is made, and the layout that its samples must not depend on."""

    build: Callable[[torch.dtype], Any]
    dtype: torch.dtype
    parallel: ParallelConfig

    def __str__(self) -> str:
        layout = layout_of(self.parallel)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.build.__name__}-{dtype}-sp{layout.sp_degree}-cfg{layout.cfg_degree}"


def sd3(dtype: torch.dtype) -> Any:
    """With a block that attends to the image twice, as SD3.5 has."""
    return sd3_pipeline(dtype, dual_attention=True)


def qwen(dtype: torch.dtype) -> Any:
    return qwen_image_pipeline(dtype, heads=4)


def wan(dtype: torch.dtype) -> Any:
    """With two transformers, of which the first computes the first step of three."""
    return wan_pipeline(dtype, boundary=0.9)


BOTH = ParallelConfig(sp_degree=2, enable_cfg_parallel=True)
CASES = [
    Case(flux_pipeline, torch.bfloat16, ParallelConfig(sp_degree=2)),
    Case(sd3, torch.float32, ParallelConfig(ulysses_degree=4)),
    Case(qwen, torch.float32, BOTH),
    Case(qwen, torch.bfloat16, ParallelConfig(enable_cfg_parallel=True)),
    Case(z_image_pipeline, torch.bfloat16, ParallelConfig(sp_degree=2)),
    Case(wan, torch.bfloat16, ParallelConfig(sp_degree=4)),
]


@dataclass
class Pair:
    """The same checkpoint on one device and on several ranks. Only SD3's picture grid is of 8 pixels."""

    case: Case
    alone: RolloutPipeline
    ranks: RolloutPipeline
    fields: dict[str, Any]

    def work(self) -> list[dict[str, Any]]:
        described: Any = self.ranks.engine.describe()["parallel"]
        ranks: list[dict[str, Any]] = described["ranks"]
        return ranks


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    case: Case = request.param
    folder = str(save(case.build(case.dtype), tmp_path_factory.mktemp("model")))
    dtype = str(case.dtype).removeprefix("torch.")
    alone = RolloutPipeline.from_config(EngineConfig(folder, dtype=dtype))
    size = {} if case.build is sd3 else {"height": 80, "width": 48}
    if case.build is wan:  # of 120 tokens, of which each of four ranks has as many as there are of text
        size |= {"width": 128, "num_frames": 9, "max_sequence_length": 30}
    config = EngineConfig(folder, dtype=dtype, parallel=case.parallel, deterministic="on")
    with RolloutPipeline.from_config(config) as ranks:
        yield Pair(case, alone, ranks, {**FULL, **size})


def test_whatever_joins_leaves_or_fails_beside_it_every_kind_has_the_bits_of_one_device(pair: Pair) -> None:
    """One run: all step kinds at once, prompts of several lengths, a trunk that parts, an abort, a failure, a late
    request, and one without guidance."""
    loop, fields = pair.ranks._loop, {**pair.fields, **GUIDED}
    requests: dict[str, dict[str, Any]] = {
        kind: {
            **fields,
            "prompt": prompt,
            "seed": seed,
            "rollout_sde_type": kind,
            "num_outputs_per_prompt": 1 + seed % 2,
        }
        for seed, (kind, prompt) in enumerate(
            zip(KINDS, ("cat", "a red ball", "a cat on a mat beside a dog", "dog"), strict=True)
        )
    }
    trunk = {"init_same_noise": True, "rollout_sde_step_indices": (1,), "num_outputs_per_prompt": 2}
    requests["trunk"] = {**fields, "prompt": "a bird", "seed": 6, **trunk}
    requests["unguided"] = {**fields, "prompt": "cat", "seed": 7, "true_cfg_scale": 0.0}
    requests["late"] = {**fields, "prompt": "a bird", "seed": 8}
    rows = tuple((1e6, 1e6, 0.0, 1e6) for _ in range(8))
    bad = {"num_inference_steps": 8, "rollout_sde_type": "affine", "affine_coefficients": rows}
    others = {
        "gone": {**fields, "prompt": "dog", "seed": 1, "num_outputs_per_prompt": 2},
        "failing": {**fields, "prompt": "x", "seed": 2, **bad},
    }
    everything = {**requests, **others}
    answers = {name: loop.submit(name, params_from_mapping(everything[name])) for name in everything if name != "late"}

    def between_steps() -> None:
        if "late" not in answers:
            loop.abort("gone")
            answers["late"] = loop.submit("late", params_from_mapping(requests["late"]))

    loop.run_until_idle(between_steps)
    assert isinstance(answers["gone"].exception(), RequestAbortedError)
    assert isinstance(answers["failing"].exception(), NonFiniteOutputError)
    for name, request in requests.items():
        for one, other in zip(pair.alone(**request), answers[name].result(), strict=True):
            assert_same_bits(one, other)


def test_a_sample_of_a_large_batch_has_the_bits_of_a_single_sample_on_one_device(pair: Pair) -> None:
    fields = {**pair.fields, **GUIDED}
    single = pair.alone("dog", seed=27, **fields)
    for count in (8, 1):
        assert_same_bits(pair.ranks("dog", seed=28 - count, num_outputs_per_prompt=count, **fields)[-1], single[0])


def test_each_rank_does_its_share_and_no_more(pair: Pair) -> None:
    layout, before = layout_of(pair.case.parallel), pair.work()
    whole_before = pair.alone.engine.ranks.arrangement.work.tokens
    for pipeline in (pair.alone, pair.ranks):
        pipeline("cat", seed=1, **pair.fields, **GUIDED)
    whole = pair.alone.engine.ranks.arrangement.work.tokens - whole_before
    for rank_before, rank in zip(before, pair.work(), strict=True):
        done = rank["tokens"] - rank_before["tokens"]
        # Shares are padded to one size; and the two halves of guidance pad their texts apart.
        assert 0.9 < done * layout.ranks / whole < 1.25
        assert rank["bytes_sent"] > rank_before["bytes_sent"]


def test_a_replay_runs_on_one_rank_with_a_ratio_of_exactly_1(pair: Pair) -> None:
    ranks = pair.ranks("cat", seed=8, num_outputs_per_prompt=2, **pair.fields, **GUIDED)
    rolled_out = torch.stack([s.rollout_log_probs for s in ranks if s.rollout_log_probs is not None])
    kinds = [i for i, kind in enumerate(ranks[0].rollout_step_kinds) if kind != "ode"]
    assert torch.equal(pair.ranks.replay(ranks).detach(), rolled_out[:, kinds])


def test_the_table_names_the_layout(pair: Pair) -> None:
    table: Any = pair.ranks.engine.exactness.describe()["table"]
    layout = layout_of(pair.case.parallel)
    assert f"{layout.sp_degree} x {layout.cfg_degree} ranks" in table[-1]["operation"]
    assert table[-1]["implementation"] is not None


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(sd3_pipeline(), tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def two_ranks(tiny_folder: str) -> Iterator[RolloutPipeline]:
    parallel = ParallelConfig(sp_degree=2)
    with RolloutPipeline.from_config(EngineConfig(tiny_folder, parallel=parallel)) as pipeline:
        yield pipeline


def test_a_rank_that_dies_in_the_middle_ends_the_call_at_once(two_ranks: RolloutPipeline) -> None:
    follower = _follower_of(two_ranks)

    def kill(done: int, total: int) -> None:
        if done == 5:
            os.kill(follower, signal.SIGKILL)

    for _ in range(2):  # and whoever calls it again hears it too
        with pytest.raises(EngineDiedError, match="rank 1 of the engine was killed by SIGKILL"):
            two_ranks("cat", seed=1, num_inference_steps=200, progress=kill)


def test_ranks_that_hold_different_bits_hand_nothing_out(two_ranks: RolloutPipeline) -> None:
    def flip(done: int, total: int) -> None:
        for sample in two_ranks.engine._queue.samples:
            if sample.step == 1:
                sample.latents = sample.latents + 1e-6

    for _ in range(2):  # and whoever calls it again hears it too
        with pytest.raises(RanksDisagreeError, match="rank 1 holds other latents"):
            two_ranks("cat", seed=1, num_inference_steps=3, progress=flip)


def test_a_step_that_fails_on_rank_0_ends_the_group_and_no_later_call_meets_it_halfway(
    two_ranks: RolloutPipeline,
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no memory left")

    follower = _follower_of(two_ranks)
    hook = two_ranks.transformer.register_forward_pre_hook(fail)
    with pytest.raises(EngineDiedError, match=r"rank 0 failed in a step that all ranks share: .* no memory left"):
        two_ranks("cat", seed=1, num_inference_steps=3)
    hook.remove()
    with pytest.raises(EngineDiedError, match="no memory left"):
        two_ranks("cat", seed=1, num_inference_steps=3)
    assert not Path(f"/proc/{follower}").exists()


def test_a_follower_ends_with_its_pipeline_and_nothing_stays_behind(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RolloutPipeline.from_config(EngineConfig(tiny_folder, parallel=ParallelConfig(sp_degree=2))) as pipeline:
        follower = _follower_of(pipeline)
        assert not list(tmp_path.iterdir())  # not even while it runs: a killed process leaves nothing
        assert pipeline("cat", seed=1, num_inference_steps=2)
    assert not Path(f"/proc/{follower}").exists()


def test_one_device_splits_guidance_into_two_forwards_with_the_same_bits(tiny_folder: str) -> None:
    fields = {**FULL, **GUIDED, "seed": 2, "num_outputs_per_prompt": 2}
    batched = RolloutPipeline.from_config(EngineConfig(tiny_folder))
    split = RolloutPipeline.from_config(EngineConfig(tiny_folder, parallel=ParallelConfig(guidance="split")))
    for one, other in zip(batched("cat", **fields), split("cat", **fields), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(sp_degree=3), "8 attention heads can't be shared by 3 ranks"),
        (ParallelConfig(sp_degree=2, ring_degree=2), "ring attention"),
        (ParallelConfig(sp_degree=0), "at least 1"),
        (ParallelConfig(sp_degree=4, ulysses_degree=2), "ulysses_degree x ring_degree"),
    ],
)
def test_a_layout_that_can_not_be_is_refused_with_the_numbers(
    tiny_folder: str, parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        RolloutPipeline.from_config(EngineConfig(tiny_folder, parallel=parallel))


def test_more_ranks_than_gpus_are_refused_with_the_numbers() -> None:
    present = torch.cuda.device_count()
    with pytest.raises(InvalidRequestError, match=f"{present + 2} ranks .* and {present} are present"):
        device_of(0, "cuda", layout_of(ParallelConfig(sp_degree=present + 2)), share_device=False)


def test_a_pipeline_that_is_loaded_already_is_not_shared() -> None:
    with pytest.raises(InvalidRequestError, match="can't be shared"):
        RolloutPipeline(sd3_pipeline(), config=EngineConfig(parallel=ParallelConfig(sp_degree=2)))


def _follower_of(pipeline: RolloutPipeline) -> int:
    described: Any = pipeline.engine.describe()["parallel"]
    process_id: int = described["ranks"][1]["process_id"]
    return process_id
