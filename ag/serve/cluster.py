"""The server on several machines: a front, and replicas of the model under Ray Serve.

The front forwards a request to a replica and streams the completion back. All turns of a conversation go to one
replica, which has cached their prefix. Consistent hashing chooses the replica: fronts share no state, and few
conversations move when the number of replicas changes.
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
from types import FrameType
from typing import Any, cast

import torch
from fastapi import FastAPI
from pydantic_core import from_json
from starlette.types import Message

from ag import plugins
from ag.cluster import LIBRARIES, Room, check_versions, connected, described, machines
from ag.commands.serve import ServeConfig
from ag.config.recipes import resolve
from ag.continuation import read_policy
from ag.errors import UserError
from ag.serve.answers import request_id
from ag.serve.app import STOPPING, Endpoints, api_error
from ag.serve.metrics import Status, label_replicas
from ag.serve.prompts import policy_text
from ag.serve.scheduler import QueueTimeoutError, StoppedError
from ag.serve.snapshot import sum_snapshots
from ag.serve.start import (
    CLOSE_SECONDS,
    DRAIN_SECONDS,
    announce,
    listen,
    load_service,
    set_up_log,
    with_environment_key,
)
from ag.versions import versions

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import DeploymentUnavailableError
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
    from ray.serve.handle import DeploymentHandle
except ModuleNotFoundError as error:
    raise UserError("ag.serve needs Ray Serve with cluster=...: pip install 'ag[serve,cluster]'.") from error

logger = logging.getLogger("ag.serve")

APP = "ag"  # the application's name on the cluster
TRIES = 3  # replicas to which a request is sent if each of them dies
LOST_SECONDS = 0.5  # wait after a lost replica, until the router has noticed; each further loss doubles it
HEALTH_SECONDS = 5.0  # between two health checks of a replica
STATUS_SECONDS = 10.0  # longest wait for the replicas' status
FRONT_REQUESTS = 10_000  # largest number of open requests of the front
LOGGING = {"enable_access_log": False}  # the scheduler's log has a line for each request
SESSION_LENGTH = 256  # characters, or token ids, at a text's start that choose its replica


class Replica:
    """A model and its scheduler in a process of the cluster.

    Args:
        config: the server's configuration.
        libraries: library versions on the machine that started the server.

    Raises:
        UserError: when this machine has other versions, or the model or its gates cannot be loaded.
    """

    def __init__(self, config: ServeConfig, libraries: Mapping[str, str]) -> None:
        check_versions(libraries)
        torch.set_num_threads(config.cores)
        plugins.load(config.plugins)
        set_up_log()
        self._service = load_service(config)
        self._service.start()

    def check_health(self) -> None:
        """Raise when the scheduler has failed; Ray then replaces this replica."""
        if self._service.scheduler.failed:
            raise StoppedError("the scheduler has failed.")

    async def ask(self, path: str, body: bytes, name: str) -> AsyncGenerator[Message | bytes | None]:
        """Yield None once the request has arrived, then the parts of :meth:`Endpoints.ask_or_refuse`.

        ``name`` is the request's id in the log.
        """
        yield None
        request_id.set(name)
        async with aclosing(self._service.ask_or_refuse(path, body)) as parts:
            async for part in parts:
                yield part

    async def end_answers(self) -> None:
        """End every answer now, with the text that it has so far; refuse new ones."""
        self._service.scheduler.stop(STOPPING)

    async def status(self) -> tuple[str, Status]:
        """Return the name and the status of this replica."""
        return str(serve.get_replica_context().replica_id.unique_id), await self._service.status()


class Front(Endpoints):
    """The endpoints that forward requests to replicas.

    Args:
        replicas: handle of the replicas.
        config: the server's configuration.
        policy: text of the policy, for the live page.
    """

    def __init__(self, replicas: DeploymentHandle[Replica], config: ServeConfig, policy: str) -> None:
        super().__init__(str(config.name), policy, config, FRONT_REQUESTS)
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> FastAPI:
        set_up_log()
        return self.app()

    async def status(self) -> Status:
        """Return the status of all replicas together."""
        try:
            responses = self._replicas.broadcast("status")
            results = await responses.results_async(timeout_s=STATUS_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            results = []
        statuses = {result[0]: result[1] for result in results if not isinstance(result, BaseException)}
        if not statuses:
            raise api_error(StoppedError("no replica answers: ask again later."))
        return Status(
            sum_snapshots([result.snapshot for result in statuses.values()]),
            label_replicas({name: result.metrics for name, result in statuses.items()}),
            any(result.is_healthy for result in statuses.values()),
            next(iter(statuses.values())).context_length,
        )

    async def drain(self) -> int:
        """Refuse new requests; returns the number of open ones."""
        self.draining = True
        return self.open

    async def end_answers(self) -> int:
        """End the open answers of all replicas with the text that they have so far; returns their number."""
        number = self.open
        await self._replicas.broadcast("end_answers").results_async(timeout_s=STATUS_SECONDS, return_exceptions=True)
        return number

    async def ask(self, path: str, body: bytes) -> AsyncGenerator[Message | bytes]:
        """Forward the body of a request to a replica, and yield the parts of its response."""
        start_message, parts = await self._first_answer(path, body)
        try:
            yield start_message
            async for part in parts:
                yield part
        except RayActorError:  # in the middle of a stream
            raise StoppedError("the replica that wrote this answer has ended: ask again.") from None
        finally:
            parts.cancel()

    async def _first_answer(self, path: str, body: bytes) -> tuple[Message, Any]:
        """Send a request to a replica. If it dies before it answers, send the request to another replica.

        Returns:
            The start of the response, and an iterator of the parts of its body.

        Raises:
            StoppedError: when every replica that received the request has ended.
            QueueTimeoutError: when no replica received it within ``wait_seconds``.
        """
        session, pause = session_id(body), 0.0
        for _ in range(TRIES):
            await asyncio.sleep(pause)
            parts: Any = self._replicas.options(stream=True, session_id=session).ask.remote(
                path, body, request_id.get()
            )
            try:
                async with asyncio.timeout(self.config.wait_seconds):
                    await anext(parts)  # a replica has received the request
                return await anext(parts), parts
            except (RayActorError, DeploymentUnavailableError):
                pause = 2 * pause or LOST_SECONDS
                continue
            except BaseException as error:
                parts.cancel()
                if not isinstance(error, TimeoutError):
                    raise
                raise QueueTimeoutError(
                    f"no replica came within {self.config.wait_seconds} seconds: ask again later."
                ) from None
        raise StoppedError("the replicas that were asked have ended: ask again later.")


def session_id(body: bytes) -> str:
    """Return a hash that all turns of a conversation share, or "" for a body that a replica will refuse.

    The hash is taken from ``prompt_cache_key``. Without that key, a chat's hash is taken from its instructions and its
    messages up to the user's first message, and a text's hash from its first ``SESSION_LENGTH`` characters. The
    router's log shows the hash, and must not hold texts.
    """
    try:
        params = from_json(body)
        key = params.get("prompt_cache_key")
        turns = params.get("messages", params.get("input"))
        if key is None and turns is not None:
            messages = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
            roles = [message["role"] for message in messages]
            first = roles.index("user") + 1 if "user" in roles else len(roles)
            key = [params.get("instructions"), *(message["content"] for message in messages[:first])]
        elif key is None:
            key = params["prompt"][:SESSION_LENGTH]
    except (ValueError, AttributeError, KeyError, TypeError):
        return ""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application for ``serve deploy`` and ``serve run``, as ``ag.serve.cluster:app``.

    Args:
        args: the keys of ``python -m ag.serve``, except host and port: these are ``http_options`` in Ray's file.

    Raises:
        UserError: for an unknown key or a value that does not fit.
    """
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in args.items()}
    return application(with_environment_key(resolve(ServeConfig, {"cluster": "auto"} | texts)))


