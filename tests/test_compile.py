"""Compiled at one fixed number of rows: a sample's bits depend neither on its batch nor on its place in it.

One graph is really compiled; what doesn't need compiled code runs on dynamo's `eager` backend, which traces the same
graph and leaves it at that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import flux_pipeline, qwen_image_pipeline, sd3_pipeline

from diffusion_rl.batch import DenoiseBatch
from diffusion_rl.config import ParallelConfig
from diffusion_rl.models import ModelFamily, family_for
from diffusion_rl.models.compiled import CompiledForward, refuse_inexact_replay
from diffusion_rl.models.runner import eager
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.certification import make_exact, probe_batch
from diffusion_rl.rollout.compilation import compile_family, compiled_rows, picked, refuse_compiled_ranks
from diffusion_rl.rollout.engine import RolloutEngine
from diffusion_rl.rollout.replay import replay
from diffusion_rl.sample import RolloutSample
from engine_control.errors import InvalidRequestError, NotExactError
from rl_kernels.certify import Verdict

ROWS = 4
SIDE = 64


def one_block(build: Any) -> ModelFamily:
    """A family of its own, certified for small pictures, whose transformer has one block: it compiles fast."""
    pipeline = build.__wrapped__()
    for blocks in (b for b in pipeline.transformer.children() if isinstance(b, torch.nn.ModuleList)):
        del blocks[:-1]
    family = family_for(pipeline)
    family.defaults = replace(family.defaults, height=SIDE, width=SIDE)
    make_exact(family, "on")
    return family


def compile_with(family: ModelFamily, backend: Any, wanted: str = "on") -> list[Verdict]:
    """What compilation adds to the table."""
    before = make_exact(family, "on")
    after = compile_family(family, before, rows=ROWS, wanted=wanted, backend=backend)
    assert before.certificate is not None
    assert after.certificate is not None
    return list(after.certificate.verdicts[len(before.certificate.verdicts) :])


@torch.no_grad()
def predict(family: ModelFamily, batch: DenoiseBatch, runner: Any = None) -> torch.Tensor:
    before = family.runner
    family.runner = runner or before
    try:
        return family.predict(batch)
    finally:
        family.runner = before


def rows_get_other_bits_by_place(graph: Any, _: object) -> Callable[..., Any]:
    """A compiler whose code is wrong in the way that certification must find."""

    def run(*arguments: Any) -> Any:
        (velocity,) = graph(*arguments)
        return (velocity * (1 + torch.arange(len(velocity)).view(-1, *[1] * (velocity.dim() - 1)) * 2**-20),)

    return run


def cannot_compile(graph: object, _: object) -> Callable[..., Any]:
    raise ValueError("no such instruction")


@pytest.fixture(scope="module")
def compiled() -> tuple[ModelFamily, list[Verdict]]:
    """Stable Diffusion 3, really compiled."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler here")
    family = one_block(sd3_pipeline)
    return family, compile_with(family, "inductor", "auto")


def certified(compiled: tuple[ModelFamily, list[Verdict]]) -> ModelFamily:
    family, verdicts = compiled
    if verdicts[0].implementation == "eager":
        pytest.skip(f"refused on this CPU: {verdicts[0].failed_at}")
    return family


def test_a_compiled_transformer_is_certified_or_refused_by_name(compiled: tuple[ModelFamily, list[Verdict]]) -> None:
    family, verdicts = compiled
    first = verdicts[0]
    assert first.operation == "compiled SD3Transformer2DModel, 4 rows"
    assert first.exact
    if first.implementation == "eager":
        assert (first.failed_at or "").startswith("torch.compile: 4 rows of 16 image and 280 text tokens: ")
        assert family.runner is eager
        return
    assert first.implementation == "torch.compile"
    replayed = verdicts[1]
    assert replayed.operation == "replay of compiled SD3Transformer2DModel"
    assert isinstance(family.runner, CompiledForward)
    assert (replayed.implementation == "exact") == (family.runner.other_bits == 0)
    assert family.runner.describe()["replay_exact"] == (family.runner.other_bits == 0)


