"""What the control layer does on every rank of an engine: weights and memory, in the same order everywhere.

Rank 0 decides (`control`), and has each rank carry the same command out, its own included. A command that fails on a
rank leaves that rank as it was, and answers with the error; rank 0 then has the others undo theirs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from engine_control.checksum import combined_digest, module_sha256, tensor_sha256
from engine_control.config import RankSettings
from engine_control.errors import (
    EngineDiedError,
    EngineError,
    EngineFaultError,
    ErrorMessage,
    InvalidRequestError,
    RefitRefusedError,
    from_message,
)
from engine_control.memory.saver import MemorySaver
from engine_control.refit.adapter import AdapterConfig, AdapterStore
from engine_control.refit.backends.base import TransportContext, WeightItem, WeightTransport, transports
from engine_control.refit.lora import LoraMerges, read_mode
from engine_control.refit.manifest import check_against, read_manifest
from engine_control.refit.session import RefitSession
from engine_control.refit.target import RefitTarget, ShardedTarget
from engine_control.weight_kernels import WeightKernels

logger = logging.getLogger(__name__)


class RankCommand(msgspec.Struct, tag="control", frozen=True):
    """One command to every rank. `arguments` are plain data and tensors, what a wire message can carry."""

    name: str
    arguments: dict[str, Any]


class Outcome(msgspec.Struct, frozen=True):
    """What a rank answers: a value, or the error that left it as it was."""

    value: Any = None
    error: ErrorMessage | None = None


def first_error(outcomes: Iterable[Outcome]) -> EngineError | None:
    """The error of the first rank that has one."""
    return next((from_message(outcome.error) for outcome in outcomes if outcome.error is not None), None)


def values_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """What each rank answered; raises the first error."""
    error = first_error(outcomes)
    if error is not None:
        raise error
    return [outcome.value for outcome in outcomes]


class RankEngine(Protocol):
    """What an engine owes this layer on every rank."""

    memory: MemorySaver
    device: torch.device
    weight_kernels: WeightKernels | None
    """What makes refits quicker on this device; None: torch alone."""

    @property
    def target(self) -> RefitTarget:
        """The weights."""

    def flush_caches(self, modules: Sequence[str] | None) -> None:
        """Drops what was computed from those modules' weights and kept for later requests; None: all of them."""

    def drop_graphs(self) -> None:
        """Afterwards CUDA graphs are captured anew before they are used."""

    def synchronize(self) -> None:
        """Returns when the device has finished all that was launched."""


