"""LoRA: merged by a refit onto a base that comes back bit for bit, and unmerged adapters chosen by each request."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save
from tiny_models import qwen_image_pipeline, sd3_pipeline

from diffusion_rl.config import EngineConfig, ParallelConfig
from diffusion_rl.models.compiled import CompiledForward
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.params import Limits, params_from_mapping
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.rollout.replay import replay
from diffusion_rl.sample import RolloutSample
from diffusion_rl.server.schema import parse_rollout_request
from diffusion_rl.trainer import certified_family, exact_training
from engine_control.config import ControlConfig
from engine_control.errors import ConflictError, InvalidRequestError, WeightSessionError
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
            parameter.data = values.to(parameter.device, dtype or parameter.dtype)
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


ROLLOUT: dict[str, Any] = {
    **FIELDS,
    "negative_prompt": "blurry",
    "true_cfg_scale": 3.7,
    "guidance_scale": 3.7,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}
PROMPTS = ("a red ball, from above", "cat")
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": LAYERS, "lora_dropout": 0.1}


@cache
def rollout_of(build: Any, dtype: torch.dtype) -> RolloutPipeline:
    return RolloutPipeline(copy.deepcopy(build(dtype)))


def embedded(dtype: torch.dtype) -> Any:
    return RolloutPipeline.from_pretrained("embedded", torch_dtype=dtype).engine.family.pipeline


def bits(samples: list[RolloutSample]) -> list[torch.Tensor]:
    return [s.rollout_log_probs for s in samples] + [s.generated_latents for s in samples]  # type: ignore[misc]


def equal(one: list[RolloutSample], other: list[RolloutSample]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def load(pipeline: RolloutPipeline, name: str, policy: Any, **options: Any) -> dict[str, Any]:
    return pipeline.load_lora_adapter_from_tensors(name, CONFIG, factors(policy), **options)


@pytest.fixture
def adapters(pipeline: RolloutPipeline) -> Iterator[RolloutPipeline]:
    """Without adapters, before the test and after it."""
    yield pipeline
    pipeline.resume_memory_occupation()
    pipeline.continue_generation()
    for name in pipeline.list_lora_adapters():
        pipeline.unload_lora_adapter(name)


@pytest.mark.parametrize(
    ("build", "dtype", "adapter"),
    [
        (sd3_pipeline, torch.float32, torch.float32),
        (sd3_pipeline, torch.bfloat16, torch.float32),
        (qwen_image_pipeline, torch.bfloat16, torch.bfloat16),
        (embedded, torch.float32, torch.float32),
    ],
    ids=["sd3-fp32", "sd3-bf16-fp32", "qwen-bf16", "embedded"],
)
def test_a_trainers_peft_module_has_the_bits_of_the_adapter_that_the_engine_serves(
    build: Any, dtype: torch.dtype, adapter: torch.dtype
) -> None:
    pipeline = rollout_of(build, dtype)
    plain = pipeline(PROMPTS, **ROLLOUT)
    policy = policy_of(pipeline, 1, adapter)
    load(pipeline, "policy", policy)
    samples = pipeline(PROMPTS, lora_name="policy", **ROLLOUT)
    assert not equal(samples, plain)
    assert equal(pipeline(PROMPTS, **ROLLOUT), plain)
    old = torch.stack([s.rollout_log_probs for s in samples if s.rollout_log_probs is not None])
    with exact_training(policy.train(), pipeline.engine.family):
        new = pipeline.replay(samples, transformer=policy)
        new.sum().backward()
    assert torch.equal(torch.exp(new.detach() - old), torch.ones_like(old))
    assert all("lora_" in name for name, p in policy.named_parameters() if p.grad is not None)
    with torch.no_grad():
        assert torch.equal(pipeline.replay(samples, lora_name="policy"), old)
        theirs = copy.deepcopy(pipeline.engine.family.pipeline)
        theirs.transformer = policy.eval()
        again = certified_family(theirs)  # what a trainer in a process of its own finds is what the engine found
        assert torch.equal(replay(again, samples, transformer=policy), old)
    linear = pipeline.engine.family.choices.linear
    assert linear == again.choices.linear
    pipeline.unload_lora_adapter("policy")


def test_requests_of_several_adapters_and_of_none_have_the_bits_that_each_has_alone(
    adapters: RolloutPipeline,
) -> None:
    loop = adapters._loop
    policies = {name: policy_of(adapters, seed) for seed, name in enumerate(("old", "policy"))}
    for name, policy in policies.items():
        load(adapters, name, policy)
    alone = {name: adapters("a red ball", lora_name=name, **ROLLOUT) for name in (None, *policies)}
    assert not equal(alone["old"], alone["policy"])
    before = adapters.engine.stats()["steps"]
    answers = {
        (name, i): loop.submit(
            f"{name} {i}", params_from_mapping({"prompt": "a red ball", "lora_name": name, **ROLLOUT})
        )
        for i in range(2)
        for name in alone
    }
    loop.run_until_idle()
    assert all(equal(answer.result(), alone[name]) for (name, _), answer in answers.items())
    assert adapters.engine.stats()["steps"] - before == 3 * FIELDS["num_inference_steps"]
    assert alone["old"][0].weight_versions == ("default+old@1",) * 3
    assert alone[None][0].weight_versions == ("default",) * 3


def test_a_folder_that_peft_saved_is_loaded_and_weights_keep_their_names(
    adapters: RolloutPipeline, tmp_path: Path
) -> None:
    policy, sums = policy_of(adapters, 1), adapters.get_weights_checksum()
    load(adapters, "tensors", policy)
    wrapped = get_peft_model(copy.deepcopy(adapters.transformer), LoraConfig(**CONFIG))
    mine = dict(policy.named_parameters())
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = mine[name.removeprefix("base_model.model.")].data
    wrapped.save_pretrained(tmp_path / "adapter")
    answer = adapters.load_lora_adapter("folder", str(tmp_path / "adapter"))
    assert answer["loaded_adapters"] == {"tensors": "tensors", "folder": str(tmp_path / "adapter")}
    one, other = (adapters("cat", lora_name=name, **ROLLOUT) for name in ("tensors", "folder"))
    assert equal(one, other)
    about = adapters.list_lora_adapters()
    assert about["folder"]["rank"] == RANK
    assert about["folder"]["layers"] == len(factors(policy)) // 2
    assert adapters.get_weights_checksum() == sums
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="no folder with"):
        adapters.load_lora_adapter("folder", str(tmp_path / "adapter"))


def test_ranks_and_scales_follow_pefts_patterns(adapters: RolloutPipeline) -> None:
    config = {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "rank_pattern": {"attn.to_q": 6},
        "alpha_pattern": {"to_q": 2, "1.ff.net.2": 7},
    }
    policy = copy.deepcopy(adapters.transformer).requires_grad_(False)
    policy.add_adapter(LoraConfig(**config, target_modules=LAYERS, init_lora_weights=False))
    adapters.load_lora_adapter_from_tensors("p", config, factors(policy))
    samples = adapters("cat", lora_name="p", **ROLLOUT)
    with torch.no_grad():
        scored = adapters.replay(samples, transformer=policy)
    assert torch.equal(scored[0], samples[0].rollout_log_probs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["proj_out"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"r": 8}, "rank"),
        ({"rank_pattern": {"to_q": 2}}, "rank"),
        ({"alpha_pattern": {"^(.*)q$": 2}}, "alpha_pattern"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_configuration_that_asks_for_more_than_plain_lora_is_refused_by_name(
    adapters: RolloutPipeline, config: dict[str, Any], code: str
) -> None:
    with pytest.raises(InvalidRequestError, match=code):
        adapters.load_lora_adapter_from_tensors("p", CONFIG | config, factors(policy_of(adapters, 1)))
    assert adapters.list_lora_adapters() == {}


@pytest.mark.parametrize(
    "fault", ["half_pair", "unknown_layer", "not_lora", "wrong_shape", "duplicate_weight", "non_finite_weights"]
)
def test_a_faulty_adapter_leaves_the_one_of_its_name_as_it_was(adapters: RolloutPipeline, fault: str) -> None:
    load(adapters, "policy", policy_of(adapters, 1), lora_version="first")
    before = adapters("cat", lora_name="policy", **ROLLOUT)
    tensors, _, told = faulty(factors(policy_of(adapters, 2)), fault)
    with pytest.raises(InvalidRequestError) as refused:
        adapters.load_lora_adapter_from_tensors("policy", CONFIG, tensors)
    assert refused.value.code == fault
    assert told.partition(".lora_")[0] in f"{refused.value.field} {refused.value.message}"
    assert equal(adapters("cat", lora_name="policy", **ROLLOUT), before)
    assert adapters.list_lora_adapters()["policy"]["version"] == "first"


def test_a_replaced_adapter_is_another_version_and_waits_for_what_has_begun(adapters: RolloutPipeline) -> None:
    loop, engine = adapters._loop, adapters.engine
    one, two = policy_of(adapters, 1), policy_of(adapters, 2)
    request = params_from_mapping({"prompt": "cat", "lora_name": "policy", **ROLLOUT})
    expected = []
    for policy in (one, two):
        load(adapters, "policy", policy, lora_version="then")
        expected.append(adapters("cat", lora_name="policy", **ROLLOUT))
        adapters.unload_lora_adapter("policy")
    load(adapters, "policy", one, lora_version="one")
    call = {"lora_name": "policy", "config_dict": CONFIG, "tensors": factors(two), "lora_version": "two"}
    for in_place in (False, True):
        before, posted = engine.stats()["steps"], []

        def post() -> None:
            if engine.stats()["steps"] == before + 1 and not posted:  # noqa: B023
                posted.append(loop.call("load_lora_adapter_from_tensors", {**call, "in_place": in_place}))  # noqa: B023

        answer = loop.submit("request", request)
        loop.run_until_idle(post)
        assert posted[0].result()["lora_version"] == "two"
        versions = answer.result()[0].weight_versions
        assert versions == tuple(f"default+policy@{v}" for v in (("one", "two", "two") if in_place else ("one",) * 3))
        assert equal(answer.result(), expected[0]) is not in_place
        assert equal(adapters("cat", lora_name="policy", **ROLLOUT), expected[1])
        load(adapters, "policy", one, lora_version="one")


def test_a_name_that_no_adapter_has_is_refused_and_one_that_goes_ends_what_waits_for_it(
    adapters: RolloutPipeline,
) -> None:
    with pytest.raises(InvalidRequestError, match="no adapter 'policy'"):
        adapters("cat", lora_name="policy", **FIELDS)
    with pytest.raises(InvalidRequestError, match="no adapter 'policy'"):
        adapters.unload_lora_adapter("policy")
    load(adapters, "policy", policy_of(adapters, 1))
    adapters.engine.hold_admission(True)
    answer = adapters._loop.submit("r", params_from_mapping({"prompt": "cat", "lora_name": "policy", **FIELDS}))
    other = adapters._loop.submit("s", params_from_mapping({"prompt": "cat", **FIELDS}))
    adapters.unload_lora_adapter("policy")
    adapters.engine.hold_admission(False)
    adapters._loop.run_until_idle()
    with pytest.raises(InvalidRequestError, match="no adapter 'policy'"):
        answer.result()
    assert len(other.result()) == 1


def test_adapters_survive_sleep_without_backup_and_refits_of_the_base(adapters: RolloutPipeline, base: Weights) -> None:
    load(adapters, "policy", policy_of(adapters, 1))
    before = adapters("cat", lora_name="policy", **ROLLOUT)
    adapters.release_memory_occupation(backup=False)
    held = adapters.engine.weights.adapters.tensors()
    assert not any(tensor.any() for tensor in held.values())  # on a CPU, what is released reads as zeros
    with pytest.raises(ConflictError, match="released"):
        load(adapters, "other", policy_of(adapters, 2))
    adapters.resume_memory_occupation()
    adapters.refit({name: t * 1.01 for name, t in base.items()})
    assert not equal(adapters("cat", lora_name="policy", **ROLLOUT), before)
    adapters.refit(base, weight_version="default")
    assert equal(adapters("cat", lora_name="policy", **ROLLOUT), before)


def test_a_compiled_transformer_takes_no_adapter(tiny_sd3_folder: Path) -> None:
    with RolloutPipeline.from_config(EngineConfig(str(tiny_sd3_folder), device="cpu", deterministic="off")) as pipeline:
        pipeline.engine.family.runner = CompiledForward(2, pipeline.engine.family.choices)
        with pytest.raises(InvalidRequestError, match="compiled"):
            load(pipeline, "policy", policy_of(pipeline, 1))


def test_ranks_that_share_a_forward_serve_the_adapters_bits(adapters: RolloutPipeline, tiny_sd3_folder: Path) -> None:
    policy = policy_of(adapters, 1)
    load(adapters, "policy", policy)
    expected = [adapters("cat", lora_name=name, **ROLLOUT) for name in ("policy", None)]
    parallel = ParallelConfig(sp_degree=2)
    config = EngineConfig(str(tiny_sd3_folder), device="cpu", parallel=parallel, dit_layerwise_offload=True)
    with RolloutPipeline.from_config(config) as two:
        with pytest.raises(InvalidRequestError, match="by half"):
            two.load_lora_adapter_from_tensors("policy", CONFIG, dict(list(factors(policy).items())[:-1]))
        load(two, "policy", policy)
        found = [two("cat", lora_name=name, **ROLLOUT) for name in ("policy", None)]
        assert all(equal(one, other) for one, other in zip(found, expected, strict=True))
        two.begin_weight_update(partial=True)
        two.update_weights_from_tensor(factors(policy).items(), weight_update_mode="lora_merge", lora_alpha=ALPHA)
        two.end_weight_update()
        assert two.get_weights_checksum() != adapters.get_weights_checksum()
        two.unmerge_lora()
        assert two.get_weights_checksum() == adapters.get_weights_checksum()


def test_a_request_over_http_names_its_adapter_in_either_field_and_not_two_adapters() -> None:
    def name_of(**fields: Any) -> str | None:
        body = {"prompt": "cat", **fields}
        return parse_rollout_request(body, limits=Limits(), step_kinds=("sde",), lenient=False).params.lora_name

    assert name_of(lora_name="p") == name_of(adapter="p") == name_of(adapter="p", lora_name="p") == "p"
    assert name_of() is name_of(adapter=None) is None
    with pytest.raises(InvalidRequestError, match="lora_name says 'q'"):
        name_of(adapter="p", lora_name="q")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_hold_an_adapter_whose_numbers_may_change_and_go_with_it() -> None:
    def served(graphs: bool) -> RolloutPipeline:
        pipeline = copy.deepcopy(sd3_pipeline(torch.bfloat16)).to("cuda")
        return RolloutPipeline(pipeline, config=EngineConfig(cuda_graphs=graphs))

    with served(True) as captured, served(False) as eager:
        runner = captured.engine.family.runner
        assert isinstance(runner, CudaGraphs)
        policies = [policy_of(eager, seed) for seed in (1, 2)]
        wider = copy.deepcopy(eager.transformer).requires_grad_(False)
        wider.add_adapter(LoraConfig(r=RANK, lora_alpha=5, target_modules=["to_v"], init_lora_weights=False))
        for policy, config in ((policies[0], CONFIG), (policies[1], CONFIG), (wider, CONFIG | {"lora_alpha": 5})):
            before = runner.captured
            for pipeline in (captured, eager):
                pipeline.load_lora_adapter_from_tensors("policy", config, factors(policy))
            for name in (None, "policy", None, "policy"):
                found, expected = (p("cat", lora_name=name, **ROLLOUT) for p in (captured, eager))
                assert equal(found, expected)
            with torch.no_grad(), exact_training(policy, eager.engine.family):
                assert torch.equal(eager.replay(found, transformer=policy)[0].cpu(), found[0].rollout_log_probs)  # type: ignore[arg-type]
            assert (runner.captured > before) is (policy is not policies[1])
        tensors = factors(policies[0])
        merge(captured, tensors)
        policies[0].fuse_lora()
        new = weights(captured.transformer)
        assert all(torch.allclose(new[name], t, rtol=0.02, atol=1e-3) for name, t in weights(policies[0]).items())
        captured.unmerge_lora()
        assert captured.get_weights_checksum() == eager.get_weights_checksum()
