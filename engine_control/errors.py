"""One small tree of errors, raised anywhere and turned into an answer once, at the edge.

Each class has an HTTP status and a stable code; each instance names the thing (`field`), the value and the way out
(`hint`). An error crosses a process as `to_message()` and comes back, same class, through `from_message()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

Scalar = str | int | float | bool | None
VALUE_LIMIT = 200  # characters of a refused field or value that are repeated to the caller
MESSAGE_LIMIT = 2000


@dataclass(frozen=True)
class ErrorMessage:
    """An error as plain data: what travels over a socket or stands in a reply. `kind` is its class, if known."""

    code: str
    status: int
    message: str
    field: str | None = None
    value: Scalar = None
    hint: str | None = None
    kind: str | None = None


class EngineError(Exception):
    """Base of all errors that a caller may see. `code` may be narrowed per instance; the status may not."""

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        value: object = None,
        hint: str | None = None,
    ) -> None:
        self.message = _cut(message, MESSAGE_LIMIT)
        super().__init__(self.message)
        self.code = code or self.default_code
        self.field = None if field is None else _cut(field, VALUE_LIMIT)
        self.value = shorten(value)
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message]
        if self.field is not None:
            parts.append(f"(field {self.field!r}, value {self.value!r})")
        if self.hint:
            parts.append(self.hint)
        return " ".join(parts)

    def to_message(self) -> ErrorMessage:
        kind = type(self).__name__
        return ErrorMessage(self.code, self.status, self.message, self.field, self.value, self.hint, kind)


class InvalidRequestError(EngineError):
    """The request can never be served as it stands. Nothing was computed and nothing changed."""

    status = 400
    default_code = "invalid_request"


class UnknownFieldError(InvalidRequestError):
    """A field that no request has, most often a misspelt one."""

    default_code = "unknown_field"


class LimitExceededError(InvalidRequestError):
    """A valid request that is larger than this server accepts."""

    default_code = "limit_exceeded"


class NotAcceptableError(EngineError):
    """None of the content types that the client accepts can be made."""

    status = 406
    default_code = "not_acceptable"


class BodyTimeoutError(EngineError):
    """The request's body did not arrive in time."""

    status = 408
    default_code = "request_timeout"


class PayloadTooLargeError(EngineError):
    """The request body has more bytes than this server reads."""

    status = 413
    default_code = "payload_too_large"


class UnsupportedMediaTypeError(EngineError):
    """The request body is of a content type that this route does not read."""

    status = 415
    default_code = "unsupported_media_type"


class RequestAbortedError(EngineError):
    """The request was cancelled (by an abort call, or because its client went away) before it had finished."""

    status = 499
    default_code = "request_aborted"


class QueueFullError(EngineError):
    """Too many requests are waiting. Retry later; nothing was computed."""

    status = 429
    default_code = "queue_full"


class EngineUnavailableError(EngineError):
    """The engine process is starting, restarting or gone. Retry later."""

    status = 503
    default_code = "engine_unavailable"


class EngineDiedError(EngineUnavailableError):
    """The engine process ended while this request was in it. It is being restarted; the request may be sent again."""

    default_code = "engine_died"


class EnginePausedError(EngineUnavailableError):
    """Generation is paused, and the pause was asked for in a form that refuses new requests. Retry after it."""

    default_code = "engine_paused"


class NotExactError(EngineError):
    """Deterministic inference was asked for, and an operation of this model can't be made exact on this device."""

    status = 500
    default_code = "not_exact"


class EngineAsleepError(EngineUnavailableError):
    """What the request needs was released (or came back empty). Resume it, or send weights, then retry."""

    default_code = "engine_asleep"


class InconsistentWeightsError(EngineUnavailableError):
    """The weights are neither the old ones nor the new ones. Only a complete, good refit ends this state."""

    default_code = "inconsistent_weights"


class InsufficientMemoryError(EngineUnavailableError):
    """Memory that was released can't be had back now. Nothing was kept of the attempt; retry when there is room."""

    default_code = "insufficient_memory"


class ConflictError(EngineError):
    """The call doesn't fit the state that the engine is in, or somebody else holds what it needs. Nothing changed."""

    status = 409
    default_code = "conflict"


class RefitRefusedError(InvalidRequestError):
    """New weights that can't be taken as they are. Not one byte of the old ones is different."""

    default_code = "refit_refused"


class WeightSessionError(InvalidRequestError):
    """An update outside a session, a second begin, an end without a begin. No byte was touched."""

    default_code = "weight_session"


class EngineFaultError(EngineError):
    """The engine met a fault of its own while it computed this request."""

    status = 500
    default_code = "engine_fault"


class NonFiniteOutputError(EngineFaultError):
    """The model produced NaN or infinity. Such values are never returned as a success."""

    default_code = "non_finite_output"


def shorten(value: object) -> Scalar:
    """The value as something short enough to be repeated in an error, and small enough for any encoding."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return _cut(value if isinstance(value, str) else repr(value), VALUE_LIMIT)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def from_message(message: ErrorMessage) -> EngineError:
    """The error again: of its own class, or of the one that has this status and code (or of the nearest one)."""
    best: type[EngineError] = EngineError
    for cls in _all_errors(EngineError):
        if cls.status != message.status:
            continue
        if cls.__name__ == message.kind:
            best = cls
            break
        if best is EngineError or cls.default_code == message.code:
            best = cls
    return best(message.message, code=message.code, field=message.field, value=message.value, hint=message.hint)


def _all_errors(root: type[EngineError]) -> list[type[EngineError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_all_errors(child))
    return found
