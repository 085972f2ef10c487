"""Errors of requests: what clients see, in OpenAI's form, and the log."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ag.engine.block_pool import PoolFullError
from ag.errors import UserError
from ag.serve.scheduler import QueueFullError, QueueTimeoutError, StoppedError

logger = logging.getLogger("ag.serve")

#: The current request's id, for the log.
request_id: ContextVar[str] = ContextVar("request_id", default="-")

TYPE = re.compile(r"str|list|[A-Z]\w*")  # names of alternative types in pydantic's places
RETRY = {"Retry-After": "5"}  # seconds
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY, 503: RETRY}
#: Status and code of errors; the first type that matches applies.
STATUSES: Sequence[tuple[Any, int, str | None]] = (
    (QueueFullError, 429, "queue_full"),
    ((StoppedError, QueueTimeoutError, PoolFullError), 503, None),
    (FloatingPointError, 500, None),  # the model's numbers, or another request of its batch
    (UserError, 400, None),
    (ClientDisconnect, 499, None),  # nobody reads it
)
#: Parts of pydantic's messages, and what a client reads instead.
PLAIN_WORDS = {
    " or Input should be ": " or ",
    "a valid dictionary or object to extract fields from": "an object",
    "a valid dictionary": "an object",
}


class ApiError(HTTPException):
    """An error for the client: its message has the value, the expected value, and the fix.

    ``param`` is the wrong parameter, for example ``messages[0].role``; ``code`` is for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = {429: "rate_limit_error", 401: "authentication_error"}.get(self.status_code, "invalid_request_error")
        kind = "server_error" if self.status_code >= 500 else kind
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def log_refusal(error: Exception, action: str = "refused") -> ApiError:
    """Log that a request failed, without any of its text, and return the error that its client sees."""
    shown = _shown(error)
    reason = shown.code or shown.body["error"]["type"]
    logger.info("%s: %s with %d %s", request_id.get(), action, shown.status_code, reason)
    return shown


async def refusal(http: Request, error: Exception) -> JSONResponse:
    """Log that a request failed, and return its response."""
    shown = log_refusal(error)
    return JSONResponse(shown.body, shown.status_code, HEADERS.get(shown.status_code))


def _shown(error: Exception) -> ApiError:
    """Return the error that a client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _misfit(error.errors())
    if isinstance(error, HTTPException):  # of starlette, for an unknown path
        return ApiError(error.status_code, f"{error.detail}.")
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    logger.error("a request failed: %s", error_location(error))
    return ApiError(500, "the server failed at this request.")


def _misfit(errors: Sequence[Any]) -> ApiError:
    """Return the error for the first value of a body that does not fit, from pydantic's errors."""
    first: Mapping[str, Any] = max(errors, key=lambda error: len(error["loc"]))  # of several types: the best match
    param, shown = _param(first["loc"]), first.get("ctx", {})
    if "param" in shown:  # of RequestBody
        end = "" if first["msg"].endswith("?") else "."
        return ApiError(400, first["msg"] + end, shown["param"], first["type"])
    if not param:
        return ApiError(400, "the body is no JSON object: expected {...}.", code="invalid_json")
    details = [error for error in errors if _param(error["loc"]) == param]
    # reasons why a value of the right type is refused, or else all possible types
    values = [error for error in details if not error["type"].endswith("_type")]
    reason = " or ".join(dict.fromkeys(error["msg"] for error in values or details))
    for words, plain_words in PLAIN_WORDS.items():
        reason = reason.replace(words, plain_words)
    if first["type"] == "missing":
        return ApiError(400, f"{param}: {reason}.", param, "missing")
    return ApiError(400, f"{param}={first['input']!r:.80}: {reason}.", param, "invalid_value")


def _param(location: Sequence[int | str]) -> str:
    """Return the name of a parameter, for example ``messages[0].role`` at ``("body", "messages", 0, "role")``."""
    parts = location[1:]
    names = [part for part in parts if isinstance(part, int) or part.isidentifier() and not TYPE.fullmatch(part)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in names).lstrip(".")


def error_location(error: BaseException) -> str:
    """Return an error's type and location. Its text may quote a prompt and is left out, as are folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    locations = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {locations}"
