"""LoRA: merged by a refit onto a base that comes back bit for bit, and unmerged adapters chosen by each request."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save

from diffusion_rl.config import EngineConfig
from diffusion_rl.pipeline import RolloutPipeline
from engine_control.config import ControlConfig
from engine_control.errors import InvalidRequestError, WeightSessionError
from engine_control.refit.manifest import manifest_of

FIELDS: dict[str, Any] = {"seed": 3, "num_inference_steps": 3, "height": 32, "width": 32, "output_type": "latent"}
LAYERS = ["to_q", "to_out.0", "add_k_proj", "ff.net.2", "norm1.linear"]
ALPHA, RANK = 12, 4
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pipeline(tiny_sd3_folder: Path) -> Iterator[RolloutPipeline]:
    control = ControlConfig(enable_memory_saver=True)
    with RolloutPipeline.from_config(EngineConfig(str(tiny_sd3_folder), device="cpu", control=control)) as made:
        yield made


@pytest.fixture
def base(pipeline: RolloutPipeline) -> Iterator[Weights]:
    """The weights before the test, which has them again after it."""
    weights = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    yield weights
    if pipeline.control_state()["session"] is not None:
        pipeline.abort_weight_update()
    pipeline.refit(weights, weight_version="default")


def policy_of(pipeline: RolloutPipeline, seed: int, dtype: torch.dtype | None = None) -> Any:
    """A trainer's copy of the transformer with peft's adapter on it, of numbers that are not zero."""
    policy = copy.deepcopy(pipeline.transformer).requires_grad_(False)
    policy.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data = values.to(dtype or parameter.dtype)
    return policy


def factors(policy: Any, prefix: str = "") -> Weights:
    return {prefix + name: p.detach() for name, p in policy.named_parameters() if "lora_" in name}


def merge(pipeline: RolloutPipeline, tensors: Weights, *, manifest: Any = None, **options: Any) -> dict[str, Any]:
    """A session of one merge."""
    begin = {key: options.pop(key) for key in ("staged", "partial") if key in options}
    pipeline.begin_weight_update(target_modules=["transformer"], **begin)
    mode = {"weight_update_mode": "lora_merge", "lora_alpha": ALPHA, **options}
    pipeline.update_weights_from_tensor(tensors.items(), **mode)
    return pipeline.end_weight_update(manifest=manifest)


def weights(module: Any) -> Weights:
    return {name.replace(".base_layer", ""): t for name, t in module.state_dict().items() if "lora_" not in name}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


NAMES = {
    "peft": lambda name: f"base_model.model.{name}",
    "peft, saved": lambda name: f"base_model.model.{name.replace('.default', '')}",
    "diffusers": lambda name: f"transformer.{name.replace('.default', '')}",
    "bare": lambda name: name.replace(".default.weight", ""),
    "down and up": lambda name: name.replace("lora_A.default", "lora_down").replace("lora_B.default", "lora_up"),
}


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_a_merge_has_the_bits_of_pefts_merge_and_the_base_comes_back(
    pipeline: RolloutPipeline, base: Weights, form: str, staged: bool
) -> None:
    sums, policy = pipeline.get_weights_checksum(), policy_of(pipeline, 1)
    tensors = {NAMES[form](name): t for name, t in factors(policy).items()}
    answer = merge(pipeline, tensors, staged=staged, lora_rank=RANK)
    policy.fuse_lora()
    assert same(weights(pipeline.transformer), weights(policy))
    assert answer["digest"]
    assert pipeline.get_weights_checksum() != sums
    assert pipeline.unmerge_lora(weight_version="plain")["tensors"] == len(tensors) // 2
    assert same(weights(pipeline.transformer), base)
    assert pipeline.get_weights_checksum() == sums
    assert pipeline.engine.weight_version == "plain"
    assert pipeline.unmerge_lora()["tensors"] == 0


def test_a_merge_arrives_as_safetensors_bytes_too(pipeline: RolloutPipeline, base: Weights) -> None:
    policy = policy_of(pipeline, 1)
    info = {"safetensors": save(factors(policy)), "weight_update_mode": "lora_merge", "lora_alpha": ALPHA}
    pipeline.begin_weight_update()
    pipeline.control_command("update_weights", transport="tensor", info=info)
    pipeline.end_weight_update()
    policy.fuse_lora()
    assert same(weights(pipeline.transformer), weights(policy))


def test_a_hundred_merges_leave_no_trace(pipeline: RolloutPipeline, base: Weights) -> None:
    first, other = (factors(policy_of(pipeline, seed)) for seed in (1, 2))
    merge(pipeline, first)
    once = weights(copy.deepcopy(pipeline.transformer))
    for number in range(100):
        merge(pipeline, {name: t * (number / 7) for name, t in other.items()})
        if number % 10 == 0:
            pipeline.begin_weight_update()
            pipeline.update_weights_from_tensor(first.items(), weight_update_mode="lora_merge")
            pipeline.abort_weight_update()
    merge(pipeline, first)
    assert same(weights(pipeline.transformer), once)
    pipeline.unmerge_lora()
    assert same(weights(pipeline.transformer), base)


def test_a_half_precision_merge_is_rounded_once_and_ranks_and_alpha_are_each_layers_own(tiny_sd3_folder: Path) -> None:
    config = EngineConfig(str(tiny_sd3_folder), device="cpu", dtype="bfloat16", deterministic="off")
    with RolloutPipeline.from_config(config) as pipeline:
        name, wide = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.2"
        old = weights(copy.deepcopy(pipeline.transformer))
        tensors = {}
        for layer, rank in ((name, 3), (wide, 8)):
            n, k = old[f"{layer}.weight"].shape
            tensors |= {f"{layer}.lora_A": torch.randn(rank, k), f"{layer}.lora_B": torch.randn(n, rank)}
        pipeline.begin_weight_update()
        pipeline.update_weights_from_tensor(tensors.items(), weight_update_mode="lora_merge", lora_alpha=6)
        pipeline.end_weight_update()
        new = weights(pipeline.transformer)
        for layer, scale in ((name, 6 / 3), (wide, 6 / 8)):
            delta = tensors[f"{layer}.lora_B"] @ tensors[f"{layer}.lora_A"] * scale
            assert torch.equal(new[f"{layer}.weight"], (old[f"{layer}.weight"].float() + delta).bfloat16())
        pipeline.begin_weight_update()
        pipeline.update_weights_from_tensor(tensors.items(), weight_update_mode="lora_merge")
        pipeline.end_weight_update()
        delta = tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
        expected = (old[f"{name}.weight"].float() + delta).bfloat16()
        assert torch.equal(pipeline.transformer.state_dict()[f"{name}.weight"], expected)


def faulty(tensors: Weights, fault: str) -> tuple[Weights, dict[str, Any], str]:
    """The tensors with a fault at the last layer, more fields of the call, and the name that the refusal must tell."""
    last = list(tensors)[-1]
    new, options, told = {name: t.clone() for name, t in tensors.items()}, {}, last
    match fault:
        case "half_pair":
            del new[last]
            told = last.replace("lora_B", "lora_A")
        case "unknown_layer":
            told = last.replace("transformer_blocks", "blocks")
            new[told] = new.pop(last)
        case "not_lora":
            told = last.removesuffix(".lora_B.default.weight") + ".bias"
            new[told] = torch.zeros(3)
        case "wrong_shape":
            new[last] = new[last][:-1]
        case "wrong_rank":
            options, told = {"lora_rank": RANK + 1}, next(iter(new))
        case "duplicate_weight":
            told = last.replace("default", "other")
            new[told] = new[last]
        case "non_finite_weights":
            new[last][0] = float("inf")
        case "unknown_mode":
            options, told = {"weight_update_mode": "lora_guess"}, "weight_update_mode"
        case "invalid_lora":
            options, told = {"lora_alpha": 0}, "lora_alpha"
        case "wrong_mode":
            options, told = {"weight_update_mode": None}, "lora_alpha"
    return new, options, told


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize(
    "fault",
    [
        *("half_pair", "unknown_layer", "not_lora", "wrong_shape", "wrong_rank", "duplicate_weight"),
        *("non_finite_weights", "unknown_mode", "invalid_lora", "wrong_mode"),
    ],
)
def test_a_faulty_merge_is_refused_by_name_and_nothing_is_different(
    pipeline: RolloutPipeline, base: Weights, fault: str, staged: bool
) -> None:
    good = factors(policy_of(pipeline, 1))
    merge(pipeline, good)
    before = weights(copy.deepcopy(pipeline.transformer))
    tensors, options, told = faulty(factors(policy_of(pipeline, 2)), fault)
    with pytest.raises(InvalidRequestError) as refused:
        merge(pipeline, tensors, staged=staged, **options)
    assert refused.value.code == fault
    assert refused.value.field is not None
    layer = told.partition(".lora_")[0]
    assert layer in f"{refused.value.field} {refused.value.message}"
    with pytest.raises(WeightSessionError):
        pipeline.end_weight_update()
    assert same(weights(pipeline.transformer), before)
    pipeline.unmerge_lora()
    assert same(weights(pipeline.transformer), base)


def test_a_whole_weight_is_the_new_base_and_is_what_later_merges_start_from(
    pipeline: RolloutPipeline, base: Weights
) -> None:
    policy = policy_of(pipeline, 1)
    merge(pipeline, factors(policy))
    new = {name: t * 1.5 for name, t in base.items()}
    pipeline.begin_weight_update()
    pipeline.update_weights_from_tensor(new.items())
    pipeline.abort_weight_update()  # then the old base is still the base
    merge(pipeline, factors(policy))
    pipeline.refit(new)
    assert pipeline.unmerge_lora()["tensors"] == 0
    assert same(weights(pipeline.transformer), new)
    merge(pipeline, factors(policy))
    assert not same(weights(pipeline.transformer), new)
    pipeline.unmerge_lora()
    assert same(weights(pipeline.transformer), new)


def test_a_manifest_is_of_the_factors_that_were_sent(pipeline: RolloutPipeline, base: Weights) -> None:
    tensors = factors(policy_of(pipeline, 1), "base_model.model.")
    manifest = manifest_of(("transformer", name, tensor) for name, tensor in tensors.items())
    merge(pipeline, tensors, manifest=manifest)
    changed = {name: t.clone() for name, t in tensors.items()}
    list(changed.values())[5][0, 0] += 1
    for wrong in (changed, dict(list(tensors.items())[2:])):
        with pytest.raises(InvalidRequestError, match="against the manifest"):
            merge(pipeline, wrong, manifest=manifest)
    pipeline.unmerge_lora()
    assert same(weights(pipeline.transformer), base)


def test_nothing_is_merged_onto_weights_that_are_undefined(pipeline: RolloutPipeline, base: Weights) -> None:
    tensors = factors(policy_of(pipeline, 1))
    merge(pipeline, tensors)
    pipeline.release_memory_occupation(backup=False)
    pipeline.resume_memory_occupation()
    with pytest.raises(InvalidRequestError, match="no base"):
        merge(pipeline, tensors)
    pipeline.abort_weight_update()
    pipeline.refit(base)
    assert pipeline.unmerge_lora()["tensors"] == 0
    assert same(weights(pipeline.transformer), base)
