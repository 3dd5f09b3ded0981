"""Layerwise offload: blocks come and go, and nobody could tell from the bits. What needs a GPU is in
`test_gpu_control.py`; on a CPU the slots are memory of their own too, so everything but streams and pinning is real."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import flux_pipeline, qwen_image_pipeline, save, sd3_pipeline, wan_pipeline, z_image_pipeline

from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models.offload import LayerwiseOffload, offload_of
from diffusion_rl.params import params_from_mapping
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.rollout.certification import probe_batch
from diffusion_rl.sample import RolloutSample
from engine_control.config import ControlConfig
from engine_control.errors import ConflictError, EngineError, InvalidRequestError

BLOCKS = 5
FIELDS: dict[str, Any] = {
    "seed": 3,
    "num_inference_steps": 2,
    "num_outputs_per_prompt": 2,
    "height": 32,
    "width": 32,
    "guidance_scale": 3.0,
    "output_type": "both",
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}
Weights = dict[str, torch.Tensor]


def deep_sd3() -> Any:
    """The tiny SD3 with more blocks than slots."""
    return sd3_pipeline(layers=BLOCKS)


def two_transformers() -> Any:
    """A tiny Wan whose first step is the first transformer's."""
    return wan_pipeline(boundary=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(deep_sd3(), tmp_path_factory.mktemp("models") / "deep")


def engine_of(folder: Path, offload: bool, **others: Any) -> RolloutPipeline:
    control = ControlConfig(enable_memory_saver=True)
    config = EngineConfig(str(folder), device="cpu", control=control, dit_layerwise_offload=offload, **others)
    return RolloutPipeline.from_config(config)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[RolloutPipeline]:
    with engine_of(folder, False) as made:
        yield made


@pytest.fixture(scope="module")
def offloaded(folder: Path) -> Iterator[RolloutPipeline]:
    with engine_of(folder, True) as made:
        yield made


@pytest.fixture(scope="module")
def fresh(plain: RolloutPipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutPipeline]:
    """An engine without offload that has loaded what `trained` makes of the first weights."""
    pipeline = copy.deepcopy(plain.engine.family.pipeline)
    pipeline.transformer.load_state_dict(trained(weights_of(plain)))
    with engine_of(save(pipeline, tmp_path_factory.mktemp("models") / "trained"), False) as made:
        yield made


@pytest.fixture
def pair(plain: RolloutPipeline, offloaded: RolloutPipeline) -> Iterator[tuple[RolloutPipeline, RolloutPipeline]]:
    """Two engines of one checkpoint, with and without offload. After the test both have its weights again."""
    first = weights_of(plain)
    yield plain, offloaded
    for pipeline in (plain, offloaded):
        if pipeline.control_state()["session"] is not None:
            pipeline.abort_weight_update()
        pipeline.continue_generation()
        pipeline.resume_memory_occupation()
        pipeline.refit(first, weight_version="default")


def weights_of(pipeline: RolloutPipeline) -> Weights:
    return {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}


def trained(weights: Weights) -> Weights:
    return {name: tensor * 1.02 for name, tensor in weights.items()}


def rollout(pipeline: RolloutPipeline, **fields: Any) -> list[RolloutSample]:
    return pipeline("a red circle", **FIELDS, **fields)


def equal(one: list[RolloutSample], other: list[RolloutSample]) -> bool:
    return all(
        torch.equal(a.generated_output, b.generated_output)  # type: ignore[arg-type]
        and torch.equal(a.rollout_log_probs, b.rollout_log_probs)  # type: ignore[arg-type]
        and torch.equal(a.dit_trajectory.latents, b.dit_trajectory.latents)  # type: ignore[union-attr]
        for a, b in zip(one, other, strict=True)
    )


def offload(pipeline: RolloutPipeline) -> LayerwiseOffload:
    found = offload_of(pipeline.transformer)
    assert found is not None
    return found


def test_an_offloaded_engine_has_the_bits_of_one_that_is_not(pair: tuple[RolloutPipeline, RolloutPipeline]) -> None:
    plain, offloaded = pair
    expected = rollout(plain)
    assert equal(rollout(offloaded), expected)
    with torch.no_grad():
        assert torch.equal(offloaded.replay(expected), plain.replay(expected))
    assert plain.engine.describe()["dit_layerwise_offload"] is None
    told: Any = offloaded.engine.describe()["dit_layerwise_offload"]
    assert (told["groups"], told["group_size"], told["pinned"]) == (BLOCKS, 1, False)
    blocks = sum(p.nbytes for p in plain.transformer.transformer_blocks.parameters())  # type: ignore[union-attr]
    assert blocks <= told["host_bytes"] < blocks * 1.1
    assert told["device_bytes"] < blocks / 2


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (deep_sd3, 2),
        (deep_sd3, 9),
        (qwen_image_pipeline, 1),
        (flux_pipeline, 1),
        (z_image_pipeline, 2),
        (two_transformers, 1),
    ],
)
def test_any_size_of_group_and_any_family_has_the_same_bits_also_if_it_was_loaded_before(build: Any, size: int) -> None:
    config = EngineConfig(deterministic="off", dit_layerwise_offload=True, dit_offload_group_size=size)
    expected = RolloutPipeline(copy.deepcopy(build()), config=EngineConfig(deterministic="off"))
    pipeline = RolloutPipeline(copy.deepcopy(build()), config=config)
    video = {"num_frames": 5} if build is two_transformers else {}
    assert equal(rollout(pipeline, **video), rollout(expected, **video))
    assert all(offload_of(transformer) is not None for transformer in pipeline.transformers.values())


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_after_a_refit_it_is_an_engine_that_loaded_these_weights(
    pair: tuple[RolloutPipeline, RolloutPipeline], fresh: RolloutPipeline, folder: Path, staged: bool
) -> None:
    plain, offloaded = pair
    rollout(offloaded)
    offloaded.refit(trained(weights_of(plain)), staged=staged)
    assert equal(rollout(offloaded), rollout(fresh))
    assert offloaded.get_weights_checksum() == fresh.get_weights_checksum()
    offloaded.update_weights_from_disk(str(folder), target_modules=["transformer"])
    assert offloaded.get_weights_checksum() == plain.get_weights_checksum() != fresh.get_weights_checksum()
    assert equal(rollout(offloaded), rollout(plain))