def application(config: ServeConfig) -> serve.Application:
    """Return the application: the front, bound to the replicas."""
    resources, (min_replicas, *max_replicas) = Room.on(config.device, config.cores), config.replicas
    replica_options: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas:
        scaling = AutoscalingConfig(
            min_replicas=min_replicas, max_replicas=max_replicas[0], target_ongoing_requests=config.batch / 2
        )
        replica_options = {"autoscaling_config": scaling}
    shared_options: dict[str, Any] = {
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
        "health_check_period_s": HEALTH_SECONDS,
        "logging_config": LOGGING,
    }
    model: Any = serve.deployment(
        Replica,
        name="model",
        ray_actor_options={"num_cpus": resources.cpus, "num_gpus": resources.gpus},
        max_ongoing_requests=2 * (config.queue + config.batch),  # more than queue and batch: status requests count too
        max_constructor_retry_count=TRIES,
        request_router_config=RequestRouterConfig(
            request_router_class=ConsistentHashRouter,  # type: ignore[arg-type]
            request_router_kwargs={"num_fallback_replicas": TRIES - 1},
        ),
        **replica_options,
        **shared_options,
    )
    front: Any = serve.deployment(
        serve.ingress()(Front),
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=FRONT_REQUESTS,
        **shared_options,
    )
    replicas = model.bind(config, versions(*LIBRARIES))
    return cast(serve.Application, front.bind(replicas, config, policy_text(read_policy(config))))