class RankControl:
    """Carries out commands on one rank, between two steps."""

    def __init__(
        self, engine: RankEngine, settings: RankSettings | None = None, *, adapters: AdapterStore | None = None
    ) -> None:
        """`adapters` None: this engine serves none."""
        self._engine = engine
        self._settings = settings or RankSettings()
        self._transports: dict[str, WeightTransport] = {}
        self._session: RefitSession | None = None
        self._adapters = adapters
        self._merges = LoraMerges(engine.target, engine.device)  # one device's arithmetic, wherever weights lie
        self._commands: Mapping[str, Callable[..., Any]] = {
            "begin": self._begin,
            "update": self._update,
            "unmerge": self._unmerge,
            "merged_weights": self._merges.merged_weights,
            "undo_last_call": self._undo_last_call,
            "verify": self._verify,
            "commit": self._commit,
            "undo": self._undo,
            "init_transport": lambda transport, info: self._transport(transport).init(info),
            "shutdown_transport": lambda transport, info: self._transport(transport).shutdown(info),
            "checksum": self._checksum,
            "check_tensors": self._check_tensors,
            "tensor_checksums": self._tensor_checksums,
            "weights_by_name": self._weights_by_name,
            "reset_tensors": self._reset_tensors,
            "flush_caches": self._engine.flush_caches,
            "prepare_adapter": self._prepare_adapter,
            "commit_adapter": lambda version, source: self._store().commit(version, source),
            "discard_adapter": lambda: self._store().discard(),
            "unload_adapter": lambda name: self._store().unload(name),
            "adapters": lambda: {} if adapters is None else adapters.describe(),
            "release": self._release,
            "resume": self._resume,
        }

    def carry_out(self, command: RankCommand) -> Outcome:
        """Does it, or answers with the error that left this rank as it was.

        Raises:
            torch.AcceleratorError: the device is broken; no later command would succeed either.
        """
        try:
            return Outcome(self._commands[command.name](**command.arguments))
        except (torch.AcceleratorError, EngineDiedError):
            raise
        except EngineError as error:
            return Outcome(error=error.to_message())
        except Exception as error:
            logger.exception("command %s failed", command.name)
            fault = EngineFaultError(f"{type(error).__name__}: {error}", hint="The engine's log has the traceback.")
            return Outcome(error=fault.to_message())

    def close(self) -> None:
        """Closes every transport."""
        for transport in self._transports.values():
            transport.close()

    def _begin(self, modules: list[str], partial: bool, staged: bool, undo: bool) -> str:
        engine = self._engine
        self._session = RefitSession(
            engine.target, modules, partial=partial, staged=staged, undo=undo, kernels=engine.weight_kernels
        )
        self._merges.forget()
        return self._session.undo_place

    def _update(self, transport: str, info: dict[str, Any]) -> dict[str, Any]:
        session, merges = self._open(), self._merges
        merges.begin_call()
        how, info = read_mode(info)
        if how is not None:
            self._refuse_undefined_base(session)
        with self._received(transport, info) as items:
            if how is not None:
                return self._apply(merges.merging(items, how, session.modules))
            return self._apply(merges.whole(items, session.modules))

    def _unmerge(self, modules: list[str]) -> dict[str, Any]:
        self._merges.begin_call()
        self._refuse_undefined_base(self._open())
        try:
            return self._apply(self._merges.restoring(modules))
        finally:
            self._engine.synchronize()

    def _apply(self, items: Iterator[WeightItem]) -> dict[str, Any]:
        try:
            received = self._open().update(items)
        except BaseException:
            self._merges.undo_last_call()
            raise
        return {"tensors": received.tensors, "bytes": received.nbytes, "undo": self._open().undo_place}

    def _refuse_undefined_base(self, session: RefitSession) -> None:
        if not session.can_undo:
            raise RefitRefusedError(
                "the weights are undefined, so there is no base to merge onto",
                code="no_base",
                field="weight_update_mode",
                hint="Send all weights first.",
            )

    def _undo_last_call(self) -> None:
        self._open().undo_last_call()
        self._merges.undo_last_call()

    def _verify(self, manifest: dict[str, Any] | None) -> dict[str, Any]:
        """A manifest speaks of the tensors that were sent; the digests are of the weights as they lie now."""
        session, wanted = self._open(), read_manifest(manifest)
        session.partial |= self._merges.alone
        digests = session.verify()
        sharded = isinstance(self._engine.target, ShardedTarget)
        if wanted is not None or sharded:
            came = self._merges.came({(m, name): digests[f"{m}.{name}"] for m, name in session.sent})
            if wanted is not None:
                check_against(wanted, session.modules, came)
            if sharded:  # what was merged is made on each rank, of its own part
                digests = {f"{m}.{name}": digest for (m, name), digest in came.items()}
        return {"digest": combined_digest(digests), "touched": session.touched, "tensors": len(session.sent)}

    def _commit(self, flush: bool, empty_cache: bool = False, recapture: bool = False) -> None:
        session, touched = self._open(), self._open().touched
        session.commit()
        self._merges.commit()
        self._session = None
        self._engine.synchronize()
        self._engine.flush_caches(None if flush else touched)
        if recapture:
            self._engine.drop_graphs()
        if empty_cache and self._engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def _undo(self) -> None:
        session, self._session = self._open(), None
        self._merges.forget()
        session.undo()
        self._engine.synchronize()

    def _prepare_adapter(
        self, name: str, config: dict[str, Any], transport: str, info: dict[str, Any]
    ) -> dict[str, Any]:
        store, read = self._store(), AdapterConfig.read(config)
        with self._received(transport, info) as items:
            return store.prepare(name, read, ((item.name, item.tensor) for item in items))

    def _store(self) -> AdapterStore:
        if self._adapters is None:
            raise InvalidRequestError(
                "this engine serves no adapters", code="no_adapters", field="lora_name", hint="Merge it, by a refit."
            )
        return self._adapters

    def _open(self) -> RefitSession:
        if self._session is None:
            raise EngineFaultError("this rank has no open session", hint="Rank 0 asked for what it has not begun.")
        return self._session

    @contextlib.contextmanager
    def _received(self, transport: str, info: dict[str, Any]) -> Iterator[Iterator[WeightItem]]:
        """A call's tensors; afterwards the transport holds nothing of the sender's, and the device has read it all."""
        items = self._transport(transport).receive(info)
        try:
            yield items
        finally:
            if hasattr(items, "close"):
                items.close()
            self._engine.synchronize()

    def _transport(self, name: str) -> WeightTransport:
        if name not in self._transports:
            context = TransportContext(
                rank=self._settings.rank,
                world_size=self._settings.world_size,
                device=self._engine.device,
                weights=self._engine.target.modules(),
                load_formats=self._settings.load_formats,
                timeout_s=self._settings.timeout_s,
            )
            self._transports[name] = transports.get(name)(context)
        return self._transports[name]

    @torch.no_grad()
    def _checksum(self, modules: list[str] | None) -> dict[str, str]:
        weights = self._engine.target.modules()
        target = self._engine.target
        return {
            m: module_sha256(target.checkpoint_tensors(m)) if m in weights else "not_found" for m in modules or weights
        }

    @torch.no_grad()
    def _tensor_checksums(self) -> dict[str, str]:
        target = self._engine.target
        return {
            f"{m}.{name}": tensor_sha256(t)
            for m in target.modules()
            for name, t in target.checkpoint_tensors(m).items()
        }

    @torch.no_grad()
    def _check_tensors(self, module: str, expected: dict[str, str]) -> None:
        live = self._known(module)
        for name, wanted in expected.items():
            if name not in live:
                raise InvalidRequestError(f"{module!r} has no weight {name!r}", field=name, value=name)
            found = tensor_sha256(live[name])
            if found != wanted.lower():
                raise InvalidRequestError(
                    f"weight {name!r} of {module!r} has SHA-256 {found}, not {wanted}",
                    code="checksum_mismatch",
                    field=name,
                    value=wanted,
                    hint="The hash is over str(dtype), repr(tuple(shape)) and the bytes.",
                )

    def _weights_by_name(self, name: str, truncate_size: int, module: str | None) -> Any:
        modules = self._engine.target.modules()
        first, _, rest = name.partition(".")
        candidates = [(module, name)] if module else [(m, name) for m in modules] + [(first, rest)]
        for owner, key in candidates:
            if key in modules.get(owner, {}):
                tensor = self._engine.target.checkpoint_tensors(owner)[key]
                return tensor[:truncate_size].float().cpu().tolist() if tensor.dim() else tensor.float().item()
        raise InvalidRequestError(
            "Get parameter by name failed", field="name", value=name, hint="Names are those of the checkpoint."
        )

    @torch.no_grad()
    def _reset_tensors(self, modules: list[str]) -> None:
        target = self._engine.target
        target.begin(modules)
        for module in modules:
            for name, info in target.modules()[module].items():
                nothing = torch.empty(info.shape, dtype=info.dtype, device="meta")
                for live, _ in target.destinations(module, name, nothing):
                    if live.is_floating_point():
                        live.zero_()
        target.finish(modules)
        self._engine.flush_caches(None)

    def _known(self, module: str) -> Mapping[str, torch.Tensor]:
        modules = self._engine.target.modules()
        if module not in modules:
            raise InvalidRequestError(
                f"there is no module {module!r}",
                code="unknown_module",
                field="target_module",
                value=module,
                hint=f"Known: {', '.join(sorted(modules))}.",
            )
        return self._engine.target.checkpoint_tensors(module)

    def _release(self, tags: list[str], backup: bool) -> dict[str, Any]:
        self._engine.synchronize()
        released = self._engine.memory.release(tags, backup=backup)
        return {"bytes_freed": released.bytes_freed, "tags": list(released.tags)}

    def _resume(self, tags: list[str]) -> dict[str, Any]:
        resumed = self._engine.memory.resume(tags)
        return {"tags": list(resumed.tags), "undefined": list(resumed.undefined)}
