"""Every control call in every state: the table of docs/control.md, and long random walks against a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from controlled import Controlled, Weights, make_controlled
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine_control.checksum import module_sha256
from engine_control.errors import EngineError, EnginePausedError

TABLE = Path(__file__).parent.parent / "docs" / "control.md"
STATES = ("ready", "paused", "open", "inconsistent", "weights asleep", "all asleep")


@pytest.fixture(scope="module", params=["diffusion", "llm"])
def engine(
    request: pytest.FixtureRequest, tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controlled]:
    made = make_controlled(request.param, tiny_sd3_folder, tmp_path_factory.mktemp("llm"))
    yield made
    made.close()


def version(base: Weights, number: int) -> Weights:
    return {name: tensor * (1 + number / 64) for name, tensor in base.items()}


def table() -> list[tuple[str, str, str]]:
    rows = []
    for line in TABLE.read_text().partition("## Every call in every state")[2].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == len(STATES) + 1 and cells[0] not in ("call", "---"):
            rows += [(cells[0], state, cell) for state, cell in zip(STATES, cells[1:], strict=True)]
    return rows


def enter(engine: Controlled, state: str) -> None:
    match state:
        case "paused":
            engine.methods.pause_generation("in_place")
        case "open":
            engine.methods.begin_weight_update()
        case "inconsistent":
            engine.methods.release_memory_occupation(backup=False)
            engine.methods.resume_memory_occupation()
            engine.methods.begin_weight_update()
            engine.methods.abort_weight_update()
            assert engine.methods.control_state()["state"] == "inconsistent"
        case "weights asleep":
            engine.methods.release_memory_occupation(["weights"])
        case "all asleep":
            engine.methods.release_memory_occupation()


def leave(engine: Controlled, base: Weights) -> None:
    state = engine.methods.control_state()
    if state["session"] is not None:
        engine.methods.abort_weight_update(session_id=state["session"]["session_id"])
    engine.methods.resume_memory_occupation()
    engine.methods.continue_generation()
    engine.methods.refit(base, weight_version="default")


def call(engine: Controlled, name: str, base: Weights) -> str:
    """What the call came to, in the table's words."""
    try:
        match name:
            case "generate":
                engine.generate()
            case "update_weights_from_tensor":
                engine.methods.update_weights_from_tensor(base.items())
            case "update_weights_from_disk":
                engine.methods.update_weights_from_disk(str(engine.folder), target_modules=[engine.module])
            case "update_weight_version":
                engine.methods.update_weight_version("renamed")
            case "abort_request":
                engine.methods.control_command("abort_requests", abort_all=True)
            case _:
                getattr(engine.methods, name)()
    except EnginePausedError:
        return "waits"  # a caller that steps the engine itself can't wait, and is told so
    except EngineError as error:
        return f"{error.status} {error.code}"
    return "200"


def test_the_table_names_every_call_and_state() -> None:
    assert len(table()) >= 14 * len(STATES)


@pytest.mark.parametrize(("name", "state", "answer"), table())
def test_every_call_in_every_state_answers_as_the_docs_say(
    engine: Controlled, name: str, state: str, answer: str
) -> None:
    base = engine.weights()
    enter(engine, state)
    try:
        assert call(engine, name, base) == answer
    finally:
        leave(engine, base)
    assert engine.methods.control_state()["state"] == "ready"


