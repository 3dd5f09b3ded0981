"""CUDA graphs of the LLM engine: what a batch is padded to changes no bit. Capturing itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_llms import make_tiny_llm

from llm_runtime import LLM, LLMConfig
from llm_runtime.engine.batches import Span, batch_of
from llm_runtime.engine.graphs import DecodeGraphs, padded, size_for
from rl_kernels.graph_pool import GraphPool

PARAMS = {"temperature": 0.8, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("llm") / "qwen3", dtype=torch.bfloat16)


def test_sizes_cover_every_batch() -> None:
    assert [size_for(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 250)] == [16, 16, 16, 16, 16, 16, 16, 32, 256]


def test_padding_rows_and_wider_tables_change_no_bit(folder: Path) -> None:
    runner = LLM(config=LLMConfig(str(folder), device="cpu", max_total_tokens=512)).engine.runner
    prompts = [list(range(5, 30)), [3, 4], list(range(9, 51))]
    pages, first = [], 1
    for prompt in prompts:
        count = -(-len(prompt) // 16)
        pages.append(list(range(first, first + count)))
        first += count
    runner.forward(batch_of([Span(p, 0, own) for p, own in zip(prompts, pages, strict=True)], page_size=16))
    last = [Span(p[-1:], len(p) - 1, own, draws=1) for p, own in zip(prompts, pages, strict=True)]
    batch = batch_of(last, page_size=16)
    wanted, _ = runner.forward(batch)
    before = runner.cache.storage.clone()
    with runner.exact(), torch.inference_mode():
        inputs = padded(batch, 8, 20, page_size=16, device=torch.device("cpu"))
        found = runner.hidden_states(inputs)
    assert inputs.input_ids.shape == (8,)
    assert inputs.plan.page_table.shape == (8, 20)
    assert torch.equal(found[:3], wanted)
    assert torch.equal(runner.cache.storage, before)


def test_only_batches_of_single_tokens_are_taken(folder: Path) -> None:
    cpu = torch.device("cpu")
    graphs = DecodeGraphs(lambda inputs: inputs.slots, page_size=16, max_batch_size=2, device=cpu, pool=GraphPool(cpu))
    one = Span([1], 4, [1], draws=1)
    assert graphs.takes(batch_of([one, one], page_size=16))
    assert not graphs.takes(batch_of([one, one, one], page_size=16))
    assert not graphs.takes(batch_of([one, Span([1, 2], 4, [1], draws=1)], page_size=16))
    assert not graphs.takes(batch_of([one], page_size=16, scored=[0]))


@needs_gpu
def test_replayed_decoding_has_the_bits_of_eager_decoding_through_refits_and_sleeps(folder: Path) -> None:
    from engine_control.config import ControlConfig

    prompts = [[i, *range(20, 20 + 7 * i)] for i in range(1, 12)]

    def run(llm: LLM) -> list[tuple[object, object]]:
        outputs = [g.output for g in llm.generate(prompts, PARAMS, return_logprob=True)]
        return [(o.output_ids, o.output_token_logprobs) for o in outputs]

    control = ControlConfig(enable_memory_saver=True)
    config = {"device": "cuda", "control": control, "max_total_tokens": 4096}
    eager = run(LLM(config=LLMConfig(str(folder), cuda_graphs=False, **config)))
    with LLM(config=LLMConfig(str(folder), **config)) as llm:
        assert llm.engine.runner.graphs is not None, llm.engine.exactness.describe()
        assert run(llm) == eager
        assert llm.engine.runner.steps.captured
        llm.release_memory_occupation()
        llm.resume_memory_occupation()
        assert run(llm) == eager
        llm.update_weights_from_disk(str(folder), recapture_cuda_graph=True)
        assert run(llm) == eager
