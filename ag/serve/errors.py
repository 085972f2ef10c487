"""Errors of requests, bodies that cannot be read included: what clients see, in OpenAI's form, and the log."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

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
    (UserError, 400, None),
    (ClientDisconnect, 499, None),  # nobody reads it
)


class ApiError(HTTPException):
    """An error for the client.

    Args:
        status: HTTP status.
        message: the value, the expected value, and the fix.
        param: the wrong parameter, for example ``messages[0].role``.
        code: error code for programs.
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


def refusal(error: Exception) -> JSONResponse:
    """Return the response for an error."""
    shown = log_refusal(error)
    return JSONResponse(shown.body, shown.status_code, HEADERS.get(shown.status_code))


async def _refuse(http: Request, error: Exception) -> JSONResponse:
    return refusal(error)


class _Body(Request):
    """A request whose JSON is that of the standard: in UTF-8, without NaN, and not nested too deeply."""

    async def json(self) -> Any:
        """Return the values of the body."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON in UTF-8: {error}.", code="invalid_json") from None


class _Route(APIRoute):
    """A route that reads bodies as :class:`_Body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handler = super().get_route_handler()

        async def answer(http: Request) -> Response:
            return await handler(_Body(http.scope, http.receive))

        return answer


def new_app(**options: Any) -> FastAPI:
    """Return an app that reads bodies strictly, and refuses them in OpenAI's form."""
    handlers: dict[Any, Any] = {HTTPException: _refuse, RequestValidationError: _refuse}
    # FastAPI's own pages load scripts from other sites
    app = FastAPI(openapi_url=None, exception_handlers=handlers, **options)
    app.router.route_class = _Route
    return app


def _shown(error: Exception) -> ApiError:
    """Return the error that a client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _misfit(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.")
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    logger.error("a request failed: %s", error_location(error))
    return ApiError(500, "the server failed at this request.")


def _misfit(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for the first value of a body that does not fit, from pydantic's errors."""
    first = max(errors, key=lambda detail: len(detail["loc"]))  # if several types are possible: the best match
    param = _param(first["loc"][1:])
    if "param" in first.get("ctx", {}):  # of RequestBody
        end = "" if first["msg"].endswith("?") else "."
        return ApiError(400, first["msg"] + end, first["ctx"]["param"], first["type"])
    if not param:
        return ApiError(400, "the body is no JSON object: expected {...}.", code="invalid_json")
    details = [detail for detail in errors if _param(detail["loc"][1:]) == param]
    # reasons why a value of the right type is refused, or else all possible types
    reasons = [detail["msg"] for detail in details if not detail["type"].endswith("_type")] or [
        detail["msg"] for detail in details
    ]
    reason = " or ".join(dict.fromkeys(reasons)).replace(" or Input should be ", " or ")
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
