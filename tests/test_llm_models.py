"""The language models: transformers' numbers, the checkpoint's names, and ranks that share them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llms
import torch
from model_ranks import TOKENS, GlooRank, heads_of, load, logits, on_ranks, stored
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_control.errors import InvalidRequestError, RefitRefusedError
from engine_control.memory.base import mechanisms
from engine_control.memory.saver import MemorySaver
from engine_control.refit.backends.base import WeightItem
from engine_control.refit.session import RefitSession
from engine_control.refit.target import ShardedTarget
from llm_runtime.config import LLMConfig
from llm_runtime.layers.rotary import inverse_frequencies
from llm_runtime.models import families
from llm_runtime.models.loading import load_model, model_folder, read_model_config
from rl_kernels import exact_mode
from rl_kernels.paged_qkv import HeadNorms, Rotation

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tied": True},
    "qwen2": {
        "family": "qwen2",
        "max_shard_size": "200KB",
        "rope": {"rope_type": "default", "rope_theta": 300.0},
    },
    "llama": {"family": "llama", "rope": {**tiny_llms.LLAMA3_ROPE, "rope_theta": 5e5}},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3-bf16": {"family": "qwen3", "dtype": torch.bfloat16},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_moe-bf16": {
        "family": "qwen3_moe",
        "dtype": torch.bfloat16,
        "norm_topk_prob": False,
        "layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
}
TIED = "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each case's folder, made when it is first asked for."""
    root = tmp_path_factory.mktemp("llms")

    def folder(case: str) -> Path:
        made = root / case
        return made if made.exists() else tiny_llms.make_tiny_llm(made, tokenizer=False, **CASES[case])

    return folder


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> Path:
    """The folder's model once more, with other tensors, or other fields of its config."""
    tensors = stored(folder)
    change(tensors)
    to.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    fields = {**json.loads((folder / "config.json").read_text()), **config}
    (to / "config.json").write_text(json.dumps(fields))
    return to


def unchanged(tensors: dict[str, torch.Tensor]) -> None:
    """For `rewritten`."""


