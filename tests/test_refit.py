"""Refits through the Python pipeline, with real models: all or nothing, and the bits of what was committed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_rl.config import EngineConfig
from diffusion_rl.pipeline import RolloutPipeline
from diffusion_rl.sample import RolloutSample
from engine_control import checksum
from engine_control.config import ControlConfig
from engine_control.errors import (
    ConflictError,
    EngineError,
    EnginePausedError,
    InconsistentWeightsError,
    InvalidRequestError,
    RefitRefusedError,
    WeightSessionError,
)
from engine_control.refit.backends import WeightItem, transports
from engine_control.refit.backends.base import WeightTransport
from engine_control.refit.manifest import manifest_of
from engine_control.refit.session import RefitSession
from engine_control.refit.target import ModuleTarget

FIELDS: dict[str, Any] = {"seed": 3, "num_inference_steps": 4, "num_outputs_per_prompt": 2, "height": 64, "width": 64}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pipeline(tiny_sd3_folder: Path) -> Iterator[RolloutPipeline]:
    control = ControlConfig(enable_memory_saver=True)
    with RolloutPipeline.from_config(EngineConfig(str(tiny_sd3_folder), device="cpu", control=control)) as made:
        yield made


@pytest.fixture
def first(pipeline: RolloutPipeline) -> Iterator[Weights]:
    """The weights before the test, which has them again after it."""
    weights = weights_of(pipeline)
    yield weights
    if pipeline.control_state()["session"] is not None:
        pipeline.abort_weight_update(session_id=pipeline.control_state()["session"]["session_id"])
    pipeline.continue_generation()
    pipeline.resume_memory_occupation()
    pipeline.refit(weights, weight_version="default")


def weights_of(pipeline: RolloutPipeline) -> Weights:
    return {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}


def trained(weights: Weights, scale: float = 1.02) -> Weights:
    return {name: tensor * scale for name, tensor in weights.items()}


def bits(samples: list[RolloutSample]) -> list[torch.Tensor]:
    return [s.generated_output for s in samples] + [s.rollout_log_probs for s in samples]  # type: ignore[misc]


def equal(one: list[RolloutSample], other: list[RolloutSample]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def test_after_a_refit_outputs_are_those_of_an_engine_that_loaded_these_weights(
    pipeline: RolloutPipeline, first: Weights, tmp_path: Path
) -> None:
    before = pipeline("a red circle", **FIELDS)
    pipeline.refit(trained(first), weight_version="step-1")
    after = pipeline("a red circle", **FIELDS)
    assert not equal(before, after)
    assert {v for s in after for v in s.weight_versions} == {"step-1"}
    pipeline.engine.family.pipeline.save_pretrained(tmp_path / "saved")
    with RolloutPipeline.from_config(EngineConfig(str(tmp_path / "saved"), device="cpu")) as fresh:
        assert equal(fresh("a red circle", **FIELDS), after)
        assert fresh.get_weights_checksum() == pipeline.get_weights_checksum()


def broken(weights: Weights, what: str) -> Weights:
    """The weights with one fault."""
    last = list(weights)[-1]
    new = trained(weights)
    match what:
        case "missing":
            del new[last]
        case "unknown":
            new["transformer_blocks.99.weight"] = new[last]
        case "shape":
            new[last] = new[last][:-1]
        case "dtype":
            new[last] = new[last].half()
        case "nan":
            new[last][0] = float("nan")
        case "infinite":
            new[last][-1] = float("-inf")
    return new


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("missing", "missing_weights"),
        ("unknown", "unknown_weight"),
        ("shape", "wrong_shape"),
        ("dtype", "wrong_dtype"),
        ("nan", "non_finite_weights"),
        ("infinite", "non_finite_weights"),
    ],
)
def test_a_faulty_refit_is_refused_by_name_and_nothing_is_different(
    pipeline: RolloutPipeline, first: Weights, fault: str, code: str, *, staged: bool
) -> None:
    before, sums = pipeline("a red circle", **FIELDS), pipeline.get_weights_checksum()
    new = broken(first, fault)
    name = "transformer_blocks.99.weight" if fault == "unknown" else list(first)[-1]
    with pytest.raises(InvalidRequestError) as refused:
        pipeline.refit(new, weight_version="never", staged=staged)
    assert refused.value.code == code
    assert name in refused.value.message
    assert pipeline.get_weights_checksum() == sums
    assert equal(pipeline("a red circle", **FIELDS), before)
    assert pipeline.control_state()["weight_version"] == "default"
    assert pipeline.control_state()["state"] == "ready"


def test_a_weight_that_comes_twice_is_refused_and_the_session_can_only_be_undone(
    pipeline: RolloutPipeline, first: Weights
) -> None:
    sums = pipeline.get_weights_checksum()
    name, tensor = next(iter(trained(first).items()))
    pipeline.begin_weight_update(partial=True)
    pipeline.update_weights_from_tensor([(name, tensor)])
    with pytest.raises(InvalidRequestError, match="came twice"):
        pipeline.update_weights_from_tensor([(name, tensor)])
    with pytest.raises(WeightSessionError, match="was refused"):
        pipeline.update_weights_from_tensor([])
    with pytest.raises(WeightSessionError, match="came twice"):
        pipeline.end_weight_update()
    assert pipeline.get_weights_checksum() == sums
    assert pipeline.control_state()["session"] is None


def test_calls_out_of_order_are_refused_and_touch_no_byte(pipeline: RolloutPipeline, first: Weights) -> None:
    sums = pipeline.get_weights_checksum()
    with pytest.raises(WeightSessionError, match="no weight-update session is open"):
        pipeline.end_weight_update()
    with pytest.raises(WeightSessionError, match=r"must run between begin_weight_update\(\) and end_weight_update\(\)"):
        pipeline.update_weights_from_tensor(trained(first).items())
    pipeline.begin_weight_update()
    with pytest.raises(WeightSessionError, match="already open"):
        pipeline.begin_weight_update()
    pipeline.abort_weight_update()
    with pytest.raises(WeightSessionError):
        pipeline.abort_weight_update()
    assert pipeline.get_weights_checksum() == sums


def test_another_controller_is_told_whose_session_it_is(pipeline: RolloutPipeline, first: Weights) -> None:
    pipeline.begin_weight_update(session_id="mine")
    for call in (
        lambda: pipeline.begin_weight_update(session_id="yours"),
        lambda: pipeline.update_weights_from_tensor(first.items()),
        lambda: pipeline.end_weight_update(session_id="yours"),
        lambda: pipeline.abort_weight_update(),
    ):
        with pytest.raises(ConflictError, match="'mine'"):
            call()
    pipeline.update_weights_from_tensor(trained(first).items(), session_id="mine")
    pipeline.end_weight_update(session_id="mine")


def test_what_differs_from_the_manifest_is_undone(pipeline: RolloutPipeline, first: Weights) -> None:
    sums = pipeline.get_weights_checksum()
    meant, sent = trained(first), trained(first)
    name = next(iter(sent))
    sent[name].view(torch.int32).flatten()[0] ^= 1  # one bit, on the way
    manifest = manifest_of(("transformer", key, tensor) for key, tensor in meant.items())
    pipeline.begin_weight_update()
    pipeline.update_weights_from_tensor(sent.items())
    with pytest.raises(EngineError, match=f"{name!r} of 'transformer' has other bytes"):
        pipeline.end_weight_update(manifest=manifest)
    assert pipeline.get_weights_checksum() == sums


def test_part_of_the_weights_is_enough_if_it_is_said_so(pipeline: RolloutPipeline, first: Weights) -> None:
    name, tensor = next(iter(trained(first).items()))
    pipeline.refit({name: tensor}, partial=True, weight_version="one")
    now = weights_of(pipeline)
    assert torch.equal(now[name], tensor)
    assert all(torch.equal(now[other], first[other]) for other in first if other != name)


def between_steps(pipeline: RolloutPipeline, at: int, commands: list[tuple[str, dict[str, Any]]]) -> Any:
    """The samples of one request, with commands run between its steps `at` and `at + 1`, and the commands' answers."""
    loop, engine = pipeline._loop, pipeline.engine
    from diffusion_rl.params import params_from_mapping

    answer = loop.submit("request", params_from_mapping({"prompt": "a red circle", **FIELDS}))
    before, answers = engine.stats()["steps"], []

    def post() -> None:
        if engine.stats()["steps"] == before + at and not answers:
            answers.extend(loop.call(name, arguments) for name, arguments in commands)

    loop.run_until_idle(post)
    return answer, [a.result() if a.done() else a for a in answers]