def run_on(address: str, config: ServeConfig) -> int:
    """Serve on a cluster until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        address: the cluster's address, see :data:`ag.cluster.CLUSTER`.
        config: the server's configuration.

    Raises:
        UserError: when the cluster is not reached, is full or serves already, or no replica could start.
    """
    serve_app, resources, min_replicas = application(config), Room.on(config.device, config.cores), config.replicas[0]
    with connected(address):
        if sum(resources.hosts(machine) for machine in machines()) < min_replicas:
            raise UserError(
                f"replicas={min_replicas}: the cluster has {described()}, and each takes {resources} on one machine: "
                "ask for fewer or less."
            )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        port = config.port
        if address == "local":
            with listen(config.host, port) as free:
                port = free.getsockname()[1]
        serve.start(http_options={"host": config.host, "port": port}, logging_config=LOGGING)
        if APP in serve.status().applications:
            raise UserError(f"cluster={address}: it serves already: `serve shutdown` ends that.")
        set_up_log()
        try:
            _serve_until_signal(serve_app, lambda: announce(config, str(config.name), config.host, port))
        finally:
            serve.delete(APP)
            if address == "local":
                serve.shutdown()  # type: ignore[no-untyped-call]
    logger.info("stopped")
    return 0


def _serve_until_signal(serve_app: serve.Application, ready: Callable[[], None]) -> None:
    """Run an application until SIGTERM or Ctrl-C. Then refuse new requests and finish the open requests.

    Requests that are open after ``DRAIN_SECONDS`` end with the text that they have so far.
    """
    try:
        front = serve.run(serve_app, name=APP)
    except RuntimeError:
        reasons = [
            deployment.message
            for deployment in serve.status().applications[APP].deployments.values()
            if deployment.message
        ]
        raise UserError(f"cluster: no replica could start: {' '.join(' '.join(reasons).split())[-600:]}") from None
    stop, names = threading.Event(), list[str]()

    def end_by(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(1)
        names.append(signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_by)
    ready()
    stop.wait()
    logger.info("%s: open requests have %.0f s", *names, DRAIN_SECONDS)
    if not _drained(front, DRAIN_SECONDS):
        logger.info("%d requests cut", sum(front.broadcast("end_answers").results(timeout_s=STATUS_SECONDS)))
        _drained(front, CLOSE_SECONDS)


def _drained(front: DeploymentHandle[Front], seconds: float) -> bool:
    """Wait until no request is open, and return whether that is so within a time."""
    end = time.monotonic() + seconds
    while any(front.broadcast("drain").results(timeout_s=STATUS_SECONDS)):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
