"""The server on several machines: replicas of the model under Ray Serve, and a front that clients reach.

The front reads a request, asks a replica, and passes on what the replica answers, piece by piece. The turns of a
conversation go to one replica, which holds what they begin with, unless its queue is full. Consistent hashing chooses
it, so that fronts need not know of each other, and few conversations move when replicas come and go.
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
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

import torch
from fastapi import FastAPI
from pydantic_core import from_json
from starlette.types import Message

from ag import plugins
from ag.cluster import LIBRARIES, Room, check_versions, connected, resources
from ag.commands.serve import KEY_VARIABLE, ServeConfig
from ag.config.recipes import resolve
from ag.continuation import read_policy
from ag.errors import UserError
from ag.serve.answers import WaitedError
from ag.serve.app import Endpoints, refusal, refused, shown
from ag.serve.metrics import Told, labelled
from ag.serve.scheduler import StoppedError
from ag.serve.snapshot import together
from ag.serve.start import DRAIN_SECONDS, announce, listen, log, serving
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
        self._service.start()

    def check_health(self) -> None:
        """Raise where no answer can be given any more; Ray then begins another replica."""
        if self._service.scheduler.failed:
            raise StoppedError("the scheduler has failed.")

    async def ask(self, path: str, body: bytes, full: int = 0) -> AsyncGenerator[Message | None]:
        """Answer a request, as :meth:`Endpoints.ask`; None comes as soon as it is taken.

        Args:
            path: of the endpoint.
            body: JSON, as it came.
            full: replicas that had no room for it, which :class:`Ring` reads.
        """
        yield None
        async with aclosing(self._service.ask(path, body)) as messages:
            async for message in messages:
                yield message

    async def tell(self) -> tuple[str, Told]:
        """Return its name, and what is going on."""
        return str(serve.get_replica_context().replica_id.unique_id), await self._service.tell()


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
        api_key: what clients have to know; None means that anybody may ask.
    """

    def __init__(self, replicas: DeploymentHandle[Replica], config: ServeConfig, policy: str, api_key: str | None):
        super().__init__(str(config.name), policy, config.body_bytes, FRONT_REQUESTS, api_key)
        self._replicas, self._wait_seconds = replicas, config.wait_seconds

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.app()

    async def tell(self) -> Told:
        """Return what is going on in all replicas."""
        try:
            asked = self._replicas.broadcast("tell")
            found = await asked.results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            found = []
        told = {one[0]: one[1] for one in found if not isinstance(one, BaseException)}
        if not told:
            raise refusal(StoppedError("no replica answers: ask again later."))
        return Told(
            together([one.snapshot for one in told.values()]),
            labelled({name: one.figures for name, one in told.items()}),
            any(one.works for one in told.values()),
        )

    async def drain(self) -> int:
        """Take no more requests; returns how many are not answered yet."""
        self.draining = True
        return self.open

    async def ask(self, path: str, body: bytes) -> AsyncGenerator[Message]:
        """Answer the body of a request by what a replica says."""
        try:
            begin, answer = await self._begun(path, body)
        except UserError as error:
            for message in refused(error):
                yield message
            return
        try:
            yield begin
            async for message in answer:
                yield message
        except RayActorError:  # in the middle of a stream
            gone = refusal(StoppedError("the replica that wrote this answer has ended: ask again."))
            event = f"data: {json.dumps(gone.body)}\n\n"
            yield {"type": "http.response.body", "body": event.encode(), "more_body": True}
        finally:
            answer.cancel()

    async def _begun(self, path: str, body: bytes) -> tuple[Message, Any]:
        """Have a replica answer; where one has no room, or dies before it has said anything, another one.

        Returns:
            The message with status and headers, and what gives the others.

        Raises:
            StoppedError: when the replicas that were asked have ended.
            WaitedError: when there was no replica for too long.
        """
        session, full, pause = conversation(body), 0, 0.0
        for left in reversed(range(TRIES)):
            await asyncio.sleep(pause)
            answer: Any = self._replicas.options(stream=True, session_id=session).ask.remote(path, body, full=full)
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await anext(answer)  # until a replica has taken the request
                begin = await anext(answer)
            except (RayActorError, DeploymentUnavailableError):
                pause = 2 * pause or LOST_SECONDS
                continue
            except BaseException as error:
                answer.cancel()
                if not isinstance(error, TimeoutError):
                    raise
                raise WaitedError(f"no replica came within {self._wait_seconds} seconds: ask again later.") from None
            if begin["status"] != 429 or not left:
                return begin, answer
            full += 1
        raise StoppedError("the replicas that were asked have ended: ask again later.")


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
    both: dict[str, Any] = {
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
        "health_check_period_s": HEALTH_SECONDS,
        "logging_config": LOGGING,
    }
    model: Any = serve.deployment(
        Replica,
        name="model",
        ray_actor_options={"num_cpus": room.cpus, "num_gpus": room.gpus},
        max_ongoing_requests=2 * (config.queue + config.batch),  # above what its own queue lets in, for those who look
        max_constructor_retry_count=TRIES,
        request_router_config=RequestRouterConfig(
            request_router_class=Ring,  # type: ignore[arg-type]
            request_router_kwargs={"num_fallback_replicas": TRIES - 1},
        ),
        **number,
        **both,
    )
    front: Any = serve.deployment(
        serve.ingress()(Front),
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=FRONT_REQUESTS,
        **both,
    )
    replicas = model.bind(config, versions(*LIBRARIES))
    return cast(serve.Application, front.bind(replicas, config, shown(read_policy(config)), api_key))


def run_on(address: str, config: ServeConfig, api_key: str | None) -> int:
    """Serve on a cluster until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        address: of the cluster, as of :data:`ag.cluster.CLUSTER`.
        config: of the server.
        api_key: what clients have to know; None means that anybody may ask.

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
