"""Ranks that share a transformer's weights: real follower processes over gloo, and ranks that are threads of a test."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same_bits
from safetensors.torch import save as file_of
from tiny_models import (
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
from diffusion_rl.models import ModelFamily, families, family_for
from diffusion_rl.parallel.arrangement import Arrangement, arrange
from diffusion_rl.parallel.layout import Layout, check_heads, layout_of
from diffusion_rl.parallel.sharded_target import DTensorTarget
from diffusion_rl.parallel.tensor import TensorParallel
from diffusion_rl.rollout.certification import cache_of, make_exact, part_of, probe_batches
from diffusion_rl.rollout.compilation import refuse_compiled_ranks
from diffusion_rl.rollout.replay import replay
from diffusion_rl.sample import RolloutSample
from engine_control.config import ControlConfig
from engine_control.errors import (
    EngineDiedError,
    EngineError,
    EngineFaultError,
    InvalidRequestError,
    RefitRefusedError,
)
from engine_control.groups import Rendezvous
from engine_control.refit.backends.base import WeightItem
from engine_control.refit.session import RefitSession

CPU = torch.device("cpu")
TWO = ParallelConfig(tp_size=2)
FIELDS: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 2,
    "negative_prompt": "blurry",
    "guidance_scale": 4.0,
    "output_type": "latent",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "rollout_debug_mode": True,
}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a block that attends to the image twice, as SD3.5 has."""
    return str(save(sd3_pipeline(dual_attention=True), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone(folder: str) -> RolloutPipeline:
    return RolloutPipeline.from_config(EngineConfig(folder))


@pytest.fixture(scope="module")
def started(folder: str) -> Iterator[RolloutPipeline]:
    control = ControlConfig(enable_memory_saver=True)
    with RolloutPipeline.from_config(EngineConfig(folder, parallel=TWO, deterministic="on", control=control)) as made:
        yield made


@pytest.fixture
def two(started: RolloutPipeline, alone: RolloutPipeline) -> Iterator[RolloutPipeline]:
    """Two ranks with the weights of `alone`, before and after."""
    yield started
    started.resume_memory_occupation()
    started.refit(dict(alone.transformer.state_dict()))


@pytest.fixture(scope="module")
def fresh(alone: RolloutPipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutPipeline]:
    """Two ranks that were started from a checkpoint with other weights."""
    pipeline = copy.deepcopy(alone.engine.family.pipeline)
    pipeline.transformer.load_state_dict(trained(alone))
    place = str(save(pipeline, tmp_path_factory.mktemp("trained")))
    with RolloutPipeline.from_config(EngineConfig(place, parallel=TWO)) as made:
        yield made


def trained(alone: RolloutPipeline) -> Weights:
    return {name: tensor * 1.02 for name, tensor in alone.transformer.state_dict().items()}


def final(samples: list[RolloutSample]) -> torch.Tensor:
    return torch.stack([s.generated_latents for s in samples if s.generated_latents is not None])


def factors(alone: RolloutPipeline) -> Weights:
    """Pairs for a layer that is split along its outputs, for one along its inputs, and for a whole one."""
    generator, found = torch.Generator().manual_seed(0), {}
    for layer in ("attn.to_q", "ff.net.2", "norm1.linear"):
        name = f"transformer_blocks.0.{layer}"
        n, k = alone.transformer.get_submodule(name).weight.shape  # type: ignore[union-attr,misc]
        found[f"{name}.lora_A.weight"] = torch.randn(4, k, generator=generator) * 0.05
        found[f"{name}.lora_B.weight"] = torch.randn(n, 4, generator=generator) * 0.05
    return found


def test_samples_of_two_ranks_are_those_of_one_device_up_to_rounding(
    two: RolloutPipeline, alone: RolloutPipeline
) -> None:
    one, other = (pipeline(["cat", "a red ball"], seed=1, **FIELDS) for pipeline in (alone, two))
    assert torch.allclose(final(one), final(other), atol=1e-4)
    for a, b in zip(one, other, strict=True):
        assert a.rollout_log_probs is not None
        assert b.rollout_log_probs is not None
        assert torch.allclose(a.rollout_log_probs, b.rollout_log_probs, atol=1e-5)
    described: Any = two.engine.describe()
    assert described["parallel"]["tp_size"] == len(described["parallel"]["ranks"]) == 2
    assert all(rank["bytes_sent"] > 0 for rank in described["parallel"]["ranks"])
    assert described["deterministic"]["enabled"]
    assert "weights over 2 ranks" in described["deterministic"]["table"][-1]["operation"]
    assert two.control_command("world_size") == 2


def test_a_samples_bits_at_two_ranks_do_not_depend_on_its_batch(two: RolloutPipeline) -> None:
    mixed = two(["dog", "a cat on a mat", "x"], seed=5, num_outputs_per_prompt=3, **FIELDS)
    for index, prompt in enumerate(("dog", "a cat on a mat", "x")):
        assert_same_bits(two(prompt, seed=5 + 3 * index, **FIELDS)[0], mixed[3 * index])
    pair = two("x", seed=12, num_outputs_per_prompt=2, **{**FIELDS, "rollout_sde_type": "cps"})
    assert_same_bits(two("x", seed=13, **{**FIELDS, "rollout_sde_type": "cps"})[0], pair[1])


def test_checksums_and_values_are_those_of_whole_weights(two: RolloutPipeline, alone: RolloutPipeline) -> None:
    for command in ("get_weights_checksum", "weights_checker"):
        assert two.control_command(command) == alone.control_command(command)
    for name in ("transformer_blocks.1.attn.to_out.0.weight", "transformer_blocks.1.ff.net.0.proj.bias"):
        assert two.get_weights_by_name(name) == alone.get_weights_by_name(name)


def test_a_rank_holds_its_part_in_memory_of_that_size(two: RolloutPipeline, alone: RolloutPipeline) -> None:
    held = two.engine.weights._tensors()
    for name, whole in alone.transformer.named_parameters():
        split = any(part in name for part in (".attn.to_", ".attn.add_", ".attn2.to_", ".ff.", ".ff_context."))
        whole_bias = name.endswith(("to_out.0.bias", "to_add_out.bias", "net.2.bias"))
        share = 2 if split and not whole_bias else 1
        assert held[f"transformer.{name}"].untyped_storage().nbytes() * share == whole.nbytes, name


@pytest.mark.parametrize("staged", [False, True])
def test_a_refit_leaves_the_bits_of_an_engine_started_from_that_checkpoint(
    two: RolloutPipeline, alone: RolloutPipeline, fresh: RolloutPipeline, staged: bool
) -> None:
    before = two("cat", seed=1, **FIELDS)
    answer = two.refit(trained(alone), weight_version="new", staged=staged)  # with a manifest, which is checked
    assert two.get_weights_checksum() == fresh.get_weights_checksum()
    after = two("cat", seed=1, **FIELDS)
    assert after[0].weight_versions == ("new",) * 2
    assert_same_bits(after[0], fresh("cat", seed=1, **FIELDS)[0])
    assert not torch.equal(final(before), final(after))
    assert answer["digest"] == fresh.refit(trained(alone))["digest"]


def test_a_refit_that_fails_on_one_rank_alone_is_undone_on_both(two: RolloutPipeline, alone: RolloutPipeline) -> None:
    sums, new = two.get_weights_checksum(), trained(alone)
    last = "transformer_blocks.1.attn.to_q.weight"
    broken = {**new, last: new[last].clone()}
    broken[last][-1, -1] = torch.nan  # in rank 1's part
    with pytest.raises(EngineError, match="NaN"):
        two.refit(broken)
    less = {name: tensor for name, tensor in new.items() if name != last}
    other = {**new, last: new[last] + 1}
    for theirs, message in ((less, "never came"), (other, "received different weights"), (broken, "NaN")):
        two.begin_weight_update()
        info = {"safetensors": [file_of(new), file_of(theirs)]}
        with pytest.raises(EngineError, match=message):
            _refit_by(two, info)
        if two.control_state()["session"] is not None:
            two.abort_weight_update()
        assert two.get_weights_checksum() == sums


def test_a_refit_reads_back_what_it_wrote(two: RolloutPipeline, alone: RolloutPipeline) -> None:
    sums = two.get_weights_checksum()
    two.begin_weight_update()
    two.update_weights_from_tensor(trained(alone).items())
    with torch.no_grad():
        weight: Any = two.transformer.get_submodule("transformer_blocks.0.attn.to_q").weight
        weight.to_local()[0, 0] += 1
    with pytest.raises(EngineFaultError, match=r"'transformer_blocks\.0\.attn\.to_q\.weight'.*another tensor lies"):
        two.end_weight_update()
    assert two.get_weights_checksum() == sums


def test_a_call_that_a_rank_refuses_leaves_nothing_to_verify_of_its_part(alone: RolloutPipeline) -> None:
    family = family_for(copy.deepcopy(alone.engine.family.pipeline))
    ranks = TensorParallel(1, 2)
    family.split_weights(ranks, "cpu")
    target = DTensorTarget({"transformer": family.transformer}, ranks)
    session, new = RefitSession(target, ["transformer"], partial=True), trained(alone)
    first, second = "transformer_blocks.0.attn.to_q.weight", "transformer_blocks.0.ff.net.2.weight"
    before = target.own_part("transformer", first)
    with pytest.raises(RefitRefusedError, match="NaN"):
        session.update([WeightItem(None, first, new[first]), WeightItem(None, second, new[second] * torch.nan)])
    assert torch.equal(target.own_part("transformer", first), before)
    session.update([WeightItem(None, second, new[second])])
    assert list(session.verify()) == [f"transformer.{second}"]
    session.commit()
    whole = target.own_part("transformer", second)
    assert torch.equal(whole[:, 256:], new[second][:, 256:])
    assert not whole[:, :256].any()


def _refit_by(pipeline: RolloutPipeline, info: dict[str, Any]) -> None:
    pipeline.control_command("update_weights", transport="tensor", info=info)
    pipeline.end_weight_update()


def test_a_merged_adapter_is_that_of_one_device_and_comes_off_again(
    two: RolloutPipeline, alone: RolloutPipeline
) -> None:
    sums = alone.get_weights_checksum()
    for staged in (False, True):
        for pipeline in (two, alone):
            pipeline.begin_weight_update(staged=staged)
            pairs = factors(alone).items()
            pipeline.update_weights_from_tensor(pairs, weight_update_mode="lora_merge", lora_alpha=8)
            pipeline.end_weight_update()
        assert two.get_weights_checksum() == alone.get_weights_checksum() != sums
        for pipeline in (two, alone):
            assert pipeline.unmerge_lora()["tensors"] == 3
            assert pipeline.get_weights_checksum() == sums
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q"]}
    with pytest.raises(InvalidRequestError, match="shared by ranks takes no adapters"):
        two.load_lora_adapter_from_tensors("policy", config, factors(alone))


def test_sleep_frees_the_parts_and_waking_brings_every_bit_back(two: RolloutPipeline, alone: RolloutPipeline) -> None:
    before = two("cat", seed=1, **FIELDS)
    freed = two.control_command("release_memory_occupation", tags=["weights"], backup=True)
    split: Any = two.transformer.get_submodule("transformer_blocks.0.attn.to_q").weight
    assert not split.to_local().any()  # on a CPU, memory that was given back reads as zeros
    two.resume_memory_occupation()
    assert_same_bits(two("cat", seed=1, **FIELDS)[0], before[0])
    parts = sum(t.nbytes for t in two.engine.weights._tensors().values())
    assert freed["bytes_freed"] == 2 * parts  # as many on each rank
    two.release_memory_occupation(backup=False)
    two.resume_memory_occupation()
    two.refit(dict(alone.transformer.state_dict()))
    assert_same_bits(two("cat", seed=1, **FIELDS)[0], before[0])
    two.control_command("weights_checker", action="reset_tensors")
    zero = "transformer_blocks.0.attn.to_q.weight"
    assert two.get_weights_by_name(zero) != alone.get_weights_by_name(zero)
    two.refit(dict(alone.transformer.state_dict()))
    assert two.get_weights_checksum() == alone.get_weights_checksum()


def test_a_rank_that_dies_ends_the_call_and_the_commands_after_it(fresh: RolloutPipeline) -> None:
    described: Any = fresh.engine.describe()["parallel"]

    def kill(done: int, total: int) -> None:
        if done == 5:
            os.kill(described["ranks"][1]["process_id"], signal.SIGKILL)

    with pytest.raises(EngineDiedError, match="rank 1 of the engine was killed by SIGKILL"):
        fresh("cat", seed=1, **{**FIELDS, "num_inference_steps": 200}, progress=kill)
    with pytest.raises(EngineDiedError, match="rank 1"):
        fresh.get_weights_checksum()


@dataclass
class Rank:
    """One rank of several that are threads."""

    family: ModelFamily
    arrangement: Arrangement


def on_ranks(
    pipeline: Any, layout: Layout, place: Path, work: Callable[[Rank], Any], *, certified: bool = False
) -> list[Any]:
    """What `work` answers on each rank of the layout, with a copy of the pipeline of its own."""
    made = [family_for(copy.deepcopy(pipeline)) for _ in range(layout.ranks)]
    for rank, family in enumerate(made):
        family.split_weights(TensorParallel(layout.place(rank).part, layout.tp_size), "cpu")
        if certified:
            make_exact(family, "on", cache=cache_of(EngineConfig()))

    def run(rank: int) -> Any:
        family, meeting = made[rank], Rendezvous(str(place / "store"), layout.ranks, timeout_s=30)

        def join(name: str, place: int, size: int) -> Any:
            return meeting.join(name, place, size, CPU, shared_device=False)

        spec, tensor = family.sequence_spec, family.tensor
        arranged = arrange(
            rank, layout, family.transformers.values(), spec, guidance="batched", join=join, tensor=tensor
        )
        return work(Rank(family, arranged))

    with ThreadPoolExecutor(layout.ranks) as pool:
        return list(pool.map(run, range(layout.ranks)))


BUILDERS: dict[str, Callable[[], Any]] = {
    "FluxPipeline": flux_pipeline,
    "StableDiffusion3Pipeline": lambda: sd3_pipeline(dual_attention=True),
    "QwenImagePipeline": lambda: qwen_image_pipeline(heads=4),
    "QwenImageEditPipeline": lambda: qwen_image_edit_pipeline(heads=4),
    "QwenImageEditPlusPipeline": qwen_image_edit_plus_pipeline,
    "ZImagePipeline": z_image_pipeline,
    "WanPipeline": lambda: wan_pipeline(boundary=0.9),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, Layout(1, 1, 2)) for name in families.names()),
        ("flux", Layout(2, 1, 2)),
        ("qwen_image", Layout(2, 1, 2)),
        ("z_image", Layout(2, 1, 2)),
        ("wan", Layout(2, 1, 2)),
        ("stable_diffusion3", Layout(1, 2, 2)),
    ],
    ids=str,
)
def test_every_family_is_split_and_all_ranks_hold_the_same_bits(name: str, layout: Layout, tmp_path: Path) -> None:
    pipeline = BUILDERS[families.get(name).pipeline_class_name]()
    whole = family_for(pipeline)
    whole.defaults = replace(whole.defaults, height=64, width=64)
    batch = probe_batches(whole)[-1]
    with torch.no_grad():
        expected = whole.predict(batch)

    @torch.no_grad()
    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        one = rank.family.predict(part_of(batch, 1, 2), arrangement=rank.arrangement)
        return rank.family.predict(batch, arrangement=rank.arrangement), one

    answers = on_ranks(pipeline, layout, tmp_path, work)
    for together, one in answers:
        assert torch.equal(together, answers[0][0])
        assert torch.equal(together[1:2], one)
        assert torch.allclose(together, expected, atol=1e-5)