def direct(weights: Weights) -> dict[str, Any]:
    return {"transport": "direct", "info": {"items": [[None, name, tensor] for name, tensor in weights.items()]}}


@pytest.mark.parametrize("how", ["in_place", "staged", "paused in place"])
def test_a_hot_refit_is_between_two_steps_and_each_step_says_under_which_weights_it_was_taken(
    pipeline: RolloutPipeline, first: Weights, how: str
) -> None:
    new = trained(first)
    begin = {} if how == "paused in place" else {how: True}
    refit = [
        ("begin_weight_update", begin),
        ("update_weights", direct(new)),
        ("end_weight_update", {"weight_version": "v2"}),
    ]
    pause = [("pause_generation", {"mode": "in_place"})]
    commands = [*pause, *refit, ("continue_generation", {})] if how == "paused in place" else refit
    keep = {"rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True}
    FIELDS.update(keep)
    try:
        answer, _ = between_steps(pipeline, 2, commands)
    finally:
        for name in keep:
            del FIELDS[name]
    samples = answer.result()
    assert [s.weight_versions for s in samples] == [("default", "default", "v2", "v2")] * 2
    for steps, weights in (([2, 3], new), ([0, 1], first)):
        pipeline.refit(weights)
        scored = pipeline.replay(samples, steps=steps).detach()
        taken = torch.stack([s.rollout_log_probs[steps] for s in samples])
        assert torch.equal(torch.exp(scored - taken), torch.ones_like(taken)), steps


def test_a_refit_waits_for_what_has_begun_unless_it_is_asked_not_to(pipeline: RolloutPipeline, first: Weights) -> None:
    refit = [("begin_weight_update", {}), ("update_weights", direct(trained(first)))]
    answer, answers = between_steps(pipeline, 2, refit[:1])
    assert {v for s in answer.result() for v in s.weight_versions} == {"default"}
    assert answers[0]["success"]
    assert pipeline.control_state()["state"] == "updating"
    with pytest.raises(EnginePausedError, match="updating"):
        pipeline("a red circle", **FIELDS)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_ends_with_the_bits_that_it_would_have_had(
    pipeline: RolloutPipeline, first: Weights, mode: str
) -> None:
    expected = pipeline("a red circle", **FIELDS)
    answer, _ = between_steps(pipeline, 2, [("pause_generation", {"mode": mode})])
    assert not answer.done()
    assert pipeline.engine.running_requests() == ([] if mode == "retract" else ["request"])
    assert pipeline.control_state()["generation"] == "waits"
    pipeline.continue_generation()
    assert equal(answer.result(), expected)


def test_a_pause_that_aborts_leaves_nothing_in_the_engine_and_one_that_waits_lets_it_finish(
    pipeline: RolloutPipeline, first: Weights
) -> None:
    answer, _ = between_steps(pipeline, 2, [("pause_generation", {"mode": "abort"})])
    with pytest.raises(EngineError, match="aborted"):
        answer.result()
    pipeline.continue_generation()
    answer, answers = between_steps(pipeline, 2, [("pause_generation", {"mode": "wait"})])
    assert len(answer.result()) == 2
    assert answers[0]["status"] == "ok"
    with pytest.raises(EnginePausedError):
        pipeline("a red circle", **FIELDS)


def test_a_frozen_request_sleeps_and_wakes_with_its_bits(pipeline: RolloutPipeline, first: Weights) -> None:
    expected = pipeline("a red circle", **FIELDS)
    answer, answers = between_steps(
        pipeline, 2, [("pause_generation", {"mode": "in_place"}), ("release_memory_occupation", {})]
    )
    assert answers[1]["bytes_freed"] > 1_000_000
    pipeline.resume_memory_occupation()
    pipeline.continue_generation()
    assert equal(answer.result(), expected)


def test_memory_is_not_released_under_a_request_and_an_update_needs_it_back(
    pipeline: RolloutPipeline, first: Weights
) -> None:
    outcome: list[BaseException | None] = []
    loop = pipeline._loop
    _, answers = between_steps(pipeline, 2, [("is_paused", {})])
    answer, answers = between_steps(pipeline, 1, [("release_memory_occupation", {"wait": True})])
    assert len(answer.result()) == 2
    assert answers[0]["sleeping"]
    with pytest.raises(ConflictError, match="released"):
        pipeline.begin_weight_update()
    refused = loop.call("update_weights", {"transport": "disk", "info": {"model_path": "nowhere"}})
    loop.run_until_idle()
    outcome.append(refused.exception())
    assert isinstance(outcome[0], ConflictError)


def test_weights_released_without_backup_come_back_by_a_complete_update_alone(
    pipeline: RolloutPipeline, first: Weights
) -> None:
    expected = pipeline("a red circle", **FIELDS)
    pipeline.release_memory_occupation(backup=False)
    assert pipeline.resume_memory_occupation()["undefined"] == ["transformer"]
    with pytest.raises(EngineError, match="undefined"):
        pipeline("a red circle", **FIELDS)
    begun = pipeline.begin_weight_update(partial=True)
    assert begun["undo"] == "none"
    assert begun["must_be_complete"]
    pipeline.update_weights_from_tensor(list(first.items())[:-1])
    with pytest.raises(InvalidRequestError, match="never came"):
        pipeline.end_weight_update()
    with pytest.raises(InconsistentWeightsError, match="without backup"):
        pipeline("a red circle", **FIELDS)
    assert pipeline.control_state()["state"] == "inconsistent"
    with pytest.raises(EngineError):
        pipeline.refit(dict(list(first.items())[:3]), partial=True)
    assert pipeline.control_state()["state"] == "inconsistent"
    pipeline.refit(first)
    assert pipeline.control_state()["state"] == "ready"
    assert equal(pipeline("a red circle", **FIELDS), expected)


def test_the_last_refit_survives_sleep_buffers_included(pipeline: RolloutPipeline, first: Weights) -> None:
    pipeline.refit(trained(first))
    sums, expected = pipeline.get_weights_checksum(), pipeline("a red circle", **FIELDS)
    buffers = {name for name, _ in pipeline.transformer.named_buffers()}
    assert buffers
    for _ in range(3):
        pipeline.release_memory_occupation()
        pipeline.release_memory_occupation(["weights"])
        pipeline.resume_memory_occupation(["weights"])
        assert pipeline.control_state()["state"] != "asleep"
        pipeline.resume_memory_occupation()
    assert pipeline.get_weights_checksum() == sums
    assert equal(pipeline("a red circle", **FIELDS), expected)


def test_a_refit_of_a_text_encoder_drops_the_prompts_that_it_encoded(pipeline: RolloutPipeline, first: Weights) -> None:
    before = pipeline("a red circle", **FIELDS)
    encoder = pipeline.engine.family.pipeline.text_encoder
    old = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    pipeline.refit({n: t * 1.5 if t.is_floating_point() else t for n, t in old.items()}, module="text_encoder")
    assert not equal(pipeline("a red circle", **FIELDS), before)
    pipeline.refit(old, module="text_encoder")
    assert equal(pipeline("a red circle", **FIELDS), before)


def test_a_session_whose_controller_goes_silent_is_undone(tiny_sd3_folder: Path) -> None:
    control = ControlConfig(weight_session_timeout_s=0.05)
    with RolloutPipeline.from_config(EngineConfig(str(tiny_sd3_folder), device="cpu", control=control)) as made:
        sums = made.get_weights_checksum()
        made.begin_weight_update()
        made.update_weights_from_tensor(list(trained(weights_of(made)).items())[:5])
        time.sleep(0.06)
        assert made.control_state()["session"] is None
        assert made.get_weights_checksum() == sums


class ListTransport(WeightTransport):
    """A user's own transport: it yields what a function of the caller's module makes."""

    make: Callable[[], Iterator[WeightItem]]

    def receive(self, info: Any) -> Iterator[WeightItem]:
        return type(self).make()


def test_a_transport_from_outside_that_fails_half_way_changes_nothing(
    pipeline: RolloutPipeline, first: Weights
) -> None:
    def half() -> Iterator[WeightItem]:
        for name, tensor in list(trained(first).items())[:7]:
            yield WeightItem("transformer", name, tensor)
        raise ConnectionResetError("the sender is gone")

    ListTransport.make = staticmethod(half)  # type: ignore[assignment]
    transports.register("list", ListTransport)
    sums = pipeline.get_weights_checksum()
    pipeline.begin_weight_update()
    with pytest.raises(EngineError, match="the sender is gone"):
        pipeline.control_command("update_weights", transport="list", info={})
    pipeline.abort_weight_update()
    assert pipeline.get_weights_checksum() == sums


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_may_come_under_either_name_and_under_both_only_if_they_agree() -> None:
    module = Tied()
    target = ModuleTarget({"model": module})
    new = torch.randn(8, 4)
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        session = RefitSession(target, ["model"])
        session.update(WeightItem(None, name, new) for name in names)
        session.verify()
        session.commit()
        assert torch.equal(module.head.weight, new)
    session = RefitSession(target, ["model"])
    with pytest.raises(RefitRefusedError, match="tied"):
        session.update([WeightItem(None, "embed.weight", new + 1), WeightItem(None, "head.weight", new)])
    session.undo()
    assert torch.equal(module.embed.weight, new)


def test_a_call_that_brought_a_tied_weight_under_both_names_is_undone_whole() -> None:
    module = Tied()
    before, new = module.embed.weight.detach().clone(), torch.randn(8, 4)
    session = RefitSession(ModuleTarget({"model": module}), ["model"])
    with pytest.raises(RefitRefusedError, match="no such weight"):
        session.update(WeightItem(None, name, new) for name in ("embed.weight", "head.weight", "tail.weight"))
    assert torch.equal(module.embed.weight, before)


class Odd(torch.nn.Module):
    """One layer under two names, one without a bias, a buffer that is saved, and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.BatchNorm1d(3))
        self.second = self.first
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_target_holds_what_the_modules_state_dict_says(hooked: bool) -> None:
    module = Odd()

    def drop(module: torch.nn.Module, state: dict[str, torch.Tensor], *others: object) -> None:
        del state["kept"]

    if hooked:
        module.register_state_dict_post_hook(drop)
    target = ModuleTarget({"model": module})
    said = module.state_dict()
    assert ("kept" in said) is not hooked
    target.begin(["model"])
    held = target.checkpoint_tensors("model")
    assert [(n, t.data_ptr()) for n, t in held.items()] == [(n, t.data_ptr()) for n, t in said.items()]
    assert not any(t.requires_grad for t in held.values())
    assert target.tied("model", "second.0.weight") == "first.0.weight"
    assert target.tied("model", "first.0.weight") == "first.0.weight"


class BadTarget(ModuleTarget):
    """An engine whose kernels' layout can't be made again."""

    def finish(self, modules: Any) -> None:
        raise RuntimeError("no layout")


def test_an_undo_that_fails_is_said_so() -> None:
    from engine_control.rank import RankCommand, RankControl

    class Rank:
        target = BadTarget({"model": Tied()})
        memory: Any = None
        device = torch.device("cpu")
        weight_kernels = None

        def flush_caches(self, modules: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

    rank = RankControl(Rank())
    assert rank.carry_out(RankCommand("begin", {"modules": ["model"], "partial": False, "staged": False, "undo": True}))
    outcome = rank.carry_out(RankCommand("undo", {}))
    assert outcome.error is not None
    assert "no layout" in outcome.error.message


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.data())
def test_the_fast_digest_finds_every_single_bit_and_every_swap(numel: int, data: st.DataObject) -> None:
    torch.manual_seed(numel)
    tensor = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    [digest] = checksum.device_digests([("t", tensor)]).values()
    place, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 7))
    flipped = tensor.clone()
    flipped[place] ^= 1 << bit
    assert checksum.device_digests([("t", flipped)])["t"] != digest
    assert checksum.device_digests([("t", tensor.clone())])["t"] == digest
    shifted = tensor.roll(1)
    assert torch.equal(shifted, tensor) or checksum.device_digests([("t", shifted)])["t"] != digest


def test_the_fast_digest_covers_all_of_a_large_tensor_and_its_shape_and_dtype() -> None:
    words = 3 * checksum.CHUNK_WORDS + 17
    tensor = torch.arange(words, dtype=torch.int32)
    digest = checksum.device_digests([("t", tensor)])["t"]
    for place in (0, checksum.CHUNK_WORDS, 2 * checksum.CHUNK_WORDS - 1, words - 1):
        changed = tensor.clone()
        changed[place] ^= 1 << 31
        assert checksum.device_digests([("t", changed)])["t"] != digest
    swapped = torch.cat([tensor[checksum.CHUNK_WORDS :], tensor[: checksum.CHUNK_WORDS]])
    assert checksum.device_digests([("t", swapped)])["t"] != digest
    assert checksum.device_digests([("t", tensor.view(torch.float32))])["t"] != digest
    assert checksum.device_digests([("t", tensor[None])])["t"] != digest


def test_the_fast_digest_is_the_one_that_its_text_describes() -> None:
    factors = checksum._factors(torch.device("cpu")).long()
    assert torch.equal(factors % 2, torch.ones_like(factors))
    assert (int(factors.min()), int(factors.max())) == (-63, 63)
    for count, dtype in (
        (0, torch.uint8),
        (1, torch.uint8),
        (1 << 15, torch.int8),
        (20_001, torch.int16),
        (1_100_001, torch.int8),
    ):
        tensor = torch.arange(count).mul(2654435761).to(dtype)
        level, small = tensor.view(torch.int8), tensor.nbytes <= 1 << 15
        level = torch.nn.functional.pad(level, (0, -level.numel() % (1024 if small else 1 << 20)))
        for _ in range(1 if small else 3):
            level = (level.view(-1, 1024).long() @ factors).int().view(-1).view(torch.int8)
        head = f"{dtype}[{count}]".encode()
        wanted = hashlib.blake2b(head + level.numpy().tobytes(), digest_size=16).hexdigest()
        assert checksum.device_digests([("t", tensor)]) == {"t": wanted}
    assert wanted == "0cdb69fc6d04c78d604d3f2e3696c2d3"
