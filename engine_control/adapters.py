"""Named LoRA adapters beside the weights: loaded on every rank or on none, and chosen by each request.

An adapter stays two factors a layer, applied after the layer (`y + B (A x) * scale`), so that the numbers are those of
a trainer's unmerged adapter, and requests of several adapters and of none are served by one set of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from engine_control.engine import ControlledEngine
from engine_control.errors import (
    EngineFaultError,
    InvalidRequestError,
)
from engine_control.rank import Outcome, RankCommand, first_error, values_of
from engine_control.refit.adapter import AdapterConfig, read_folder, unknown_adapter
from engine_control.refit.backends.direct import direct_info
from engine_control.state import ControlState
from engine_control.step_loop import StepLoop

MAX_NAME = 128  # characters


class AdapterConductor:
    """The adapter commands, from rank 0's side."""

    def __init__(self, engine: ControlledEngine[Any, Any], state: ControlState, loop: StepLoop[Any, Any]) -> None:
        self._engine = engine
        self._state = state
        self._loop = loop
        self._loads: Counter[str] = Counter()

    def load_lora_adapter(
        self,
        lora_name: str,
        lora_path: str,
        *,
        lora_version: str | None = None,
        in_place: bool = False,
        abort_all_requests: bool = False,
    ) -> object:
        """Loads a folder that peft has saved. An adapter that has the name already is replaced, in one step and on all
        ranks, once what is in flight has finished (`in_place`: between two steps of it; `abort_all_requests` ends it).

        `lora_version` is what samples say of it; left out, how many times the name has been loaded.

        Raises:
            RefitRefusedError: naming the file, the field or the tensor. Nothing has changed.
            ConflictError: the weights' memory is released.
        """
        config, file = read_folder(lora_path)
        return self._load(
            {"name": lora_name, "config": config, "transport": "disk", "info": {"model_path": str(file)}},
            lora_path,
            lora_version,
            in_place=in_place,
            abort_all_requests=abort_all_requests,
        )

    def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        config_dict: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        transport: str = "direct",
        info: Mapping[str, Any] | None = None,
        lora_version: str | None = None,
        in_place: bool = False,
        abort_all_requests: bool = False,
    ) -> object:
        """As `load_lora_adapter`, from tensors of this process, or from those that a transport brings with `info`."""
        fields = direct_info((tensors or {}).items()) if info is None else dict(info)
        return self._load(
            {"name": lora_name, "config": dict(config_dict), "transport": transport, "info": fields},
            None,
            lora_version,
            in_place=in_place,
            abort_all_requests=abort_all_requests,
        )

    def unload_lora_adapter(self, lora_name: str, *, abort_all_requests: bool = False) -> object:
        """Forgets an adapter, once what is in flight has finished. Requests for it that wait until then fail by name.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        if lora_name not in self._loaded():
            raise unknown_adapter(lora_name, self._loaded())
        if abort_all_requests:
            self._loop.abort_requests(self._engine.request_ids())

        def unload() -> dict[str, Any]:
            values_of(self._ask("unload_adapter", name=lora_name))
            return self._answer()

        return self._state.when_drained(unload)

    def list_lora_adapters(self) -> dict[str, Any]:
        """Every adapter by its name: version, source, layers, rank, bytes."""
        return self._loaded()

    def _load(
        self,
        call: dict[str, Any],
        source: str | None,
        version: str | None,
        *,
        in_place: bool,
        abort_all_requests: bool,
    ) -> object:
        name = call["name"]
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidRequestError(
                f"not a name of 1 to {MAX_NAME} printable characters", field="lora_name", value=name
            )
        AdapterConfig.read(call["config"])
        if abort_all_requests:
            self._loop.abort_requests(self._engine.request_ids())

        def load() -> dict[str, Any]:
            self._state.refuse_asleep()
            self._prepare(call)
            self._commit(name, version or str(self._loads[name] + 1), source)
            self._loads[name] += 1
            return self._answer() | {"lora_name": name, "lora_version": self._loaded()[name]["version"]}

        at_once = in_place or self._state.frozen or name not in self._loaded()
        return load() if at_once else self._state.when_drained(load)

    def _prepare(self, call: Mapping[str, Any]) -> None:
        outcomes = self._ask("prepare_adapter", **call)
        error = first_error(outcomes)
        if error is None and any(outcome.value != outcomes[0].value for outcome in outcomes):
            error = EngineFaultError(
                "the ranks received different adapters, or compute them in different ways; nothing was changed",
                code="ranks_disagree",
                hint="Send it again.",
            )
        if error is not None:
            self._ask("discard_adapter")
            raise error

    def _commit(self, name: str, version: str, source: str | None) -> None:
        error = first_error(self._ask("commit_adapter", version=version, source=source))
        if error is not None:  # on some rank it may be the new one, on another the old one
            self._ask("unload_adapter", name=name)
            raise error

    def _answer(self) -> dict[str, Any]:
        loaded = {name: about["source"] or name for name, about in self._loaded().items()}
        return {"success": True, "message": "Success", "loaded_adapters": loaded}

    def _loaded(self) -> dict[str, Any]:
        adapters: dict[str, Any] = values_of(self._ask("adapters"))[0]
        return adapters

    def _ask(self, name: str, /, **arguments: Any) -> list[Outcome]:
        return self._engine.everywhere(RankCommand(name, arguments))
