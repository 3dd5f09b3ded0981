"""Rolls requests out by an engine in this process or by a service: all at once or one by one, in any order.

None of this may matter to a sample's bits; that is what a comparison tests.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

import httpx

from diffusion_rl.client import DecodeError, RolloutClient
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import RolloutSample
from diffusion_rl.verify.requests import fields_of
from engine_control.errors import EngineError, EngineUnavailableError, InvalidRequestError

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline

Source: TypeAlias = "RolloutPipeline | RolloutClient"
Order = Literal["as-recorded", "reverse", "shuffle"]
ORDERS: tuple[Order, ...] = get_args(Order)
MAX_CONNECTIONS = 64
SHUFFLE_SEED = 0
Result = TypeVar("Result")


def roll_out(
    source: Source, requests: Sequence[RolloutParams], *, order: Order = "as-recorded", one_by_one: bool = False
) -> list[list[RolloutSample]]:
    """The samples of each request, in the requests' order, whatever the order in which they were submitted.

    Together, all are in the engine at once and share batches; one by one, each waits for the one before. `shuffle` is
    the same permutation every time.

    Raises:
        InvalidRequestError: a request, or the order. An engine in this process has computed nothing then.
        EngineUnavailableError: the service was not reached.
    """
    positions = _positions(len(requests), order)
    chosen = [requests[position] for position in positions]
    if isinstance(source, RolloutClient):
        rolled = _by_service(source, chosen, connections=1 if one_by_one else MAX_CONNECTIONS)
    else:
        for request in chosen:
            source.engine.check_request(request)
        parts = [[request] for request in chosen] if one_by_one else [chosen]
        rolled = [samples for part in parts for samples in _in_process(source, part)]
    found = dict(zip(positions, rolled, strict=True))
    return [found[position] for position in range(len(requests))]


def reached(ask: Callable[[], Result]) -> Result:
    """What a service answers.

    Raises:
        EngineUnavailableError: there is none, or the connection broke.
        EngineError: it answered with an error, or with something else than a reply.
    """
    try:
        return ask()
    except httpx.TransportError as error:
        raise EngineUnavailableError(
            f"no service was reached: {error}",
            hint="Start one with `diffusion-rl serve`, or leave the URL out to load the model here.",
        ) from error
    except DecodeError as error:
        raise EngineError(f"the service's reply can't be read: {error}", hint="Ask for another wire.") from error


def _positions(count: int, order: Order) -> list[int]:
    if order not in ORDERS:
        raise InvalidRequestError(
            f"unknown order {order!r}", field="batch_order", value=order, hint=f"Known: {', '.join(ORDERS)}."
        )
    positions = list(range(count))
    if order == "reverse":
        positions.reverse()
    elif order == "shuffle":
        random.Random(SHUFFLE_SEED).shuffle(positions)
    return positions


def _in_process(pipeline: RolloutPipeline, requests: Sequence[RolloutParams]) -> list[list[RolloutSample]]:
    """Runs the requests together, in this thread. Afterwards the engine is empty."""
    from engine_control.step_loop import StepLoop

    loop: StepLoop[RolloutParams, list[RolloutSample]] = StepLoop(pipeline.engine)
    ids = [uuid.uuid4().hex for _ in requests]
    futures = {request_id: loop.submit(request_id, request) for request_id, request in zip(ids, requests, strict=True)}
    try:
        loop.run_until_idle()
        return [future.result() for future in futures.values()]
    finally:
        for request_id, future in futures.items():
            if not future.done():
                loop.abort(request_id)
        loop.run_until_idle()


def _by_service(
    client: RolloutClient, requests: Sequence[RolloutParams], *, connections: int
) -> list[list[RolloutSample]]:
    def generate(fields: Mapping[str, object]) -> list[RolloutSample]:
        rest = {name: value for name, value in fields.items() if name != "prompt"}
        return reached(lambda: client.generate(str(fields["prompt"]), **rest))

    with ThreadPoolExecutor(min(connections, max(len(requests), 1))) as pool:
        return list(pool.map(generate, [fields_of(request) for request in requests]))
