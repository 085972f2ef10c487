"""The server on several machines: replicas of the model under Ray Serve, and a front that clients reach.

The front reads a request, asks a replica, and passes on what the replica's own app answers, piece by piece. The turns
of a conversation go to one replica, which holds what they begin with, unless its queue is full. Consistent hashing
chooses it, so that fronts need not know of each other, and few conversations move when replicas come and go.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from fastapi import FastAPI
from fastapi import Request as Http
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ag import plugins
from ag.cluster import LIBRARIES, Room, check_versions, connected, resources
from ag.commands.serve import KEY_VARIABLE, ServeConfig
from ag.config.recipes import resolve
from ag.continuation import read_policy
from ag.errors import UserError
from ag.serve.app import shown
from ag.serve.endpoints import Endpoints, refusal
from ag.serve.protocol import ApiError
from ag.serve.snapshot import Snapshot, together
from ag.serve.start import DRAIN_SECONDS, announce, listen, log, serving
from ag.serve.worker import StoppedError, WaitedError
from ag.versions import versions

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import DeploymentUnavailableError
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, RunningReplica
except ModuleNotFoundError as error:
    raise UserError("ag.serve needs Ray Serve with cluster=...: pip install 'ag[serve,cluster]'.") from error

APP = "ag"  # the application's name on the cluster
TRIES = 3  # replicas that a request may lose, or find full, before it is refused
LOST_SECONDS = 0.5  # after a loss, until all have heard of it; twice as long after the next
HEALTH_SECONDS = 5.0  # between two looks at a replica
LOOK_SECONDS = 10.0  # longest wait for what all replicas tell
FRONT_REQUESTS = 10_000  # at once, those that wait for a replica among them
LOGGING = {"enable_access_log": False}  # the app has its own, which names no path
BEGINNING = 256  # characters of a text, or bytes of its tokens, that its later forms have in common


class Replica:
    """A model and its scheduler in a process of the cluster.

    Args:
        config: of the server.
        libraries: their versions where it was asked for.

    Raises:
        UserError: when the libraries here are others, or the model or its gates cannot be loaded.
    """

    def __init__(self, config: ServeConfig, libraries: Mapping[str, str]) -> None:
        check_versions(libraries)
        torch.set_num_threads(config.cores)
        plugins.load(config.plugins)
        log()
        self._service = serving(config, None)  # the front asks for the key
        self._app = self._service.app()
        self._service.worker.start()

    def check_health(self) -> None:
        """Raise where no answer can be given any more; Ray then begins another replica."""
        if self._service.worker.failed:
            raise StoppedError("the scheduler has failed.")

    async def ask(self, path: str, body: bytes, full: int = 0) -> AsyncIterator[Message | None]:
        """Answer a request.

        Args:
            path: of the endpoint.
            body: JSON, as it came.
            full: replicas that had no room for it, which :class:`Ring` reads.

        Yields:
            None as soon as it is taken, then what the app sends (messages of ASGI).
        """
        yield None
        told: asyncio.Queue[Message | None] = asyncio.Queue()
        working = asyncio.ensure_future(self._app(_scope(path), _only(body), told.put))
        working.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (message := await told.get()) is not None:
                yield message
        finally:
            working.cancel()  # a client that left

    async def tell(self) -> tuple[str, Snapshot, bytes, bool]:
        """Return its name, what it is doing, what Prometheus reads of it, and whether it answers."""
        name = str(serve.get_replica_context().replica_id.unique_id)
        service = self._service
        return name, await service.snapshot(), await service.figures(), await service.works()


class Ring(ConsistentHashRouter):
    """Consistent hashing by conversation, which passes over the replicas that had no room for a request."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that a request may go to, the first one preferred."""
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        full = pending_request.kwargs.get("full", 0) if pending_request else 0
        return ranked[full:] or ranked  # where all were full, one may have room again