def test_a_refit_after_an_interrupted_forward_leaves_nothing_of_the_old_weights(
    pair: tuple[RolloutPipeline, RolloutPipeline], fresh: RolloutPipeline
) -> None:
    plain, offloaded = pair

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt  # a failed forward is tidied up after at once, this one is not

    handle = offloaded.transformer.transformer_blocks[2].register_forward_hook(interrupt)  # type: ignore[union-attr, index]
    with pytest.raises(KeyboardInterrupt):
        offloaded.engine.family.predict(probe_batch(offloaded.engine.family))
    handle.remove()
    assert any(slot.group is not None for slot in offload(offloaded)._slots)
    offloaded.refit(trained(weights_of(plain)))
    assert offloaded.get_weights_checksum() == fresh.get_weights_checksum()
    assert equal(rollout(offloaded), rollout(fresh))


@pytest.mark.parametrize("how", ["in_place", "staged"])
def test_a_hot_refit_between_two_steps_has_the_bits_of_one_without_offload(
    pair: tuple[RolloutPipeline, RolloutPipeline], how: str
) -> None:
    new = trained(weights_of(pair[0]))
    one, other = (refitted_between_steps(pipeline, new, how) for pipeline in pair)
    assert [s.weight_versions for s in other] == [("default", "v2")] * 2
    assert equal(one, other)


