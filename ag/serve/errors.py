"""Errors of requests, bodies that cannot be read included: what clients see, in OpenAI's form, and the log."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from ag.engine.block_pool import PoolFullError
from ag.errors import UserError
from ag.serve.scheduler import QueueFullError, QueueTimeoutError, StoppedError

logger = logging.getLogger("ag.serve")

#: The current request's id, for the log.
request_id: ContextVar[str] = ContextVar("request_id", default="-")

Body = TypeVar("Body", bound=BaseModel)
TYPE = re.compile(r"str|list|[A-Z]\w*")  # names of alternative types in pydantic's places
RETRY = {"Retry-After": "5"}  # seconds
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY, 503: RETRY}
#: Status and code of errors; the first type that matches applies.
STATUSES: Sequence[tuple[Any, int, str | None]] = (
    (QueueFullError, 429, "queue_full"),
    ((StoppedError, QueueTimeoutError, PoolFullError), 503, None),
    (UserError, 400, None),
    (ClientDisconnect, 499, None),  # nobody reads it
)


@dataclass(eq=False)
class ApiError(Exception):
    """An error for the client."""

    status: int  # of HTTP
    message: str  # the value, the expected value, and the fix
    param: str | None = None  # the wrong parameter, for example ``messages[0].role``
    code: str | None = None  # for programs

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = {429: "rate_limit_error", 401: "authentication_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def log_refusal(error: Exception, action: str = "refused") -> ApiError:
    """Log that a request failed, without any of its text, and return the error that its client sees."""
    shown = _shown(error)
    reason = shown.code or shown.body["error"]["type"]
    logger.info("%s: %s with %d %s", request_id.get(), action, shown.status, reason)
    return shown


def refusal(error: Exception) -> JSONResponse:
    """Log that a request failed, and return its response."""
    shown = log_refusal(error)
    return JSONResponse(shown.body, shown.status, HEADERS.get(shown.status))


def _shown(error: Exception) -> ApiError:
    """Return the error that a client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of starlette, for an unknown path
        return ApiError(error.status_code, f"{error.detail}.")
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    logger.error("a request failed: %s", error_location(error))
    return ApiError(500, "the server failed at this request.")


def read_body(kind: type[Body], body: bytes) -> Body:
    """Return the parameters in a body: JSON of the standard, in UTF-8, without NaN, and not nested too deeply."""
    try:
        return kind.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        raise _misfit(error.errors()) from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON object in UTF-8: {error}.", code="invalid_json") from None


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
    reason = reason.replace(" or Input should be ", " or ")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: {reason}.", param, "missing")
    return ApiError(400, f"{param}={first['input']!r:.80}: {reason}.", param, "invalid_value")


def _param(location: Sequence[int | str]) -> str:
    """Return the name of a parameter, for example ``messages[0].role``."""
    names = [part for part in location if isinstance(part, int) or part.isidentifier() and not TYPE.fullmatch(part)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in names).lstrip(".")


def error_location(error: BaseException) -> str:
    """Return an error's type and location. Its text may quote a prompt and is left out, as are folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    locations = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {locations}"