class Front(Endpoints):
    """The endpoints that clients reach.

    Args:
        replicas: answer.
        config: of the server.
        policy: what evicts, for those who watch.
        api_key: what clients have to know; None: nothing.
    """

    def __init__(self, replicas: DeploymentHandle[Replica], config: ServeConfig, policy: str, api_key: str | None):
        super().__init__(str(config.name), policy, config.body_bytes, api_key)
        self._replicas, self._wait_seconds = replicas, config.wait_seconds
        self._open = 0  # requests that are not answered yet

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.app()

    async def chat(self, http: Http) -> Response:
        """Answer a conversation."""
        return await self._pass_on(http)

    async def completions(self, http: Http) -> Response:
        """Continue a text."""
        return await self._pass_on(http)

    async def snapshot(self) -> Snapshot:
        """Return what is going on."""
        return together([snapshot for _, snapshot, _, _ in await self._told()])

    async def figures(self) -> bytes:
        """Return what Prometheus reads."""
        return labelled({name: figures.decode() for name, _, figures, _ in await self._told()})

    async def works(self) -> bool:
        """Tell whether there is a scheduler that answers."""
        with suppress(ApiError):
            return any(works for *_, works in await self._told())
        return False

    async def drain(self) -> int:
        """Take no more requests; returns how many are not answered yet."""
        self.draining = True
        return self._open

    async def _told(self) -> list[tuple[str, Snapshot, bytes, bool]]:
        """Return what each replica tells of itself."""
        try:
            asked = self._replicas.broadcast("tell")
            found = await asked.results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            found = []
        told = [one for one in found if not isinstance(one, BaseException)]
        if not told:
            raise refusal(StoppedError("no replica answers: ask again later."))
        return told

    async def _pass_on(self, http: Http) -> Response:
        """Answer by what a replica says."""
        try:
            body = await self.body(http)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        self._open += 1
        try:
            return await self._asked(http.url.path, body)
        except BaseException:
            self._close()
            raise

    async def _asked(self, path: str, body: bytes) -> Response:
        """Have a replica answer; where one has no room, or dies before it has said anything, another one."""
        session, full, pause = conversation(body), 0, 0.0
        for left in reversed(range(TRIES)):
            await asyncio.sleep(pause)
            answer: Any = self._replicas.options(stream=True, session_id=session).ask.remote(path, body, full=full)
            try:
                await self._taken(answer)
                begin = await anext(answer)
            except (RayActorError, DeploymentUnavailableError):
                pause = 2 * pause or LOST_SECONDS
                continue
            except BaseException as error:
                answer.cancel()
                raise (refusal(error) if isinstance(error, UserError) else error) from None
            if begin["status"] != 429 or not left:
                return Passed(begin, answer, self._close)
            full += 1
        raise refusal(StoppedError("the replicas that were asked have ended: ask again later."))

    async def _taken(self, answer: Any) -> None:
        """Wait until a replica begins with a request: there may be none for a while."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                await anext(answer)
        except TimeoutError:
            raise WaitedError(f"no replica came within {self._wait_seconds} seconds: ask again later.") from None

    def _close(self) -> None:
        self._open -= 1


class Passed(Response):
    """What a replica answers, as it comes.

    Args:
        begin: the message with status and headers.
        answer: gives the others.
        close: called when all were sent, or the client has left.
    """

    def __init__(self, begin: Message, answer: Any, close: Any) -> None:
        super().__init__()
        self._begin, self._answer, self._end = begin, answer, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        streams = any(b"text/event-stream" in value for _, value in self._begin["headers"])
        try:
            await send(self._begin)
            async for message in self._answer:
                await send(message)
        except RayActorError:
            if not streams:
                raise
            gone = refusal(StoppedError("the replica that wrote this answer has ended: ask again."))
            await send({"type": "http.response.body", "body": f"data: {json.dumps(gone.body)}\n\n".encode()})
        finally:
            self._answer.cancel()
            self._end()


class _All(Collector):
    """Metrics of several processes."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def labelled(figures: Mapping[str, str]) -> bytes:
    """Return figures of replicas, by their names, in Prometheus' text format, with the label ``replica``."""
    families: dict[str, Metric] = {}
    for name, text in figures.items():
        for one in text_string_to_metric_families(text):
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in one.samples]
    registry = CollectorRegistry()
    registry.register(_All([*families.values()]))
    return generate_latest(registry)


