"""What the weights are, from rank 0's side: checksums and values, for trainers that check what they have sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_control.engine import ControlledEngine
from engine_control.errors import ConflictError, EngineFaultError, InvalidRequestError
from engine_control.rank import RankCommand, values_of
from engine_control.refit.target import RefitTarget
from engine_control.state import SUCCESS, ControlState


class WeightInspection:
    """The commands that look at weights. None changes them but `weights_checker(action="reset_tensors")`."""

    def __init__(self, engine: ControlledEngine[Any, Any], target: RefitTarget, state: ControlState) -> None:
        self._engine = engine
        self._target = target
        self._state = state
        self._snapshot: dict[str, str] | None = None

    def get_weights_checksum(self, module_names: Sequence[str] | None = None) -> dict[str, str]:
        """SHA-256 of each module, equal on all ranks.

        Raises:
            EngineFaultError: the ranks hold different weights.
        """
        self._state.refuse_asleep()
        found = self._values("checksum", modules=None if module_names is None else list(module_names))
        for rank, other in enumerate(found[1:], start=1):
            if other != found[0]:
                raise EngineFaultError(f"rank {rank} holds other weights than rank 0", code="ranks_disagree")
        sums: dict[str, str] = found[0]
        return sums

    def check_tensors(self, target_module: str, expected_named_tensors_sha256: Mapping[str, str]) -> dict[str, Any]:
        """Compares SHA-256 hashes of single tensors on every rank."""
        self._state.refuse_asleep()
        self._values("check_tensors", module=target_module, expected=dict(expected_named_tensors_sha256))
        return {"success": True, "message": f"{len(expected_named_tensors_sha256)} tensors are equal"}

    def get_weights_by_name(self, name: str, *, truncate_size: int = 100, module: str | None = None) -> object:
        """The first `truncate_size` rows of a weight, as lists of numbers."""
        self._state.refuse_asleep()
        return self._values("weights_by_name", name=name, truncate_size=truncate_size, module=module)[0]

    def weights_checker(self, action: str = "checksum", *, baseline: Mapping[str, str] | None = None) -> dict[str, Any]:
        """`checksum` of every tensor; `snapshot` keeps them; `compare` says which differ from the snapshot (or from
        `baseline`); `reset_tensors` sets the weights to zero, so that only a complete update can bring them back."""
        self._state.refuse_asleep()
        if action == "reset_tensors":
            if self._state.session is not None:
                raise ConflictError("a weight-update session is open", hint="End or abort it first.")
            modules = list(self._target.default_modules("all"))
            self._values("reset_tensors", modules=modules)
            self._state.broken |= frozenset(modules)
            self._state.apply()
            return dict(SUCCESS)
        if action not in ("checksum", "snapshot", "compare"):
            raise InvalidRequestError(
                f"unknown action {action!r}",
                field="action",
                value=action,
                hint="Known: checksum, snapshot, reset_tensors, compare.",
            )
        sums: dict[str, str] = self._values("tensor_checksums")[0]
        if action == "snapshot":
            self._snapshot = sums
            return dict(SUCCESS)
        if action == "checksum":
            return {**SUCCESS, "checksums": sums}
        wanted = self._snapshot if baseline is None else dict(baseline)
        if wanted is None:
            raise InvalidRequestError("there is nothing to compare with", hint="Take a snapshot, or send a baseline.")
        differing = sorted(n for n in sums.keys() | wanted.keys() if sums.get(n) != wanted.get(n))
        if differing:
            raise InvalidRequestError(
                f"{len(differing)} tensors differ, such as {differing[0]}",
                code="weights_differ",
                field=differing[0],
                value=", ".join(differing),
            )
        return {**SUCCESS, "checksums": sums, "mismatches": []}

    def _values(self, name: str, /, **arguments: Any) -> list[Any]:
        return values_of(self._engine.everywhere(RankCommand(name, arguments)))