def refitted_between_steps(pipeline: RolloutPipeline, new: Weights, how: str) -> list[RolloutSample]:
    """One request, whose weights change after its first step."""
    loop, before = pipeline._loop, pipeline.engine.stats()["steps"]
    answer = loop.submit("request", params_from_mapping({"prompt": "a red circle", **FIELDS}))
    items = [[None, name, tensor] for name, tensor in new.items()]
    commands: list[Any] = []

    def post() -> None:
        if pipeline.engine.stats()["steps"] == before + 1 and not commands:
            commands.append(loop.call("begin_weight_update", {how: True}))
            commands.append(loop.call("update_weights", {"transport": "direct", "info": {"items": items}}))
            commands.append(loop.call("end_weight_update", {"weight_version": "v2"}))

    loop.run_until_idle(post)
    for command in commands:
        command.result()
    return answer.result()  # type: ignore[no-any-return]


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_a_refused_refit_leaves_every_bit(pair: tuple[RolloutPipeline, RolloutPipeline], staged: bool) -> None:
    plain, offloaded = pair
    sums = offloaded.get_weights_checksum()
    bad = trained(weights_of(plain))
    bad[list(bad)[-1]][0] = float("nan")
    with pytest.raises(InvalidRequestError, match="NaN"):
        offloaded.refit(bad, staged=staged)
    incomplete = dict(list(trained(weights_of(plain)).items())[:-1])
    with pytest.raises(InvalidRequestError, match="never came"):
        offloaded.refit(incomplete, staged=staged)
    assert offloaded.get_weights_checksum() == sums == plain.get_weights_checksum()
    assert equal(rollout(offloaded), rollout(plain))


def test_weights_that_are_looked_at_are_those_of_an_engine_without_offload(
    pair: tuple[RolloutPipeline, RolloutPipeline],
) -> None:
    name = "transformer_blocks.2.attn.to_q.weight"
    plain, offloaded = pair
    assert offloaded.get_weights_by_name(name) == plain.get_weights_by_name(name)
    answers = [p.control_command("weights_checker", action="checksum") for p in pair]
    assert answers[0] == answers[1]
    for pipeline in pair:
        pipeline.control_command("weights_checker", action="reset_tensors")
    assert offloaded.get_weights_checksum() == plain.get_weights_checksum()
    assert not any(tensor.any() for tensor in weights_of(offloaded).values() if tensor.is_floating_point())


def test_it_sleeps_and_wakes_with_its_bits_and_gives_the_slots_back(
    pair: tuple[RolloutPipeline, RolloutPipeline], fresh: RolloutPipeline
) -> None:
    plain, offloaded = pair
    expected = rollout(offloaded)
    slots = offload(offloaded)._slots
    assert all(slot.memory is not None for slot in slots)
    offloaded.release_memory_occupation()
    assert all(slot.memory is None for slot in slots)
    offloaded.resume_memory_occupation()
    assert equal(rollout(offloaded), expected)
    offloaded.release_memory_occupation(backup=False)
    assert offloaded.resume_memory_occupation()["undefined"] == ["transformer"]
    with pytest.raises(EngineError, match="undefined"):
        rollout(offloaded)
    offloaded.refit(trained(weights_of(plain)))
    assert equal(rollout(offloaded), rollout(fresh))


def factors(pipeline: RolloutPipeline) -> Weights:
    """An adapter of some layers of the first block and the last, and of one outside of the blocks."""
    generator = torch.Generator().manual_seed(5)
    layers = [f"transformer_blocks.{i}.attn.{name}" for i in (0, BLOCKS - 1) for name in ("to_q", "to_out.0")]
    made = {}
    for layer in [*layers, "proj_out"]:
        n, k = pipeline.transformer.get_submodule(layer).weight.shape  # type: ignore[union-attr, misc]
        made[f"{layer}.lora_A.weight"] = torch.randn(64, k, generator=generator) * 0.1
        made[f"{layer}.lora_B.weight"] = torch.randn(n, 64, generator=generator) * 0.1
    return made


def test_adapters_merged_and_unmerged_have_the_bits_that_they_have_without_offload(
    pair: tuple[RolloutPipeline, RolloutPipeline],
) -> None:
    base = rollout(pair[1])
    config = {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "target_modules": ["to_q", "to_out.0", "proj_out"]}
    found = []
    for pipeline in pair:
        pipeline.load_lora_adapter_from_tensors("policy", config, factors(pipeline))
        unmerged = rollout(pipeline, lora_name="policy")
        pipeline.unload_lora_adapter("policy")
        pipeline.begin_weight_update(partial=True)
        pipeline.update_weights_from_tensor(factors(pipeline).items(), weight_update_mode="lora_merge")
        pipeline.end_weight_update()
        merged = rollout(pipeline)
        pipeline.unmerge_lora()
        found.append((unmerged, merged, rollout(pipeline)))
    assert all(equal(one, other) for one, other in zip(*found, strict=True))
    unmerged, merged, without = found[1]
    assert not equal(unmerged, base)
    assert not equal(merged, base)
    assert equal(without, base)


