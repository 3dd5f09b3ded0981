"""What a transport owes a refit: it yields named tensors, and knows nothing of who applies them.

On each rank the updater makes one instance of a transport, on first use, and keeps it. The engine's thread calls, on
every rank and between two steps: `init` when a trainer opens a channel, `receive` once for each update call, `shutdown`
when the channel is closed. Whatever a transport raises ends that one call, undone; nothing else is touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from engine_control.errors import InvalidRequestError
from engine_control.refit.target import TensorInfo
from engine_control.registry import Registry


class WeightItem(NamedTuple):
    """A tensor on its way into the engine. `module` None: the one module that the call, or the session, is about.

    The tensor may be the transport's own buffer: it is read before the next item is asked for, and not kept. With
    `more` it stays valid until the next item without has been read, or the call has ended, so that they can be applied
    together.
    """

    module: str | None
    name: str
    tensor: torch.Tensor
    more: bool = False


@dataclass(frozen=True)
class TransportContext:
    """Where a transport instance lives.

    rank, world_size: of this engine's ranks. device: where this rank's weights lie (or lay before they were released).
    weights: shapes and dtypes of every module of this rank, in checkpoint form.
    load_formats: import paths (`package.module:function`) that the configuration allows as custom loaders.
    timeout_s: how long a peer may keep a transport waiting.
    """

    rank: int
    world_size: int
    device: torch.device
    weights: Mapping[str, Mapping[str, TensorInfo]]
    load_formats: Sequence[str] = field(default=())
    timeout_s: float = 300.0


class WeightTransport(ABC):
    """One way for weights to come in."""

    def __init__(self, context: TransportContext) -> None:
        self.context = context

    def init(self, info: Mapping[str, Any]) -> None:
        """Opens a channel; called on all ranks at the same time, so it may meet the trainer and the other ranks.

        Raises:
            EngineError: naming what is wrong. Afterwards nothing is open that wasn't before.
        """
        raise InvalidRequestError(
            f"transport {type(self).__module__.rsplit('.', 1)[-1]!r} needs no initialisation",
            hint="Send the weights at once.",
        )

    @abstractmethod
    def receive(self, info: Mapping[str, Any]) -> Iterator[WeightItem]:
        """The tensors of one update call, in the order in which they come. `info` holds the call's own fields.

        When the iterator is exhausted or closed, no buffer of the sender is held any more and the device has finished
        reading from it, so the sender may reuse it.

        Raises:
            EngineError: the fields or the payload are no good; the message names the field or the tensor.
        """

    def shutdown(self, info: Mapping[str, Any]) -> None:
        """Closes a channel, or all of them if `info` names none. Closing what isn't open is refused."""
        raise InvalidRequestError("there is nothing to shut down", hint="This transport keeps nothing open.")

    def close(self) -> None:  # noqa: B027 (most keep nothing open)
        """At the engine's end: closes whatever is open, and raises nothing."""


transports: Registry[WeightTransport] = Registry(
    "engine_control.refit.backends",
    WeightTransport,  # type: ignore[type-abstract]
    noun="weight transport",
)
"""`disk`, `tensor`, `distributed`, `ipc`; `register` adds one from outside the package."""