def test_compiled_bits_do_not_depend_on_the_batch(compiled: tuple[ModelFamily, list[Verdict]]) -> None:
    family = certified(compiled)
    batch = probe_batch(family)
    whole = predict(family, batch)
    torch.testing.assert_close(whole, predict(family, batch, eager), atol=1e-3, rtol=1e-3)
    for start, end in ((0, 1), (4, 5), (0, 2), (1, 4), (0, 5)):
        assert torch.equal(predict(family, picked(batch, range(start, end))), whole[start:end])
    order = [3, 3, 1, 0, 2, 4, 1]
    assert torch.equal(predict(family, picked(batch, order)), whole[order])
    assert isinstance(family.runner, CompiledForward)
    assert family.runner.graphs == 1


def test_a_compiled_rollout_is_scored_without_gradients_bit_for_bit(
    compiled: tuple[ModelFamily, list[Verdict]],
) -> None:
    family = certified(compiled)
    runner = family.runner
    engine = RolloutEngine(family)
    family.runner, family.choices = runner, runner.choices  # type: ignore[attr-defined]
    samples = roll_out(engine)
    with torch.no_grad():
        scored = replay(family, samples)
    assert torch.equal(scored.cpu(), torch.stack([s.rollout_log_probs for s in samples]))


def roll_out(engine: RolloutEngine) -> list[RolloutSample]:
    """A guided group of two steps."""
    request = RolloutParams(
        prompt="a",
        height=SIDE,
        width=SIDE,
        num_inference_steps=2,
        guidance_scale=3.0,
        num_outputs_per_prompt=3,
        seed=1,
        output_type="latent",
        rollout_return_dit_trajectory=True,
        rollout_return_denoising_env=True,
    )
    engine.add_request("group", request)
    samples = []
    while engine.has_unfinished_requests():
        for finished in engine.step():
            assert finished.error is None
            samples += finished.result or []
    return samples


def test_replay_with_gradients_is_refused_where_its_bits_would_be_others() -> None:
    runner = CompiledForward(ROWS, one_block(sd3_pipeline).choices)
    other = torch.nn.Linear(1, 1)
    refuse_inexact_replay(runner, other)  # its graphs, if any, have the eager bits
    runner.other_bits = 7
    with torch.no_grad():
        refuse_inexact_replay(runner, None)
        with pytest.raises(InvalidRequestError, match="--enable-torch-compile"):
            refuse_inexact_replay(runner, other)
    with torch.enable_grad(), pytest.raises(InvalidRequestError, match="--enable-torch-compile"):
        refuse_inexact_replay(runner, None)
    refuse_inexact_replay(eager, other)


def test_filling_up_and_cutting_change_no_bit() -> None:
    family = one_block(qwen_image_pipeline)
    verdicts = compile_with(family, "eager")
    assert [v.implementation for v in verdicts] == ["torch.compile", "exact"]
    runner, batch = family.runner, probe_batch(family)
    assert isinstance(runner, CompiledForward)
    whole = predict(family, batch, eager)
    for start, end in ((0, 1), (0, 2), (1, 4), (0, 5)):
        assert torch.equal(predict(family, picked(batch, range(start, end))), whole[start:end])
    assert runner.graphs == 1  # texts of two lengths, padded to one
    family.transformer.requires_grad_(False)
    with torch.no_grad():
        family.transformer.proj_out.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    changed = predict(family, batch)
    assert torch.equal(changed, predict(family, batch, eager))
    assert not torch.equal(changed, whole)
    assert runner.graphs == 1
    runner.clear()
    assert runner.graphs == 0


def test_an_engine_runs_the_graph_that_certification_compiled() -> None:
    made: list[object] = []

    def counted(graph: Any, _: object) -> Callable[..., Any]:
        made.append(graph)
        return graph

    family = one_block(sd3_pipeline)
    engine = RolloutEngine(family)
    compile_with(family, counted)
    assert len(made) == 1
    roll_out(engine)
    assert len(made) == 1


def test_a_text_is_padded_by_its_own_length_alone() -> None:
    choices = one_block(sd3_pipeline).choices
    differing = CompiledForward(ROWS, choices, differing_texts=True)
    assert [differing.padded(n) for n in (1, 64, 65, 128, 129, 1000)] == [64, 64, 128, 128, 256, 1024]
    assert CompiledForward(ROWS, choices).padded(333) == 333