def test_every_family_is_tried() -> None:
    assert {case["family"] for case in CASES.values()} == set(families.names())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, folders: Callable[[str], Path]) -> None:
    model = load(folders(case))
    ours = logits(model)
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(folders(case), experts_implementation="eager")
        theirs = reference(TOKENS[None]).logits[0].float()
    assert ours.dtype == torch.float32
    exactly = model.config.dtype == torch.bfloat16  # roundings stand where transformers has them
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if exactly else 1e-5)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(case: str, folders: Callable[[str], Path]) -> None:
    def to_itself(layer: int, qkv: torch.Tensor, *, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        query, key, value = heads_of(model, qkv, rotation, norms)
        return query * key.repeat_interleave(2, 1) + value.repeat_interleave(2, 1)

    model, positions = load(folders(case)), torch.arange(20, 20 + len(TOKENS))
    with torch.no_grad(), exact_mode():
        together = model.compute_logits(model(TOKENS, positions, to_itself))
        for part in (slice(0, 1), slice(3, 5), slice(2, 11)):
            alone = model.compute_logits(model(TOKENS[part], positions[part], to_itself))
            assert torch.equal(alone, together[part])


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_the_checkpoint_is_found_under_its_name(case: str, folders: Callable[[str], Path]) -> None:
    model = load(folders(case))
    target, checkpoint = model.refit_target(), stored(folders(case))
    infos, whole = target.modules()["model"], target.checkpoint_tensors("model")
    assert set(infos) == set(whole) == set(checkpoint) | ({TIED[0]} if model.config.tie_word_embeddings else set())
    for name, tensor in checkpoint.items():
        assert infos[name].shape == tuple(tensor.shape)
        assert infos[name].dtype == tensor.dtype
        assert torch.equal(whole[name], tensor), name
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in checkpoint.values())


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "qwen3_moe"])
def test_a_refit_of_all_weights_is_as_loading_them(case: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    other = tiny_llms.make_tiny_llm(tmp_path / "other", tokenizer=False, **{**CASES[case], "seed": 1})
    model = load(folders(case))
    session = RefitSession(model.refit_target(), ["model"])
    session.update(WeightItem(None, name, tensor) for name, tensor in stored(other).items())
    session.verify()
    session.commit()
    assert torch.equal(logits(model), logits(load(other)))


def test_an_undone_refit_leaves_every_bit(folders: Callable[[str], Path]) -> None:
    model = load(folders("qwen2"))
    before = logits(model)
    session = RefitSession(model.refit_target(), ["model"])
    session.update([WeightItem(None, name, tensor + 1) for name, tensor in stored(folders("qwen2")).items()])
    assert not torch.equal(logits(model), before)
    session.undo()
    session = RefitSession(model.refit_target(), ["model"])
    with pytest.raises(RefitRefusedError, match="NaN"):
        session.update([WeightItem(None, QUERY, torch.full((128, 128), torch.nan))])
    assert torch.equal(logits(model), before)


def test_weights_that_slept_are_refitted_where_they_woke(folders: Callable[[str], Path]) -> None:
    model = load(folders("qwen2"))
    target, before = model.refit_target(), logits(model)
    saver = MemorySaver(mechanisms.get("host")(torch.device("cpu")), pinned=False)
    saver.hold("weights", lambda: dict(model.named_parameters()), discardable=lambda name: True)
    saver.release(["weights"], backup=False)
    saver.resume(["weights"])
    session = RefitSession(target, ["model"], undo=False)
    session.update(WeightItem(None, name, tensor) for name, tensor in stored(folders("qwen2")).items())
    session.verify()
    session.commit()
    assert torch.equal(logits(model), before)
    saver.close()


def test_tied_weights_go_by_either_name(folders: Callable[[str], Path]) -> None:
    target = load(folders("qwen3")).refit_target()
    assert target.tied("model", TIED[0]) == target.tied("model", TIED[1]) == TIED[1]
    assert target.tied("model", QUERY) == QUERY
    untied = load(folders("qwen2")).refit_target()
    assert untied.tied("model", TIED[0]) == TIED[0]
    session = RefitSession(target, ["model"], partial=True)
    new = target.checkpoint_tensors("model")[TIED[0]] + 1
    session.update([WeightItem(None, TIED[0], new), WeightItem(None, TIED[1], new.clone())])
    assert torch.equal(target.checkpoint_tensors("model")[TIED[1]], new)
    again = RefitSession(target, ["model"], partial=True)
    with pytest.raises(RefitRefusedError, match=r"tied to 'lm_head\.weight'"):
        again.update([WeightItem(None, TIED[0], new), WeightItem(None, TIED[1], new + 1)])


@pytest.mark.parametrize(
    ("case", "ranks"),  # four ranks: more than key and value heads
    [("qwen3", 2), ("qwen3", 4), ("llama-biases", 2), ("llama-biases", 4), ("qwen3_moe", 2)],
)
def test_ranks_share_a_model(case: str, ranks: int, folders: Callable[[str], Path]) -> None:
    folder = folders(case)
    alone, checkpoint = logits(load(folder)), stored(folder)
    config = LLMConfig(model_path=str(folder), device="cpu")

    def work(rank: GlooRank) -> tuple[torch.Tensor, int, list[str], torch.Tensor, dict[str, torch.Tensor]]:
        model = load_model(config, rank)
        first = logits(model)
        target = model.refit_target()
        assert isinstance(target, ShardedTarget)
        own = {name: target.own_part("model", name) for name in checkpoint}
        found = target.checkpoint_tensors("model")
        wrong = [name for name, tensor in checkpoint.items() if not torch.equal(found[name], tensor)]
        for staged in (False, True):  # halved twice, so that both forms were written
            session = RefitSession(target, ["model"], staged=staged)
            scale = 0.25 if staged else 0.5
            session.update(WeightItem(None, name, tensor * scale) for name, tensor in checkpoint.items())
            session.verify()
            session.commit()
        wrong += [name for name, tensor in checkpoint.items() if not torch.equal(found[name], tensor * 0.25)]
        session = RefitSession(target, ["model"])
        session.update(WeightItem(None, name, tensor) for name, tensor in checkpoint.items())
        session.commit()
        return first, sum(p.numel() for p in model.parameters()), wrong, logits(model), own

    replies = on_ranks(ranks, work)
    for first, parameters, wrong, last, own in replies:
        torch.testing.assert_close(first, alone, rtol=0, atol=2e-5)
        assert torch.equal(first.argmax(-1), alone.argmax(-1))
        assert parameters < sum(t.numel() for t in checkpoint.values()) * (0.52 if ranks == 2 else 0.35)
        assert wrong == []
        assert torch.equal(last, first)
        assert all(((part == checkpoint[name]) | (part == 0)).all() for name, part in own.items())
    owned = sum(sum(part.count_nonzero() for part in reply[-1].values()) for reply in replies)
    assert owned == sum(reply[1] for reply in replies)


@pytest.mark.parametrize(
    ("ranks", "field", "number"),
    [
        (3, "num_attention_heads", 4),
        (4, "num_key_value_heads", 3),
        (2, "vocab_size", 319),
        (2, "intermediate_size", 99),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused_by_name(
    ranks: int, field: str, number: int, folders: Callable[[str], Path]
) -> None:
    class Rank:
        rank, size = 0, ranks

    sizes = {"vocab_size": 960, field: number}
    config = replace(read_model_config(folders("qwen3")), **sizes)
    with pytest.raises(InvalidRequestError, match=f"{field}={number} .*tp_size={ranks}"):
        families.get("qwen3")(config, Rank())


def test_dummy_weights_are_a_function_of_the_seed(folders: Callable[[str], Path]) -> None:
    one, same, other = (
        load(folders("qwen3"), load_format="dummy", random_seed=seed, dtype="bfloat16") for seed in (3, 3, 4)
    )
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))
    assert logits(one).isfinite().all()
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    config = LLMConfig(str(folders("qwen3")), device="cpu", load_format="dummy", random_seed=3, dtype="bfloat16")
    whole = one.refit_target().checkpoint_tensors("model")
    for tensors in on_ranks(2, lambda r: dict(load_model(config, r).refit_target().checkpoint_tensors("model"))):
        assert all(torch.equal(tensors[name], whole[name]) for name in whole)


def test_configs_of_transformers_4_and_5_say_the_same(folders: Callable[[str], Path], tmp_path: Path) -> None:
    new = read_model_config(folders("llama"))
    fields = json.loads((folders("llama") / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": fields.pop("dtype")}
    fields["rope_scaling"]["type"] = fields["rope_scaling"].pop("rope_type")
    for optional in ("head_dim", "attention_bias", "mlp_bias"):
        del fields[optional]
    (tmp_path / "config.json").write_text(json.dumps({**fields, "torch_dtype": "bfloat16"}))
    old = read_model_config(tmp_path)
    for name in ("architecture", "rope_theta", "head_dim", "rms_norm_eps", "vocab_size", "num_key_value_heads"):
        assert getattr(old, name) == getattr(new, name), name
    assert (old.dtype, new.dtype) == (torch.bfloat16, torch.float32)
    frequencies = [inverse_frequencies(32, c.rope_theta, c.rope_scaling)[0] for c in (old, new)]
    assert torch.equal(*frequencies)
    assert new.eos_token_ids == (tiny_llms.TURN_END, tiny_llms.END_OF_TEXT)  # of generation_config.json
    assert old.eos_token_ids == (tiny_llms.TURN_END,)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        tiny_llms.LLAMA3_ROPE,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "truncate": False, "mscale": 0.7}
        | {"mscale_all_dim": 1.2, "beta_fast": 24, "beta_slow": 2},
    ],
    ids=["linear", "llama3", "yarn", "yarn-all"],
)
def test_scaled_rotary_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10_000.0, **scaling}
    config = LlamaConfig(head_dim=64, max_position_embeddings=512, rope_parameters=parameters)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours, factor = inverse_frequencies(64, 10_000.0, scaling)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert factor == pytest.approx(their_factor, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Qwen2.*, Qwen3ForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"hidden_size": None}, "hidden_size"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id .*'</s>'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is 'fp8'"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'.*linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs 'factor'"),
    ],
    ids=["architecture", "none", "size", "end", "activation", "window", "quantised", "dtype", "rope", "rope-field"],
)
def test_a_config_that_no_family_serves_is_refused_by_name(
    fields: dict[str, Any], said: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load(rewritten(folders("qwen2"), tmp_path / "other", unchanged, **fields))


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("qwen2", lambda t: t.pop(QUERY), rf"'{QUERY}': it is missing"),
        (
            "qwen2",
            lambda t: t.update({"model.extra.weight": torch.ones(2)}),
            r"'model\.extra\.weight': the model has no",
        ),
        ("qwen2", lambda t: t.update({QUERY: torch.ones(128, 64)}), rf"'{QUERY}'.*\(128, 64\).*\(128, 128\)"),
        (
            "qwen3",
            lambda t: t.update({TIED[0]: torch.ones(320, 128)}),
            rf"ties it to '{TIED[1]}'|ties it to '{TIED[0]}'",
        ),
    ],
    ids=["missing", "unknown", "shape", "tied"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_tensors_name(
    case: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load(rewritten(folders(case), tmp_path / "other", change))


def test_a_tied_head_may_be_in_the_checkpoint_too(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = rewritten(folders("qwen3"), tmp_path / "both", lambda t: t.update({TIED[0]: t[TIED[1]].clone()}))
    assert torch.equal(logits(load(folder)), logits(load(folders("qwen3"))))


def test_a_folder_without_all_its_files_is_refused_by_name(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(InvalidRequestError, match="no such folder"):
        model_folder(str(tmp_path / "absent"))
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((folders("qwen2") / name).read_bytes())
    with pytest.raises(InvalidRequestError, match="names model-00001-of-"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0{broken}")
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors can't be read"):
        load(tmp_path)
    with pytest.raises(InvalidRequestError, match="context_length=1000 is more than max_position_embeddings=512"):
        load(folders("qwen2"), context_length=1000)