def test_a_layer_that_takes_two_layers_outputs_is_split_by_both_and_refitted_in_the_checkpoints_order(
    tmp_path: Path,
) -> None:
    pipeline = flux_pipeline()
    before = dict(pipeline.transformer.state_dict())
    after = {name: tensor * 1.02 for name, tensor in before.items()}
    name = "single_transformer_blocks.0.proj_out.weight"

    def work(rank: Rank) -> tuple[Weights, Weights, torch.Tensor]:
        assert rank.family.tensor is not None
        target = DTensorTarget({"transformer": rank.family.transformer}, rank.family.tensor)
        found = []
        for new in (None, after):
            if new is not None:
                session = RefitSession(target, ["transformer"], partial=True)
                session.update([WeightItem(None, key, tensor) for key, tensor in new.items()])
                session.verify()
                session.commit()
            target.begin(["transformer"])
            found.append({key: tensor.clone() for key, tensor in target.checkpoint_tensors("transformer").items()})
            own = target.own_part("transformer", name)
            target.finish(["transformer"])
        return found[0], found[1], own

    answers = on_ranks(pipeline, Layout(1, 1, 2), tmp_path, work)
    for first, second, _ in answers:
        assert all(torch.equal(first[key], before[key]) for key in before)
        assert all(torch.equal(second[key], after[key]) for key in before)
    assert torch.equal(answers[0][2] + answers[1][2], after[name])
    assert answers[0][2][:, :64].all()  # of 128 inputs from the attention
    assert answers[0][2][:, 128 : 128 + 256].all()  # and of 512 from the feed-forward