class ControlMachine(RuleBasedStateMachine):
    """Random calls against a model of a few lines: which weights there should be, and what state."""

    engine: Controlled
    base: Weights
    sums: dict[int, str]
    latents: dict[int, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.committed, self.name = 0, "default"
        self.sent: int | None = None
        self.session: dict[str, Any] | None = None
        self.paused = False
        self.released: set[str] = set()
        self.kept = True
        self.undefined = self.inconsistent = False

    def teardown(self) -> None:
        leave(self.engine, self.base)

    def run(self, expected: str | None, name: str, **arguments: Any) -> Any:
        """The answer of a command that must succeed (None), or be refused with this code."""
        try:
            answer = self.engine.methods.control_command(name, **arguments)
        except EngineError as error:
            found, answer = error.code, None
        else:
            found = None
        assert found == expected, (name, arguments, answer)
        return answer

    @property
    def asleep(self) -> bool:
        return "weights" in self.released

    @property
    def cannot_step(self) -> bool:
        return bool(self.released & self.engine.needed_tags)

    @rule(partial=st.booleans(), staged=st.booleans())
    def begin(self, *, partial: bool, staged: bool) -> None:
        expected = "weight_session" if self.session else "asleep" if self.asleep else None
        answer = self.run(expected, "begin_weight_update", partial=partial, staged=staged)
        if answer is not None:
            must = self.undefined or not partial
            assert answer["must_be_complete"] == must
            self.session = {"complete": must, "came": {}, "spoiled": False, "staged": staged}

    @rule(number=st.integers(1, 3), part=st.sampled_from(["all", "half", "nan", "unknown"]))
    def update(self, number: int, part: str) -> None:
        new = version(self.base, number)
        items = list(new.items())
        if part == "half":
            items = items[::2]
        elif part == "nan":
            items[3] = (items[3][0], items[3][1] * float("nan"))
        elif part == "unknown":
            items.append(("no.such.weight", items[0][1]))
        session = self.session
        expected: str | None = None
        if session is None:
            expected = "weight_session"
        elif session["spoiled"]:
            expected = "session_spoiled"
        elif session["came"]:
            expected = "duplicate_weight"
        else:
            expected = {"nan": "non_finite_weights", "unknown": "unknown_weight"}.get(part)
        info = {"items": [[None, name, tensor] for name, tensor in items]}
        answer = self.run(expected, "update_weights", transport="direct", info=info)
        if session is not None and answer is None:
            session["spoiled"] = True
        elif session is not None:
            session["came"] = dict.fromkeys((name for name, _ in items), number)

    @rule(name=st.sampled_from(["v1", "v2"]))
    def end(self, name: str) -> None:
        session = self.session
        expected = None
        if session is None:
            expected = "weight_session"
        elif session["spoiled"]:
            expected = "session_spoiled"
        elif session["came"] and session["complete"] and len(session["came"]) < len(self.base):
            expected = "missing_weights"
        self.run(expected, "end_weight_update", weight_version=name)
        if session is None:
            return
        self.session = None
        if expected is not None:
            self.inconsistent |= self.undefined
            return
        self.name = name
        if session["came"]:
            self.weights = {**self.weights, **{n: version(self.base, k)[n] for n, k in session["came"].items()}}
            self.undefined = self.inconsistent = False

    @rule()
    def abort(self) -> None:
        self.run(None if self.session else "weight_session", "abort_weight_update")
        if self.session:
            self.session = None
            self.inconsistent |= self.undefined

    @rule(mode=st.sampled_from(["abort", "retract", "in_place", "wait"]))
    def pause(self, mode: str) -> None:
        self.run(None, "pause_generation", mode=mode)
        self.paused = True

    @rule()
    def resume_generation(self) -> None:
        self.run(None, "continue_generation")
        self.paused = False

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"], ["cuda_graph", "weights"]]), backup=st.booleans())
    def release(self, tags: list[str] | None, *, backup: bool) -> None:
        self.run("updating" if self.session else None, "release_memory_occupation", tags=tags, backup=backup)
        if not self.session:
            new = set(tags or ("weights", "kv_cache", "cuda_graph")) - self.released
            if "weights" in new:
                self.kept = backup
            self.released |= new

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache", "cuda_graph"]]))
    def resume(self, tags: list[str] | None) -> None:
        self.run(None, "resume_memory_occupation", tags=tags)
        back = set(tags or ("weights", "kv_cache", "cuda_graph")) & self.released
        self.released -= back
        if "weights" in back and not self.kept:
            self.undefined = True

    @rule(tag=st.sampled_from(["weight", "", "all"]))
    def unknown_tag(self, tag: str) -> None:
        self.run("unknown_tag", "release_memory_occupation", tags=[tag])

    @rule()
    def flush(self) -> None:
        self.run(None, "flush_cache")

    @rule(name=st.sampled_from(["a", "b"]))
    def rename(self, name: str) -> None:
        self.run(None, "update_weight_version", new_version=name)
        self.name = name

    @precondition(lambda self: not self.session and not self.undefined)
    @rule()
    def checksum(self) -> None:
        answer = self.run("asleep" if self.asleep else None, "get_weights_checksum", module_names=[self.engine.module])
        if answer is not None:
            assert answer[self.engine.module] == module_sha256(self.weights)

    @rule()
    def generate(self) -> None:
        expected = (
            "inconsistent_weights"
            if self.inconsistent
            else "engine_asleep"
            if self.cannot_step or self.undefined
            else "engine_paused"
            if self.paused or (self.session and not self.session["staged"])
            else None
        )
        code = None
        try:
            versions = self.engine.generate()
        except EngineError as error:
            code = error.code
        assert code == expected
        assert code is not None or versions == (self.name,)

    @invariant()
    def state_is_the_models(self) -> None:
        state = self.engine.methods.control_state()
        expected = (
            "inconsistent"
            if self.inconsistent
            else "asleep"
            if self.cannot_step or self.undefined
            else "updating"
            if self.session
            else "paused"
            if self.paused
            else "ready"
        )
        assert state["state"] == expected
        assert state["weight_version"] == self.name
        assert set(state["released"]) == self.released

    @property
    def weights(self) -> Weights:
        return self.__dict__.setdefault("_weights", dict(self.base))

    @weights.setter
    def weights(self, value: Weights) -> None:
        self.__dict__["_weights"] = value


def test_no_sequence_of_calls_leads_away_from_a_small_model(engine: Controlled) -> None:
    ControlMachine.engine = engine
    ControlMachine.base = engine.weights()
    run_state_machine_as_test(
        ControlMachine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
