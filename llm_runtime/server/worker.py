"""The engine process, started by the service (`engine_control.child`) with an `LLMConfig` as JSON on its standard
input. Imports no FastAPI."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_control.child import connection_from_descriptor
from engine_control.errors import EngineDiedError, InvalidRequestError
from engine_control.start import keep_what_is_loaded, without_collections
from engine_control.step_loop import StepLoop
from engine_control.worker import EngineWorker
from llm_runtime.config import LLMConfig
from llm_runtime.output import GenerateOutput
from llm_runtime.params import GenerateRequest


def main() -> None:
    """Serves one engine until the service goes away."""
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(message)s")
    connection = connection_from_descriptor(int(sys.argv[1]))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=LLMConfig)
    worker: EngineWorker[GenerateRequest, GenerateOutput] = EngineWorker(
        connection, read_request=_request, write_result=lambda output: output
    )
    worker.run(lambda: _build(config))


def _request(plain: Any) -> GenerateRequest:
    try:
        return msgspec.convert(plain, GenerateRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the request can't be read: {error}") from error


def _build(config: LLMConfig) -> tuple[StepLoop[GenerateRequest, GenerateOutput], Mapping[str, object]]:
    with without_collections():  # seconds of imports, while the socket is already watched
        from llm_runtime.engine.engine import build_engine

    engine = build_engine(config, on_death=_end)
    loop = StepLoop(engine)
    control = engine.controlled_by(loop)
    loop.register("describe", lambda arguments: {**engine.describe(), "control": control.state.describe()})
    keep_what_is_loaded()
    return loop, engine.describe()


def _end(error: EngineDiedError) -> None:
    """Another rank is gone, and was named in the log. Ends this process too, wherever it stands: the service sees it,
    and starts both anew."""
    os._exit(1)