def test_texts_of_two_graphs_in_one_batch_have_their_own_bits() -> None:
    family = one_block(qwen_image_pipeline)
    batch = probe_batch(family)
    short, long = batch.conditioning[0].positive, batch.conditioning[1].positive
    far = replace(long, prompt_embeds=torch.cat([long.prompt_embeds] * 2))
    mixed = replace(
        batch, conditioning=tuple(replace(c, positive=(far, short)[i % 2]) for i, c in enumerate(batch.conditioning))
    )
    family.runner = runner = CompiledForward(ROWS, family.choices, differing_texts=True, backend="eager")
    assert torch.equal(predict(family, mixed), predict(family, mixed, eager))
    assert runner.graphs == 2
    assert not runner.refused


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(rows_get_other_bits_by_place, "other bits with rows"), (cannot_compile, "no such instruction")],
)
def test_what_is_not_exact_is_refused_by_name(
    compiler: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = one_block(sd3_pipeline)
    chosen = family.choices
    with pytest.raises(NotExactError, match=f"{reason}.*--enable-torch-compile"):
        compile_with(family, compiler)
    assert (family.runner, family.choices) == (eager, chosen)
    with caplog.at_level(logging.WARNING):
        (verdict,) = compile_with(family, compiler, "auto")
    assert verdict.implementation == "eager"
    assert reason in (verdict.failed_at or "")
    assert "--enable-torch-compile is left out" in caplog.text
    assert (family.runner, family.choices) == (eager, chosen)


def test_positions_that_all_rows_share_are_padded_as_the_text_is() -> None:
    family = one_block(flux_pipeline)
    batch = probe_batch(family)
    short, long = (family.encode_prompt("a", length) for length in (9, 70))
    mixed = replace(
        batch,
        conditioning=tuple(
            replace(c, positive=(short, long)[i % 2], negative=None) for i, c in enumerate(batch.conditioning)
        ),
    )
    family.runner = runner = CompiledForward(ROWS, family.choices, differing_texts=True, backend="eager")
    assert torch.equal(predict(family, mixed), predict(family, mixed, eager))
    assert runner.graphs == 2
    assert not runner.refused


def test_a_refused_graph_is_computed_eagerly_in_every_batch() -> None:
    family = one_block(qwen_image_pipeline)
    batch = probe_batch(family)
    family.runner = runner = CompiledForward(
        ROWS,
        family.choices,
        differing_texts=True,
        backend=rows_get_other_bits_by_place,
    )
    whole = predict(family, batch)
    assert torch.equal(whole, predict(family, batch, eager))
    assert torch.equal(predict(family, picked(batch, range(1, 3))), whole[1:3])
    assert len(runner.refused) == 1
    assert runner.refused[0].startswith("4 rows of 16 image and 256 text tokens: other bits with rows")


def test_without_exact_mode_graphs_are_taken_untried() -> None:
    family = one_block(sd3_pipeline)
    before = make_exact(family, "off")
    after = compile_family(family, before, rows=ROWS, wanted="off", backend="eager")
    assert after is before
    assert isinstance(family.runner, CompiledForward)
    assert not family.choices.exact
    torch.testing.assert_close(predict(family, probe_batch(family)), predict(family, probe_batch(family), eager))
    assert family.runner.describe()["replay_exact"] is None


def test_gradients_and_another_transformer_do_without_the_graphs() -> None:
    family = one_block(sd3_pipeline)
    family.runner = runner = CompiledForward(ROWS, family.choices, backend="eager")
    batch = picked(probe_batch(family), range(0, 1))
    with torch.enable_grad():
        assert family.predict(batch).requires_grad
    with torch.no_grad():
        family.predict(batch, family.transformer)
    assert runner.graphs == 0


def test_an_engine_is_not_compiled_unless_asked() -> None:
    family = one_block(sd3_pipeline)
    RolloutEngine(family)
    assert not isinstance(family.runner, CompiledForward)


@pytest.mark.parametrize(
    ("parallel", "field"),
    [(ParallelConfig(sp_degree=2), "sp_degree"), (ParallelConfig(enable_cfg_parallel=True), "enable_cfg_parallel")],
)
def test_ranks_and_compilation_are_refused_together(parallel: ParallelConfig, field: str) -> None:
    refuse_compiled_ranks(layout_of(ParallelConfig()))
    with pytest.raises(InvalidRequestError, match="Leave out --enable-torch-compile") as refused:
        refuse_compiled_ranks(layout_of(parallel))
    assert refused.value.field == field


def test_the_number_of_rows_is_that_of_a_small_full_batch() -> None:
    assert [compiled_rows(None, n) for n in (1, 3, 4, 32)] == [2, 6, 8, 8]
    assert compiled_rows(12, 32) == 12
    with pytest.raises(InvalidRequestError, match="torch_compile_rows"):
        compiled_rows(0, 32)