def test_a_norm_over_a_width_that_is_split_has_the_gradients_of_one_device(tmp_path: Path) -> None:
    pipeline = wan_pipeline(layers=1)
    whole = family_for(copy.deepcopy(pipeline))
    whole.defaults = replace(whole.defaults, height=64, width=64)
    batch = part_of(probe_batches(whole)[0], 0, 2)

    def gradients(family: ModelFamily, arrangement: Arrangement | None = None) -> Weights:
        family.predict(batch, arrangement=arrangement).square().sum().backward()  # type: ignore[no-untyped-call]
        named: Any = family.transformer.named_parameters()
        return {n: p.grad for n, p in named if p.grad is not None}

    expected = gradients(whole)
    answers = on_ranks(pipeline, Layout(1, 1, 2), tmp_path, lambda rank: gradients(rank.family, rank.arrangement))
    for part, grads in enumerate(answers):
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            mine: Any = grad
            wanted = expected[name]
            if hasattr(mine, "placements") and mine.placements[0].is_shard():
                wanted, mine = wanted.chunk(2, dim=mine.placements[0].dim)[part], mine.to_local()
            mine = mine.to_local() if hasattr(mine, "to_local") else mine
            assert torch.allclose(mine, wanted, atol=1e-4 * float(wanted.abs().max())), name


