"""The service: `create_app` for any ASGI server, `serve` for a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine_control.server.bodies import WEIGHT_PATHS
from engine_control.server.failures import install_error_handlers, json_response, vllm_failure
from engine_control.server.health import health_router
from engine_control.server.middleware import BodyLimit, CountRequests, EndAtShutdown, LimitInFlight
from engine_control.server.serving import Address, StartFailure, engine_running, serve_app
from engine_control.server.sglang import sglang_router
from engine_control.server.vllm import vllm_router
from llm_runtime.config import LLMConfig, ServerConfig
from llm_runtime.server.generate_routes import generate_router
from llm_runtime.server.info_routes import info_router
from llm_runtime.server.openai_routes import openai_router
from llm_runtime.server.service import LLMService
from llm_runtime.server.token_routes import token_router

DESCRIPTION = """A small, exact language-model runtime for RL: SGLang's, OpenAI's and vLLM's routes, and the control of
weights, pauses and memory. Errors are `{"error": {"message", "type", "param", "code", "hint"}}`, those of control
routes SGLang's or vLLM's."""
GENERATION_PATHS = ("/generate", "/completions")


def create_app(
    llm_config: LLMConfig, server_config: ServerConfig, *, on_start_failure: StartFailure | None = None
) -> FastAPI:
    """The service as an ASGI app, whose lifespan is the engine process's. Several apps may live in one process.

    The app answers from its first moment; `/health` says when the engine takes requests. If it never does,
    `on_start_failure` gets the error, once. What concerns connections instead of requests is `serve`'s.
    """
    service = LLMService(llm_config, server_config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.load_tokenizer()
        async with engine_running(service, _address(server_config), on_start_failure):
            yield

    app = FastAPI(title="llm-runtime", description=DESCRIPTION, lifespan=lifespan)
    app.state.service = service
    app.state.requests = EndAtShutdown.Requests()
    install_error_handlers(app, vllm_failure, _http_failure)
    for router in (
        generate_router(service),
        openai_router(service),
        token_router(service),
        health_router(service),
        info_router(service),
        sglang_router(service, engine="llm"),
        vllm_router(service),
    ):
        app.include_router(router)
    _add_limits(app, service, server_config)
    return app


def serve(llm_config: LLMConfig, server_config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT. Afterwards the engine process is gone too.

    Raises:
        InvalidRequestError: the address can't be listened on, and no engine was started.
        EngineUnavailableError: the engine failed to start; its last lines stand in the message.
    """
    serve_app(
        lambda give_up: create_app(llm_config, server_config, on_start_failure=give_up),
        _address(server_config),
        log="llm_runtime",
    )


def _add_limits(app: FastAPI, service: LLMService, config: ServerConfig) -> None:
    app.add_middleware(
        BodyLimit,
        failure=vllm_failure,
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
        but=WEIGHT_PATHS,
    )
    app.add_middleware(
        BodyLimit,
        failure=vllm_failure,
        max_bytes=config.max_weights_body_bytes,
        timeout_s=config.weights_body_timeout_s,
        only=WEIGHT_PATHS,
        raised_by=("max_weights_body_bytes", "weights_body_timeout_s"),
    )
    app.add_middleware(
        LimitInFlight,
        failure=vllm_failure,
        paths=GENERATION_PATHS,
        gauge=service.in_flight,
        limit=config.max_requests_in_flight,
    )
    app.add_middleware(EndAtShutdown, failure=vllm_failure, requests=app.state.requests)
    app.add_middleware(CountRequests, metrics=service.metrics)  # added last, so outermost: it sees every answer


def _address(config: ServerConfig) -> Address:
    return Address(config.host, config.port, config.body_timeout_s, config.send_timeout_s)


def _http_failure(error: HTTPException) -> Response:
    """What the routing refuses: there is no such path, or no such method on it."""
    body = {
        "message": str(error.detail),
        "type": "not_found" if error.status_code == 404 else "http_error",
        "param": None,
        "code": error.status_code,
        "hint": "See /docs.",
    }
    return json_response({"error": body}, error.status_code, dict(error.headers or {}))
