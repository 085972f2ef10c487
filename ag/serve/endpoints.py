"""What every server has: the endpoints that tell how it does, what may come in, and the form of its refusals."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ag.engine.block_pool import PoolFullError
from ag.errors import UserError
from ag.serve.page import page
from ag.serve.protocol import ApiError
from ag.serve.scheduler import Busy
from ag.serve.snapshot import Snapshot
from ag.serve.worker import StoppedError, WaitedError, where

logger = logging.getLogger("ag.serve")

BODY_SECONDS = 30  # in which a body has to come
RETRY_SECONDS = 5  # after which a client may ask again
READ_MULTIPLE = 16  # bodies up to so many times too long are read and dropped, so that their clients see the answer


class Endpoints(ABC):
    """The endpoints of one model.

    Args:
        name: of the model, for clients.
        policy: what evicts, for those who watch.
        body: most bytes of a request's body.
        api_key: what clients have to know; None: nothing.
    """

    def __init__(self, name: str, policy: str, body: int, api_key: str | None) -> None:
        self.name, self.policy, self.api_key = name, policy, api_key
        self.began = int(time.time())
        #: Whether no request is taken any more.
        self.draining = False
        self._longest_body = body
        self._page = page()

    def app(self) -> FastAPI:
        """Return the app, which begins and ends with :meth:`lifespan`."""
        app = FastAPI(lifespan=self.lifespan, openapi_url=None)  # the pages about it come from elsewhere
        guarded = APIRouter(dependencies=[Depends(self._check_key)])
        guarded.add_api_route("/v1/models", self.models, methods=["GET"])
        guarded.add_api_route("/v1/models/{name:path}", self.one_model, methods=["GET"])
        guarded.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        guarded.add_api_route("/v1/completions", self.completions, methods=["POST"])
        guarded.add_api_route("/metrics", self.metrics, methods=["GET"])
        guarded.add_api_route("/live", self.live, methods=["GET"])
        app.include_router(guarded)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/", self.page, methods=["GET"])  # its script asks for the key
        app.add_exception_handler(ApiError, refuse)
        app.add_exception_handler(HTTPException, refuse)
        return app

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Do what is needed before the first request and after the last."""
        yield

    @abstractmethod
    async def chat(self, http: Http) -> Response:
        """Answer a conversation."""

    @abstractmethod
    async def completions(self, http: Http) -> Response:
        """Continue a text."""

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """Return what is going on."""

    @abstractmethod
    async def figures(self) -> bytes:
        """Return what Prometheus reads."""

    @abstractmethod
    async def works(self) -> bool:
        """Tell whether there is a scheduler that answers."""

    # ---- how it does

    async def health(self) -> Response:
        """Tell whether requests are taken: 200, or 503."""
        status = await self.status()
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def page(self) -> Response:
        """Show what :meth:`live` tells."""
        text, rules = self._page
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})

    async def live(self) -> Response:
        """Tell the page what is going on."""
        now, status = await self.snapshot(), await self.status()
        told = asdict(now) | asdict(now.counts) | {"model": self.name, "policy": self.policy, "status": status}
        return JSONResponse(told | {"counts": None, "ended": now.counts.ended.total(), "seconds": time.monotonic()})

    async def metrics(self) -> Response:
        """Tell Prometheus."""
        return Response(await self.figures(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model().model_dump()]})

    async def one_model(self, name: str) -> Response:
        """Tell of the model."""
        self.check_model(name)
        return JSONResponse(self._model().model_dump())

    async def status(self) -> str:
        """Return how it does in a word: ``ok``, ``draining`` or ``failed``."""
        return "failed" if not await self.works() else "draining" if self.draining else "ok"

    def _model(self) -> Model:
        return Model(id=self.name, created=self.began, object="model", owned_by="ag")

    # ---- what may come in

    def check_model(self, name: str) -> None:
        """Refuse a request for another model."""
        if name != self.name:
            raise ApiError(404, f"model={name[:200]!r}: expected {self.name!r}.", "model", "model_not_found")

    async def _check_key(self, http: Http) -> None:
        if self.api_key is None:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.api_key.encode())
        if not right or scheme.lower() != "bearer":
            raise ApiError(
                401, "expected the header Authorization: Bearer KEY with this server's key.", code="invalid_api_key"
            )

    async def body(self, http: Http) -> bytes:
        """Read the body of a request for an answer.

        Raises:
            ApiError: when none is given any more, or the body is not JSON, too long or too slow.
        """
        if self.draining:
            raise ApiError(503, "the server is stopping: ask another one.", code="draining", retry=RETRY_SECONDS)
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "expected the header Content-Type: application/json.")  # no page's form can send it
        limit = self._longest_body
        body, length = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in http.stream():
                    length += len(part)
                    if length <= limit:
                        body += part
                    elif length > READ_MULTIPLE * limit:
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS} seconds.") from None
        if length > limit:
            raise ApiError(413, f"the body has more than {limit} bytes, which is the most that is read.")
        return bytes(body)


async def refuse(http: Http, error: Exception) -> Response:
    """Answer with an error in OpenAI's form."""
    answer = refusal(error)
    headers = {} if answer.retry is None else {"Retry-After": str(answer.retry)}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(answer.body, answer.status, headers)


def refusal(error: Exception) -> ApiError:
    """Return what a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.")
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", retry=RETRY_SECONDS)
    if isinstance(error, StoppedError | WaitedError | PoolFullError):
        return ApiError(503, str(error), retry=RETRY_SECONDS)
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    logger.error("a request failed: %s", where(error))
    return ApiError(500, "the server failed at this request.")