def test_what_can_not_work_together_is_refused_by_its_name(offloaded: RolloutPipeline, folder: Path) -> None:
    for others, named in (
        ({"torch_compile": True}, "--enable-torch-compile"),
        ({"parallel": ParallelConfig(tp_size=2)}, "--tp-size"),
        ({"dit_offload_group_size": 0}, "least 1"),
    ):
        with pytest.raises(InvalidRequestError, match=named):
            engine_of(folder, True, **others)
    with pytest.raises(ConflictError, match="offloaded by another engine"):
        RolloutPipeline(offloaded.engine.family.pipeline, config=EngineConfig(deterministic="off"))
    samples = rollout(offloaded)
    with pytest.raises(InvalidRequestError, match="trainer's own transformer"):
        offloaded.replay(samples)
    with pytest.raises(InvalidRequestError, match="no list of blocks"):
        LayerwiseOffload(torch.nn.Linear(2, 2), torch.device("cpu"))


def test_a_copy_of_the_transformer_is_an_ordinary_one_that_a_trainer_trains(offloaded: RolloutPipeline) -> None:
    samples = rollout(offloaded)
    policy = copy.deepcopy(offloaded.transformer)
    assert offload_of(policy) is None
    offload(offloaded).give_device_memory_back()
    old = torch.stack([s.rollout_log_probs for s in samples])  # type: ignore[misc]
    new = offloaded.replay(samples, transformer=policy)
    new.sum().backward()
    assert torch.equal(new.detach(), old)
    assert all(slot.memory is None for slot in offload(offloaded)._slots)  # nothing of the original's was run
    assert all(p.grad is not None for name, p in policy.named_parameters() if name.endswith("attn.to_q.weight"))


class Blocks(torch.nn.Module):
    """Blocks that are called in any order, one of which fails, with a tensor that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(6)
        )
        self.blocks[5][0].weight = self.blocks[1][0].weight  # type: ignore[index]
        self.blocks[2][0].weight.data = self.blocks[2][0].weight.data.t()  # type: ignore[index]

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        return x


@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_may_come_in_any_order_be_left_out_and_fail(size: int) -> None:
    plain = Blocks().eval()
    moved = copy.deepcopy(plain)
    offload = LayerwiseOffload(moved, torch.device("cpu"), group_size=size)
    assert not offload.holds(moved.blocks[1][0].weight)  # type: ignore[index]
    assert moved.blocks[2][0].weight.stride() == (1, 8)  # type: ignore[index]
    at_home = {name: t.data_ptr() for name, t in moved.state_dict().items()}
    x = torch.randn(4, 8)
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 0, 3, 3, 1], [2], [], [4, 0, 5, 0, 4]):
        assert torch.equal(moved(x, order), plain(x, order)), order
        assert {name: t.data_ptr() for name, t in moved.state_dict().items()} == at_home
        with pytest.raises(IndexError):
            moved(x, [*order, 6])
        with pytest.raises(RuntimeError):
            moved(x[:, :3], order)
        assert {name: t.data_ptr() for name, t in moved.state_dict().items()} == at_home
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in moved.state_dict().items())


def test_settling_brings_home_what_an_interrupted_forward_has_left() -> None:
    moved = Blocks().eval()
    offload = LayerwiseOffload(moved, torch.device("cpu"))
    before = {name: t.clone() for name, t in moved.state_dict().items()}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = moved.blocks[3][0].register_forward_hook(interrupt)  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt):
        moved(torch.randn(4, 8), [0, 1, 2, 3, 4])
    handle.remove()
    weight = moved.blocks[3][0].weight  # type: ignore[index]
    somewhere = weight.data_ptr()
    offload.settle()
    assert weight.data_ptr() != somewhere
    assert all(torch.equal(t, before[name]) for name, t in moved.state_dict().items())
