"""Every family of the language runtime on a GPU, in bf16 and with weights of one byte: the bits that its batch, its
chunks and a later look at the whole sequence give a token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llms import FAMILIES, make_tiny_llm

from llm_runtime import LLM, LLMConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[5, 9, 31, 7], list(range(20, 63)), [3], [*range(20, 63), 11, 12], list(range(1, 200))]
PARAMS = [{"temperature": 0.9, "max_new_tokens": 12, "sampling_seed": i, "ignore_eos": True} for i in range(5)]

Rows = list[tuple[list[int], list[float]]]


def drawn(llm: LLM, which: list[int]) -> Rows:
    """Tokens and log-probs of these prompts, drawn together."""
    found = llm.generate([PROMPTS[i] for i in which], [PARAMS[i] for i in which], return_logprob=True)
    return [(one.output_ids, [p for p, *_ in one.output.output_token_logprobs]) for one in found]


def scored(llm: LLM, which: list[int], rows: Rows) -> list[list[float]]:
    """The log-probs of the drawn tokens, in one look at the whole sequences."""
    found = llm.generate(
        [PROMPTS[i] + ids for i, (ids, _) in zip(which, rows, strict=True)],
        {"max_new_tokens": 0, "temperature": 0.9},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [
        [p for p, *_ in one.output.input_token_logprobs][-len(ids) :] for one, (ids, _) in zip(found, rows, strict=True)
    ]


@pytest.fixture(params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_llm(tmp_path, request.param, dtype=torch.bfloat16, tokenizer=False)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_token_has_its_bits_in_any_batch_chunk_and_look(folder: Path, quantization: str | None) -> None:
    config = LLMConfig(
        str(folder),
        device="cuda",
        skip_tokenizer_init=True,
        max_total_tokens=4096,
        deterministic="on",
        quantization=quantization,  # type: ignore[arg-type]
    )
    everyone = list(range(len(PROMPTS)))
    with LLM(config=config) as llm:
        together = drawn(llm, everyone)
        assert [drawn(llm, [i])[0] for i in everyone] == together
        assert scored(llm, everyone, together) == [probs for _, probs in together]
    for other in (replace(config, max_prefill_tokens=7), replace(config, cuda_graphs=False, overlap_schedule="off")):
        with LLM(config=other) as llm:
            assert drawn(llm, everyone) == together


def test_products_of_bytes_are_near_those_of_the_numbers_they_stand_for(tmp_path: Path) -> None:
    folder = make_tiny_llm(tmp_path, dtype=torch.bfloat16, tokenizer=False)
    config = LLMConfig(
        str(folder),
        device="cuda",
        skip_tokenizer_init=True,
        max_total_tokens=4096,
        quantization="fp8",
        deterministic="off",
    )
    with LLM(config=config) as llm:
        rows = drawn(llm, [1, 4])
        whole = torch.tensor(scored(llm, [1, 4], rows))
    with LLM(config=replace(config, fp8_activations=True)) as llm:
        bytewise = torch.tensor(scored(llm, [1, 4], rows))
    assert not torch.equal(bytewise, whole)
    assert (bytewise - whole).abs().mean() < 0.15 * whole.abs().mean()
