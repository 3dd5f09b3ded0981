"""Weights in one byte a number: what they stand for, and refits that are all or nothing in every one of those bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_ranks import GlooRank, load, logits, on_ranks, stored
from safetensors.torch import save_file
from tiny_llms import make_tiny_llm

from engine_control.checksum import device_digests, tensor_sha256
from engine_control.config import ControlConfig
from engine_control.errors import InvalidRequestError, RefitRefusedError
from engine_control.refit.backends.base import WeightItem
from engine_control.refit.lora import LoraMerge, LoraMerges
from engine_control.refit.session import RefitSession
from llm_runtime import LLM, LLMConfig
from llm_runtime.layers.fp8 import FP8, dequantise, quantise, scaled_product
from llm_runtime.models.base import CausalLM
from llm_runtime.models.loading import load_model

UP = "model.layers.1.mlp.up_proj.weight"
PROMPTS = [[5, 9, 31, 7], list(range(20, 63)), [3]]
SAMPLED = [{"temperature": 0.9, "max_new_tokens": 9, "sampling_seed": i, "ignore_eos": True} for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "one", dtype=torch.bfloat16, tokenizer=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "other", dtype=torch.bfloat16, tokenizer=False, seed=1)


def quantised(folder: Path) -> CausalLM:
    return load(folder, quantization="fp8")


def memory(model: CausalLM) -> dict[str, torch.Tensor]:
    """A copy of every byte of the weights, by parameter."""
    return {n: p.detach().clone().view(torch.uint8) for n, p in model.named_parameters()}


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def items(weights: Mapping[str, torch.Tensor]) -> list[WeightItem]:
    return [WeightItem(None, name, tensor) for name, tensor in weights.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_to_quantise_what_was_quantised_changes_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-20, 9, (400, 1), generator=generator).float())
    edges = torch.tensor([0.0, torch.finfo(dtype).max, -torch.finfo(dtype).tiny, 448, 464, 465, 232, 233])
    weight = torch.cat([torch.randn(400, 64, generator=generator) * spread, edges[:, None].expand(-1, 64)]).to(dtype)
    stored, scale = quantise(weight)
    numbers = dequantise(stored, scale, dtype)
    assert torch.equal(numbers.double(), stored.double() * scale.double()[:, None])
    again, same_scale = quantise(numbers)
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(same_scale, scale)
    # Half a unit of the fourth bit, or, for small numbers beside large ones, of the smallest number there is.
    bound = torch.maximum(weight.double().abs() / 16, scale.double()[:, None] * 2**-10)
    assert ((numbers.double() - weight.double()).abs() <= bound)[:400].all()
    assert torch.equal(numbers[400].float(), torch.zeros(64))
    assert numbers.isfinite().all()


def test_logits_are_near_those_of_the_whole_weights_in_half_the_memory(folder: Path) -> None:
    whole, small = load(folder), quantised(folder)
    expected, found = logits(whole), logits(small)
    assert 0 < (found - expected).norm() / expected.norm() < 0.1
    dtypes = {n.rsplit(".", 2)[-2] for n, p in small.named_parameters() if p.dtype == FP8}
    assert dtypes == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    layers = [sum(p.nbytes for p in model.model.layers.parameters()) for model in (whole, small)]  # type: ignore[union-attr]
    assert layers[1] < 0.53 * layers[0]
    wide = load_model(LLMConfig(str(folder), device="cpu", dtype="float32", quantization="fp8"))
    target = small.refit_target()
    assert {info.dtype for info in target.modules()["model"].values()} == {torch.bfloat16}
    for name, tensor in wide.refit_target().checkpoint_tensors("model").items():  # quantised alike in every dtype
        assert torch.equal(target.checkpoint_tensors("model")[name].float(), tensor), name


@pytest.mark.parametrize("staged", [False, True])
def test_a_commit_is_as_loading_and_digests_until_then_are_of_what_was_sent(
    folder: Path, other: Path, staged: bool
) -> None:
    model, fresh, weights = quantised(folder), quantised(other), stored(other)
    before = memory(model)
    session = RefitSession(model.refit_target(), ["model"], staged=staged)
    session.update(items(weights))
    sent = device_digests((f"model.{name}", tensor) for name, tensor in weights.items())
    assert session.verify() == sent
    kept = {n: t for n, t in before.items() if n.endswith((".scale", "qkv_proj.weight", "down_proj.weight"))}
    assert same({n: memory(model)[n] for n in kept}, kept)  # the old bytes serve until the commit
    session.commit()
    assert same(memory(model), memory(fresh))
    found = model.refit_target().checkpoint_tensors("model")
    assert tensor_sha256(found[UP]) != tensor_sha256(weights[UP])
    session = RefitSession(model.refit_target(), ["model"])
    session.update(items(dict(found)))  # what is read back is what it was quantised to
    session.commit()
    assert same(memory(model), memory(fresh))


def test_what_is_refused_or_undone_leaves_every_byte(folder: Path, other: Path) -> None:
    model, weights = quantised(folder), stored(other)
    before, target = memory(model), model.refit_target()
    session = RefitSession(target, ["model"])
    session.update(items(weights))
    session.undo()
    assert same(memory(model), before)
    session = RefitSession(target, ["model"], partial=True)
    bad = torch.full_like(weights[UP], 1.0)
    bad[3, 4] = torch.nan
    with pytest.raises(RefitRefusedError, match="NaN"):
        session.update(items({UP: bad}))
    with pytest.raises(RefitRefusedError, match="twice"):
        session.update([*items({UP: weights[UP]}), *items({UP: weights[UP]})])
    gate = UP.replace("up_proj", "gate_proj")
    session.update(items({gate: weights[gate]}))
    session.commit()
    changed = {name for name, tensor in memory(model).items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.mlp.gate_up_proj.scale"}
    up = target.checkpoint_tensors("model")[UP]
    assert torch.equal(up, quantised(folder).refit_target().checkpoint_tensors("model")[UP])
    assert torch.equal(target.checkpoint_tensors("model")[gate], dequantise(*quantise(weights[gate]), torch.bfloat16))


def test_an_adapter_that_is_merged_and_taken_out_leaves_every_byte(folder: Path) -> None:
    model = quantised(folder)
    before, target = memory(model), model.refit_target()
    merges = LoraMerges(target, torch.device("cpu"))
    layer = f"base_model.model.{UP.removesuffix('.weight')}"
    halves = {f"{layer}.lora_A.weight": torch.ones(2, 128), f"{layer}.lora_B.weight": torch.ones(256, 2) * 0.05}
    for merged in (True, False):
        session = RefitSession(target, ["model"], partial=True)
        merges.begin_call()
        merging = merges.merging(items(halves), LoraMerge(), ["model"])
        session.update(merging if merged else merges.restoring(["model"]))
        session.commit()
        merges.commit()
        assert same(memory(model), before) is not merged


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_ranks_quantise_their_own_parts(family: str, tmp_path: Path) -> None:
    folder = make_tiny_llm(tmp_path / family, family, dtype=torch.bfloat16, tokenizer=False)
    expected, weights = logits(load(folder)), stored(folder)
    config = LLMConfig(str(folder), device="cpu", quantization="fp8")

    def work(rank: GlooRank) -> tuple[torch.Tensor, bool, bool, dict[str, torch.Tensor]]:
        model = load_model(config, rank)
        before, target = memory(model), model.refit_target()
        session = RefitSession(target, ["model"])
        session.update(items({name: tensor * 0.5 for name, tensor in weights.items()}))
        session.verify()
        session.undo()
        undone = same(memory(model), before)
        found = {name: tensor.clone() for name, tensor in target.checkpoint_tensors("model").items()}
        session = RefitSession(target, ["model"])
        session.update(items(found))
        session.verify()
        session.commit()
        return logits(model), undone, same(memory(model), before), found

    for found, undone, kept, read in on_ranks(2, work):
        assert undone
        assert kept
        assert (found - expected).norm() / expected.norm() < 0.1
        assert all(((read[n] - t).abs() <= t.abs() / 16 + 1e-3).all() for n, t in weights.items())


def test_an_engine_is_exact_and_its_refits_and_sleeps_keep_its_bits(folder: Path, other: Path) -> None:
    config = LLMConfig(
        str(folder),
        device="cpu",
        quantization="fp8",
        skip_tokenizer_init=True,
        max_total_tokens=1024,
        deterministic="on",
        control=ControlConfig(enable_memory_saver=True),
    )
    llm, chunked = LLM(config=config), LLM(config=replace(config, max_prefill_tokens=7))
    fresh = LLM(config=replace(config, model_path=str(other)))

    def run(engine: LLM, which: list[int]) -> list[tuple[list[int], object]]:
        found = engine.generate([PROMPTS[i] for i in which], [SAMPLED[i] for i in which], return_logprob=True)
        return [(g.output_ids, g.output.output_token_logprobs) for g in found]

    before, bits = run(llm, [0, 1, 2]), memory(llm.engine.model)
    assert llm.engine.describe()["quantization"] == "fp8"
    assert run(chunked, [2, 1, 0])[::-1] == before == [run(llm, [i])[0] for i in range(3)]
    assert llm.control_command("weights_checker", action="snapshot")["success"]
    llm.release_memory_occupation()
    llm.resume_memory_occupation()
    assert llm.control_command("weights_checker", action="compare")["mismatches"] == []
    assert same(memory(llm.engine.model), bits)
    llm.update_weights_from_disk(str(other))
    assert run(llm, [0, 1, 2]) == run(fresh, [0, 1, 2]) != before
    assert llm.get_weights_checksum() == fresh.get_weights_checksum()
    llm.control_command("weights_checker", action="reset_tensors")
    llm.control_command("release_memory_occupation", tags=["weights"], backup=False)
    llm.control_command("resume_memory_occupation", tags=["weights"])
    llm.update_weights_from_disk(str(folder))
    assert run(llm, [0, 1, 2]) == before
    assert same(memory(llm.engine.model), bits)


def test_products_of_bytes_are_those_of_quantised_inputs(folder: Path) -> None:
    model = load(folder, quantization="fp8", fp8_activations=True, deterministic="off")
    expected = logits(quantised(folder))
    error = (logits(model) - expected).norm() / expected.norm()
    assert 0 < error < 0.1
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(5, 128, generator=generator).bfloat16(), torch.randn(64, generator=generator).bfloat16()
    stored, scale = quantise(torch.randn(64, 128, generator=generator).bfloat16())
    whole = dequantise(*quantise(x), torch.float32) @ dequantise(stored, scale, torch.float32).t() + bias.float()
    torch.testing.assert_close(scaled_product(x, stored, scale, bias).float(), whole, rtol=2**-8, atol=0.02)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization": None, "deterministic": "off"}, "the weights aren't quantised"),
        ({"quantization": "fp8"}, "exact mode must be off"),
        ({"quantization": "fp8", "deterministic": "off", "dtype": "float16"}, "computed in float16"),
    ],
    ids=["whole", "exact", "dtype"],
)
def test_activations_that_cannot_be_quantised_are_refused(folder: Path, fields: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load(folder, fp8_activations=True, **fields)


def test_what_cannot_be_quantised_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    weights = stored(folder)
    weights[UP][0, 0] = torch.inf
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=rf"'{UP}': it holds NaN or infinity"):
        quantised(tmp_path)
    with pytest.raises(InvalidRequestError, match="no quantization 'int3'"):
        load(folder, quantization="int3")
