"""What a client is told when something goes wrong: statuses and OpenAI's error body, for every kind of failure."""

from __future__ import annotations

import difflib
import logging
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glm_mtp_export.errors import GlmMtpError, RequestError
from glm_mtp_export.serving.front import QueueFullError, UnavailableError
from glm_mtp_export.serving.http_limits import error_body
from glm_mtp_export.serving.openai_requests import UnknownModelError
from glm_mtp_export.serving.openai_responses import SequenceFailedError
from glm_mtp_export.serving.openai_schema import CalledFunction, ChatCompletionRequest, ChatMessage, CompletionRequest

__all__ = ["TimeLimitError", "message_of", "on_error", "on_http_exception", "on_invalid_body", "refusal", "status_of"]

_log = logging.getLogger(__name__)


class TimeLimitError(GlmMtpError):
    """A request ran longer than the server allows."""


_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (QueueFullError, 429, "rate_limit_error"),
    (UnknownModelError, 404, "not_found_error"),
    (RequestError, 400, "invalid_request_error"),
    (TimeLimitError, 504, "timeout_error"),
    (UnavailableError, 503, "service_unavailable_error"),
    (SequenceFailedError, 500, "server_error"),
    (GlmMtpError, 500, "server_error"),
)


def status_of(error: Exception) -> tuple[int, str]:
    """HTTP status and OpenAI error type."""
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return status, name
    return 500, "server_error"


def message_of(error: Exception) -> str:
    """What may be shown: our own errors say what to do, others stay in the log."""
    return str(error) if _is_ours(error) else "The server met an unexpected error; its log has the details."


def _is_ours(error: Exception) -> bool:
    return isinstance(error, GlmMtpError | SequenceFailedError)


def refusal(status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None) -> Response:
    """A response with OpenAI's error body."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    body = error_body(message, kind, param=param, code=code)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def on_error(request: HttpRequest, error: Exception) -> Response:
    """Handler of our own errors and of bugs."""
    status, kind = status_of(error)
    if status == 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    response = refusal(status, kind, message_of(error), code="model_not_found" if status == 404 else None)
    if not _is_ours(error):
        response.headers["connection"] = "close"  # the exception goes on to the HTTP server, which closes it
    return response


def on_invalid_body(request: HttpRequest, error: Exception) -> Response:
    """Handler of bodies that are no JSON or break the schema."""
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "none").split(";")[0].strip()
    if isinstance(error.body, bytes) and not kind.endswith("json"):
        message = f"body: the content-type is {kind}, expected application/json. Set this header."
        return refusal(400, "invalid_request_error", message)
    found = dict(_problem(problem) for problem in reversed(error.errors()))
    shown = list(reversed(found.items()))[:_MOST_PROBLEMS]
    message = "; ".join(f"{where or 'body'}: {text}" for where, text in shown)
    return refusal(400, "invalid_request_error", message, param=shown[0][0])


_MOST_PROBLEMS = 5
_MODELS = (ChatCompletionRequest, CompletionRequest, ChatMessage, CalledFunction)
# Fields that take several kinds of value, and which: pydantic would report each kind on its own.
_KINDS = {name: f.description for model in _MODELS for name, f in model.model_fields.items() if f.description}


def _problem(problem: dict[str, Any]) -> tuple[str | None, str]:
    """Field and message of one of pydantic's findings."""
    if problem["type"] == "json_invalid":
        return None, f"not JSON at character {problem['loc'][-1]} ({problem.get('ctx', {}).get('error', 'invalid')})"
    steps = [step for step in problem["loc"] if step != "body"]
    for index, step in enumerate(steps[:-1]):
        if step in _KINDS:
            return ".".join(map(str, steps[: index + 1])), f"expected {_KINDS[step]}"
    where = ".".join(map(str, steps))[:200] or None
    if problem["type"] == "extra_forbidden":
        fields = {name for model in _MODELS[:2] for name in model.model_fields} if len(steps) == 1 else set()
        near = difflib.get_close_matches(str(steps[-1]), sorted(fields), 1)
        hint = f"Did you mean {near[0]!r}?" if near else "Leave it out; GET /openapi.json lists all fields."
        return where, f"unknown field. {hint}"
    return where, str(problem["msg"]).removeprefix("Value error, ")


def on_http_exception(request: HttpRequest, error: Exception) -> Response:
    """Handler of unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path[:200]}: {message}. GET /openapi.json lists what is served."
    response = refusal(error.status_code, "invalid_request_error", message)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
