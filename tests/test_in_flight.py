"""Results that are still on their way to the host while the engine goes on, as on a GPU."""

from __future__ import annotations

import pytest
import torch
from equality import assert_same_bits
from tiny_models import sd3_pipeline

from diffusion_rl.models import ModelFamily, family_for
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.engine import DEPARTURES_AHEAD, RolloutEngine
from diffusion_rl.sample import RolloutSample
from diffusion_rl.transfer import HostCopies, Moment

FULL = {"height": 32, "width": 32, "num_inference_steps": 4, "rollout_return_dit_trajectory": True}


class Landing(Moment):
    """Passes when it is waited for, or when its copies are told to land."""

    def __init__(self, copies: SlowCopies) -> None:
        super().__init__(torch.device("cpu"))
        self.copies = copies
        self.waited = False

    def passed(self) -> bool:
        return self.waited or self.copies.fast

    def wait(self) -> None:
        self.waited = True
        self.copies.waits += 1


class SlowCopies(HostCopies):
    """Copies that land late."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.fast = False
        self.waits = 0

    def landing(self) -> Moment:
        return Landing(self)


@pytest.fixture(scope="module")
def family() -> ModelFamily:
    return family_for(sd3_pipeline())


@pytest.fixture
def slow(family: ModelFamily) -> tuple[RolloutEngine, SlowCopies]:
    engine, copies = RolloutEngine(family), SlowCopies()
    engine._copies = copies
    return engine, copies


def request(**fields: object) -> RolloutParams:
    return RolloutParams("cat", **{**FULL, "seed": 3, "output_type": "both", **fields})  # type: ignore[arg-type]


def run(engine: RolloutEngine) -> dict[str, list[RolloutSample]]:
    results = {}
    while engine.has_unfinished_requests():
        for finished in engine.step():
            assert finished.error is None
            assert finished.request_id not in results
            assert finished.result is not None
            results[finished.request_id] = finished.result
    return results


def alone(family: ModelFamily, params: RolloutParams) -> list[RolloutSample]:
    engine = RolloutEngine(family)
    engine.add_request("one", params)
    return run(engine)["one"]


def until_departed(engine: RolloutEngine) -> None:
    while not len(engine._departures):
        assert engine.step() == []


def test_others_step_on_while_a_result_is_under_way(
    slow: tuple[RolloutEngine, SlowCopies], family: ModelFamily
) -> None:
    engine, copies = slow
    short, long = request(num_inference_steps=1), request(seed=4)
    engine.add_request("short", short)
    engine.add_request("long", long)
    until_departed(engine)
    before = engine.stats()["steps"]
    assert engine.step() == []
    assert engine.stats()["steps"] == before + 1
    assert copies.waits == 0
    copies.fast = True
    assert [finished.request_id for finished in engine.step()] == ["short"]
    assert_same_bits(run(engine)["long"][0], alone(family, long)[0])


def test_an_idle_engine_waits_for_what_is_under_way(
    slow: tuple[RolloutEngine, SlowCopies], family: ModelFamily
) -> None:
    engine, _ = slow
    group = request(num_outputs_per_prompt=3)
    engine.add_request("group", group)
    for one, expected in zip(run(engine)["group"], alone(family, group), strict=True):
        assert_same_bits(one, expected)
        assert one.timings.denoise_s > 0
        assert one.timings.decode_s > 0


def test_an_aborted_or_retracted_request_leaves_nothing_under_way(
    slow: tuple[RolloutEngine, SlowCopies], family: ModelFamily
) -> None:
    engine, copies = slow
    engine.add_request("goes", request(num_inference_steps=1))
    until_departed(engine)
    assert engine.abort_request("goes")
    assert not engine.has_unfinished_requests()
    again = request(num_inference_steps=1)
    engine.add_request("again", again)
    until_departed(engine)
    assert engine.retract_requests() == 1
    copies.fast = True
    assert_same_bits(run(engine)["again"][0], alone(family, again)[0])
    assert engine.stats()["samples_finished"] == 1


def test_a_request_that_is_aborted_while_its_results_are_under_way_hands_out_all_it_has(
    slow: tuple[RolloutEngine, SlowCopies], family: ModelFamily
) -> None:
    engine, _ = slow
    params = request(rollout_return_partial=True)
    engine.add_request("one", params)
    until_departed(engine)
    partial = engine.partial_result("one")
    assert partial is not None
    assert partial[0].num_steps_done == FULL["num_inference_steps"]
    expected = alone(family, params)[0].rollout_log_probs
    assert expected is not None
    assert torch.equal(partial[0].rollout_log_probs, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("together", [None, (32, 32)])
def test_no_more_than_a_few_results_are_under_way(
    slow: tuple[RolloutEngine, SlowCopies],
    family: ModelFamily,
    monkeypatch: pytest.MonkeyPatch,
    together: tuple[int, int] | None,
) -> None:
    monkeypatch.setattr(family, "decodes_together", together)
    engine, copies = slow
    engine.add_request("group", request(num_inference_steps=1, num_outputs_per_prompt=40))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, len(engine._departures))
    assert 0 < most <= DEPARTURES_AHEAD
    assert copies.waits >= 4
