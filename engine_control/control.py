"""The control layer of one engine: every command by its name, run by the loop between two steps.

loop = StepLoop(engine)
control = Control(engine, target, loop, ControlConfig())
loop.call("begin_weight_update", {"target_modules": ["transformer"]}).result()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from engine_control.adapters import AdapterConductor
from engine_control.config import ControlConfig
from engine_control.engine import ControlledEngine
from engine_control.errors import InvalidRequestError
from engine_control.pause import Pause
from engine_control.refit.conductor import RefitConductor
from engine_control.refit.inspection import WeightInspection
from engine_control.refit.target import RefitTarget
from engine_control.sleep import Sleep
from engine_control.state import ControlState
from engine_control.step_loop import StepLoop


class Control:
    """Owns the state of one engine and the commands that change it."""

    def __init__(
        self,
        engine: ControlledEngine[Any, Any],
        target: RefitTarget,
        loop: StepLoop[Any, Any],
        config: ControlConfig | None = None,
        *,
        needed_tags: frozenset[str] = frozenset({"weights"}),
        world_size: int = 1,
    ) -> None:
        """`needed_tags` are those without which no step can run. Afterwards the loop knows the commands."""
        config = config or ControlConfig()
        self.state = ControlState(engine, refuse_during_update=config.refuse_during_update, needed_tags=needed_tags)
        self.pause = Pause(engine, self.state, loop)
        self.sleep = Sleep(engine, self.state, enabled=config.enable_memory_saver, backup=config.weights_backup)
        self.refit = RefitConductor(
            engine,
            target,
            self.state,
            loop,
            implicit_sessions=config.implicit_weight_sessions,
            session_timeout_s=config.weight_session_timeout_s,
        )
        self.adapters = AdapterConductor(engine, self.state, loop)
        loop.gate = self.state
        self.commands: Mapping[str, Callable[..., object]] = {
            **_public(self.refit),
            **_public(WeightInspection(engine, target, self.state)),
            **_public(self.adapters),
            **_public(self.pause),
            **_public(self.sleep),
            "control_state": self.state.describe,
            "world_size": lambda: world_size,
        }
        for name, command in self.commands.items():
            loop.register(name, _checked(name, command))


def _public(owner: object) -> dict[str, Callable[..., object]]:
    return {name: value for name, value in inspect.getmembers(owner, inspect.ismethod) if not name.startswith("_")}


def _checked(name: str, command: Callable[..., object]) -> Callable[[Mapping[str, Any]], object]:
    """The command as the loop's handler: arguments that it doesn't take, or lacks, are refused by name."""
    parameters = inspect.signature(command).parameters

    def run(arguments: Mapping[str, Any]) -> object:
        for given in arguments:
            if given not in parameters:
                raise InvalidRequestError(
                    f"{name} has no argument {given!r}",
                    code="unknown_field",
                    field=given,
                    hint=f"Known: {', '.join(parameters)}.",
                )
        for needed, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and needed not in arguments:
                raise InvalidRequestError(f"{name} needs {needed!r}", code="missing_field", field=needed)
        return command(**arguments)

    return run
