"""Experts: the router's choice, and an engine in which a token's bits don't depend on who shares its experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llms import make_tiny_llm

from engine_control.errors import InvalidRequestError
from llm_runtime import LLM, LLMConfig
from llm_runtime.models.loading import load_model, read_model_config
from llm_runtime.models.qwen3_moe import Qwen3MoeForCausalLM
from rl_kernels.routing import choose_experts

EXPERTS = 8
PROMPTS = [[5, 9, 31, 7], list(range(20, 63)), [3], [*range(20, 63), 11, 12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "moe", "qwen3_moe", tokenizer=False)


def test_equal_scores_go_to_the_lower_experts_in_every_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 3, (200, EXPERTS), generator=generator).float()
    experts, weights = choose_experts(scores, 3, normalised=True)
    for row, chosen in zip(scores.tolist(), experts.tolist(), strict=True):
        best = sorted((-score, expert) for expert, score in enumerate(row))[:3]
        assert chosen == sorted(expert for _, expert in best)
    for part in (slice(0, 1), slice(7, 9), slice(50, 131)):
        alone = choose_experts(scores[part], 3, normalised=True)
        assert torch.equal(alone[0], experts[part])
        assert torch.equal(alone[1], weights[part])
    torch.testing.assert_close(weights.sum(-1), torch.ones(200))
    as_they_are = choose_experts(scores, 3, normalised=False)[1]
    torch.testing.assert_close(as_they_are, scores.softmax(-1).gather(-1, experts.long()), rtol=0, atol=0)


def test_a_request_has_the_same_bits_in_any_batch_and_chunk(folder: Path) -> None:
    def run(llm: LLM, which: list[int]) -> list[tuple[list[int], object]]:
        params = [{"temperature": 0.9, "max_new_tokens": 9, "sampling_seed": i, "ignore_eos": True} for i in which]
        found = llm.generate([PROMPTS[i] for i in which], params, return_logprob=True)
        return [(generated.output_ids, generated.output.output_token_logprobs) for generated in found]

    config = LLMConfig(str(folder), skip_tokenizer_init=True, max_total_tokens=1024, deterministic="on")
    alone, chunked = LLM(config=config), LLM(config=replace(config, max_prefill_tokens=7))
    assert run(chunked, [0, 1, 2, 3]) == [run(alone, [index])[0] for index in range(4)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than the 6 experts"),
        ({"num_local_experts": 0}, "num_local_experts must be a positive whole number"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be"),
    ],
    ids=["chosen", "experts", "width"],
)
def test_numbers_that_make_no_experts_are_refused_by_name(fields: dict[str, object], said: str, folder: Path) -> None:
    config = read_model_config(folder)
    with pytest.raises(InvalidRequestError, match=said):
        Qwen3MoeForCausalLM(replace(config, raw={**config.raw, **fields}))


def test_inner_widths_that_ranks_cannot_share_are_refused_by_name(folder: Path) -> None:
    class Rank:
        rank, size = 0, 2

    config = read_model_config(folder)
    with pytest.raises(InvalidRequestError, match=r"moe_intermediate_size=63 .*tp_size=2"):
        Qwen3MoeForCausalLM(replace(config, raw={**config.raw, "moe_intermediate_size": 63}), Rank())  # type: ignore[arg-type]


def test_dummy_experts_are_drawn_too(folder: Path) -> None:
    model = load_model(LLMConfig(model_path=str(folder), device="cpu", load_format="dummy"))
    up = model.refit_target().checkpoint_tensors("model")["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert 0.01 < up.std() < 0.03
    assert not model.capturable