def conversation(body: bytes) -> str:
    """Return what the turns of a conversation have in common, hashed: its texts are nobody's but the replica's.

    That is what the client says (``prompt_cache_key``), or the messages up to the first one of the user, or the
    beginning of a text. A body that a replica will refuse has none: "".
    """
    try:
        asked = from_json(body)
        key = asked.get("prompt_cache_key")
        if key is None and "messages" in asked:
            roles = [message["role"] for message in asked["messages"]]
            first = roles.index("user") + 1 if "user" in roles else len(roles)
            key = [message["content"] for message in asked["messages"][:first]]
        elif key is None:
            key = asked["prompt"][:BEGINNING]
    except (ValueError, AttributeError, KeyError, TypeError):
        return ""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _scope(path: str) -> Scope:
    """Return what ASGI says of a request."""
    headers = [(b"content-type", b"application/json")]
    asgi = {"version": "3.0", "spec_version": "2.4"}
    told = {"type": "http", "asgi": asgi, "http_version": "1.1", "scheme": "http", "method": "POST", "path": path}
    return told | {"raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers}


def _only(body: bytes) -> Receive:
    """Return what gives an app a body, and then nothing: a client that leaves cancels the app."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    return receive


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application for ``serve deploy`` and ``serve run``, whose file names ``ag.serve.cluster:app``.

    Args:
        args: the keys of ``python -m ag.serve``. Those of the address are the file's own (``http_options``).

    Raises:
        UserError: for an unknown key or a value that does not fit.
    """
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in args.items()}
    config = resolve(ServeConfig, {"cluster": "auto"} | texts)
    return application(config, config.api_key or os.environ.get(KEY_VARIABLE) or None)


def application(config: ServeConfig, api_key: str | None) -> serve.Application:
    """Return the deployments of a server, bound together."""
    room, (least, *more) = Room.on(config.device, config.cores), config.replicas
    number: dict[str, Any] = {"num_replicas": least}
    if more:
        scaling = AutoscalingConfig(min_replicas=least, max_replicas=more[0], target_ongoing_requests=config.batch / 2)
        number = {"autoscaling_config": scaling}
    model: Any = serve.deployment(
        Replica,
        name="model",
        ray_actor_options={"num_cpus": room.cpus, "num_gpus": room.gpus},
        max_ongoing_requests=2 * (config.queue + config.batch),  # above what its own queue lets in, for those who look
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        logging_config=LOGGING,
        max_constructor_retry_count=TRIES,
        request_router_config=RequestRouterConfig(
            request_router_class=Ring,  # type: ignore[arg-type]
            request_router_kwargs={"num_fallback_replicas": TRIES - 1},
        ),
        **number,
    )
    front: Any = serve.deployment(
        serve.ingress()(Front),
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=FRONT_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        logging_config=LOGGING,
    )
    replicas = model.bind(config, versions(*LIBRARIES))
    return cast(serve.Application, front.bind(replicas, config, shown(read_policy(config)), api_key))


def run_on(address: str, config: ServeConfig, api_key: str | None) -> int:
    """Serve on a cluster until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        address: of the cluster, as of :data:`ag.cluster.CLUSTER`.
        config: of the server.
        api_key: what clients have to know; None: nothing.

    Raises:
        UserError: when there is no such cluster, it has no room or answers already, or no replica could begin.
    """
    made, room, least = application(config, api_key), Room.on(config.device, config.cores), config.replicas[0]
    with connected(address):
        if room.hosts(resources()) < least:
            has = ", ".join(f"{name} {resources().get(name, 0):g}" for name in ("CPU", "GPU"))
            raise UserError(f"replicas={least}: the cluster has {has}, and each takes {room}: ask for fewer or less.")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what is done here, step by step
        port = config.port
        if address == "local":
            with listen(config.host, port) as free:
                port = free.getsockname()[1]
        serve.start(http_options={"host": config.host, "port": port}, logging_config=LOGGING)
        if APP in serve.status().applications:
            raise UserError(f"cluster={address}: it answers already: `serve shutdown` ends that.")
        try:
            _answer_until_told(made, lambda: announce(str(config.name), config.host, port, api_key is None))
        finally:
            serve.delete(APP)
            if address == "local":
                serve.shutdown()  # type: ignore[no-untyped-call]
    return 0


def _answer_until_told(made: serve.Application, ready: Callable[[], None]) -> None:
    """Run an application until SIGTERM or Ctrl-C; then take no more requests, and wait for those that are answered."""
    try:
        front = serve.run(made, name=APP)
    except RuntimeError:
        told = [one.message for one in serve.status().applications[APP].deployments.values() if one.message]
        raise UserError(f"cluster: no replica could begin: {' '.join(' '.join(told).split())[-600:]}") from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(1) if stop.is_set() else stop.set())
    ready()
    stop.wait()
    end = time.monotonic() + DRAIN_SECONDS
    while any(front.broadcast("drain").results(timeout_s=LOOK_SECONDS)) and time.monotonic() < end:
        time.sleep(0.1)
