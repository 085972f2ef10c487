"""Work on the machines of a Ray cluster: ``cluster=local``, ``auto`` or its address.

A *unit* of work is a picklable value. A *host* is a Ray actor that builds a worker once, for example with a model, and
then works on units one by one. Ray places hosts on machines with free resources. This process distributes the units,
starts a new host when one dies, and alone writes the results. Environment variables are not sent to hosts.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ag.errors import UserError, first_line, need
from ag.versions import versions

CLUSTER = (
    "where the work runs: null means in this process; local: in processes of this machine; auto: on the Ray cluster of "
    "this machine; HOST:PORT: on the cluster at this address (ag[cluster])"
)
CONNECT_SECONDS = 5.0
NO_ROOM_SECONDS = 60.0  # longest wait for a machine with room
MOST_HOSTS = 256  # requested at once; Ray starts a host when a machine has room

LIBRARIES = ("ag", "torch", "transformers", "peft", "lightning")  # all machines must have equal versions of these

U = TypeVar("U")
R = TypeVar("R")


@dataclass(frozen=True)
class Resources:
    """The resources of a host."""

    cpus: float = 1  # cores
    gpus: float = 0  # GPUs
    memory: int = 0  # bytes of main memory; 0 means that it is not counted

    @classmethod
    def on(cls, device: str, cpus: float = 1, memory: int = 0) -> Resources:
        """Return the resources of work on a device, ``cpu`` or ``cuda``.

        Raises:
            UserError: for a GPU by number, as Ray assigns GPUs.
        """
        if ":" in device:
            raise UserError(f"device={device}: expected cpu or cuda with cluster=..., which deals GPUs out.")
        return cls(cpus=cpus, gpus=0 if device == "cpu" else 1, memory=memory)

    def hosts(self, machine: Mapping[str, float]) -> int:
        """Return the number of hosts that fit into resources, given by Ray's names."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return int(min(machine.get(name, 0) // number for name, number in wanted.items() if number))


@dataclass(frozen=True)
class LostUnit:
    """The result of a unit whose hosts all died before it was done."""

    times: int  # number of these hosts
    why: str  # error of the last one


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster while the block runs.

    Args:
        address: ``local``, ``auto`` or an address, see :data:`CLUSTER`.

    Raises:
        UserError: Ray is not installed, the cluster does not exist, or it has another Python or Ray.
    """
    need("ray", "cluster", f"cluster={address}")
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    if address == "local":
        os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 other processes starve the workers
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    options |= {"configure_logging": False, "log_to_driver": False}
    try:
        host, colon, port = address.rpartition(":")
        if colon and "://" not in address:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()  # Ray tries for minutes
        ray.init(address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cluster={address}: {' '.join(str(error).split())[:300]}; expected local, auto, or the address that "
            "`ray start --head` has printed."
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> list[Mapping[str, float]]:
    """Return the resources of each machine of the connected cluster, by Ray's names."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def described() -> str:
    """Return the total resources of the connected cluster and the number of its machines, as a text."""
    nodes = machines()
    totals = (f"{name} {sum(machine.get(name, 0) for machine in nodes):g}" for name in ("CPU", "GPU", "memory"))
    return f"{', '.join(totals)} on {len(nodes)} machine{'s' * (len(nodes) != 1)}"


def on_gpu(accelerator: str) -> bool:
    """Return whether a run with this ``trainer.accelerator`` uses GPUs of the cluster."""
    return accelerator == "gpu" or (accelerator == "auto" and any("GPU" in machine for machine in machines()))


def check_versions(expected: Mapping[str, str]) -> None:
    """Compare the versions of libraries here with the versions on the machine that distributes the work.

    Raises:
        UserError: the versions differ, and results would not be comparable.
    """
    installed = versions(*expected)
    differ = [f"{name} {installed[name]} instead of {x}" for name, x in expected.items() if installed[name] != x]
    if differ:
        raise UserError(f"cluster: a machine has {', '.join(differ)}: expected equal versions on all machines.")


class Host(Generic[U, R]):
    """A process of the cluster that works on units.

    Args:
        make: builds the worker.
        versions: versions of the libraries on the machine that distributes the work.
    """

    def __init__(self, make: Callable[[], Callable[[U], R]], versions: Mapping[str, str]) -> None:
        self._make, self._versions = make, versions
        self._do: Callable[[U], R] | None = None

    def do(self, *units: U) -> list[R]:
        """Work on units, and return their results; without units only build the worker.

        Raises:
            UserError: the libraries here have other versions.
        """
        if self._do is None:
            check_versions(self._versions)
            self._do = self._make()
        return [self._do(unit) for unit in units]


def share(
    units: Sequence[U], make: Callable[[], Callable[[U], R]], room: Resources, failures: int = 3
) -> Iterator[tuple[U, R | LostUnit]]:
    """Distribute units to the machines of the connected cluster.

    If a host dies, alone or with its machine, its unit runs again. Machines that join get hosts too.

    Args:
        units: the units.
        make: builds the worker of a host, which is called with each unit.
        room: resources of a host.
        failures: number of hosts that may die at one unit.

    Yields:
        Each unit with its result, in order of completion.

    Raises:
        UserError: no machine has room, hosts cannot start, or a machine has other versions of the libraries.
        Exception: the error of ``make`` or of a unit.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    resources_of_host: Any = {"num_cpus": room.cpus, "num_gpus": room.gpus, "memory": room.memory or None}
    actor_class: Any = ray.remote(**resources_of_host)(Host)
    expected_versions = versions(*LIBRARIES)
    pending, num_left = list(reversed(range(len(units)))), len(units)
    died: Counter[int | None] = Counter()  # dead hosts by the index of their unit; None means while starting
    busy: dict[Any, tuple[Any, int | None]] = {}  # future -> host and index of its unit, None while it starts

    def begin() -> None:
        host = actor_class.remote(make, expected_versions)
        busy[host.do.remote()] = host, None

    asked_for = min(num_left, MOST_HOSTS)
    for _ in range(asked_for):
        begin()
    while num_left:
        host = None  # without a reference the actor ends, and frees its room
        if not pending:  # hosts that still start are not needed
            busy = {future: job for future, job in busy.items() if job[1] is not None}
        finished, _ = ray.wait([*busy], timeout=NO_ROOM_SECONDS)
        if not finished and not any(room.hosts(machine) for machine in machines()):
            raise UserError(
                f"cluster: it has {described()}, and a host takes {room} on one machine: add a larger machine, or ask "
                "for less."
            )
        for future in finished:
            host, index = busy.pop(future)
            result: list[R | LostUnit] = []
            try:
                result = ray.get(future)
                died[None] = 0
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:  # the host died, alone or with its machine
                died[index] += 1
                if index is None and died[index] == failures * asked_for:
                    raise UserError(f"cluster: hosts die while they start: {first_line(error)}") from None
                if index is not None and died[index] == failures:
                    result = [LostUnit(failures, first_line(error))]
                elif index is not None:
                    pending.append(index)
                if pending:
                    begin()
            else:
                if pending:  # before this process handles the result
                    next_index = pending.pop()
                    busy[host.do.remote(units[next_index])] = host, next_index
            if index is not None and result:
                num_left -= 1
                yield units[index], result[0]