def test_ranks_of_a_trainer_replay_with_a_ratio_of_exactly_1_and_have_the_gradients_of_one_device(
    two: RolloutPipeline, alone: RolloutPipeline, tmp_path: Path
) -> None:
    samples = two("cat", seed=8, num_outputs_per_prompt=2, **FIELDS)
    rolled_out = torch.stack([s.rollout_log_probs for s in samples if s.rollout_log_probs is not None])
    with pytest.raises(InvalidRequestError, match="rank 0 can't replay alone"):
        two.replay(samples)
    with pytest.raises(InvalidRequestError, match="split over 2 ranks and this transformer's over 1"):
        two.replay(samples, transformer=alone.transformer)

    def scored(family: ModelFamily) -> tuple[torch.Tensor, Weights]:
        log_probs = replay(family, samples)
        log_probs.sum().backward()  # type: ignore[no-untyped-call]
        named: Any = family.transformer.named_parameters()
        return log_probs.detach(), {n: p.grad for n, p in named if p.grad is not None}

    whole = family_for(copy.deepcopy(alone.engine.family.pipeline))
    _, expected = scored(whole)
    pipeline = alone.engine.family.pipeline
    answers = on_ranks(pipeline, Layout(1, 1, 2), tmp_path, lambda rank: scored(rank.family), certified=True)
    for part, (log_probs, grads) in enumerate(answers):
        assert torch.equal(log_probs, rolled_out)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            mine: Any = grad
            wanted = expected[name]
            if hasattr(mine, "placements") and mine.placements[0].is_shard():
                wanted = wanted.chunk(2, dim=mine.placements[0].dim)[part]
            local = mine.to_local() if hasattr(mine, "to_local") else mine
            assert torch.allclose(local, wanted, atol=1e-4 * float(wanted.abs().max())), name


def test_what_can_not_be_shared_is_refused_with_the_numbers() -> None:
    for heads, layout, field in ((8, Layout(1, 1, 3), "tp_size"), (8, Layout(8, 1, 2), "sp_degree")):
        with pytest.raises(InvalidRequestError, match=r"8 attention heads can't be shared by .* ranks") as refused:
            check_heads(heads, layout)
        assert refused.value.field == field
    family = family_for(copy.deepcopy(sd3_pipeline()))
    before = dict(family.transformer.state_dict())
    with pytest.raises(InvalidRequestError, match=r"8 attention heads of transformer_blocks\.0\.attn .* by 3 ranks"):
        family.split_weights(TensorParallel(0, 3), "cpu")
    assert all(torch.equal(t, before[name]) for name, t in family.transformer.state_dict().items())
    with pytest.raises(InvalidRequestError, match="compiled") as refused:
        refuse_compiled_ranks(layout_of(TWO))
    assert refused.value.field == "tp_size"
    with pytest.raises(InvalidRequestError, match="can't be shared") as refused:
        RolloutPipeline(sd3_pipeline(), config=EngineConfig(parallel=TWO))
    assert refused.value.field == "tp_size"
