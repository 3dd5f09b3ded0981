"""The service: `create_app` for any ASGI server, `serve` for a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine_control.server.failures import install_error_handlers, json_response, vllm_failure
from engine_control.server.health import health_router
from engine_control.server.serving import Address, StartFailure, add_limits, engine_running, serve_app
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
    add_limits(
        app,
        service.metrics,
        server_config,
        failure=vllm_failure,
        paths=GENERATION_PATHS,
        in_flight=service.in_flight,
    )
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
