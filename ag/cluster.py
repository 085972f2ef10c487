"""Work that the machines of a Ray cluster share: ``cluster=local``, ``auto`` or the address of one.

A *unit* of work is a value that can be sent. A *host* is an actor of Ray that makes what does units once, such as a
worker with a model, and then does one unit after the other. Ray places hosts where there is room. This process deals
the units out, asks for another host where one dies, and takes the results in, so that it alone writes them down.
Nothing of its environment is sent along.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ag.errors import UserError, first_line
from ag.versions import versions

CLUSTER = (
    "where the work runs: null means in this process; local: in processes of this machine; auto: on the Ray cluster of "
    "this machine; HOST:PORT: on the cluster at this address (ag[cluster])"
)
CONNECT_SECONDS = 5.0
NO_ROOM_SECONDS = 60.0  # after which work that no machine has room for is given up
MOST_HOSTS = 256  # that are asked for at once; Ray starts those that machines have room for, now or when they join

LIBRARIES = ("ag", "torch", "transformers", "peft", "lightning")  # results depend on

U = TypeVar("U")
R = TypeVar("R")


@dataclass(frozen=True)
class Room:
    """What a host takes of a machine.

    Attributes:
        cpus: cores.
        gpus: GPUs.
        memory: bytes of main memory; 0: not counted.
    """

    cpus: float = 1
    gpus: float = 0
    memory: int = 0

    @classmethod
    def on(cls, device: str, cpus: float = 1, memory: int = 0) -> Room:
        """Return the room of work on a device, ``cpu`` or ``cuda``.

        Raises:
            UserError: for one GPU by its number, which is another one on each machine.
        """
        if ":" in device:
            raise UserError(f"device={device}: expected cpu or cuda with cluster=..., which deals GPUs out.")
        return cls(cpus=cpus, gpus=0 if device == "cpu" else 1, memory=memory)

    def hosts(self, machine: Mapping[str, float]) -> int:
        """Return how many hosts have room in the resources of machines, by their names in Ray."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return int(min(machine.get(name, 0) // number for name, number in wanted.items() if number))


@dataclass(frozen=True)
class Lost:
    """What came of a unit whose hosts all ended before it was done.

    Attributes:
        times: hosts that it was given.
        why: what the last one died of.
    """

    times: int
    why: str


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Belong to a cluster while the block runs.

    Args:
        address: ``local``, ``auto`` or an address, as of :data:`CLUSTER`.

    Raises:
        UserError: when Ray is not installed, there is no such cluster, or it has another Python or Ray.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError(f"cluster={address}: needs Ray: pip install 'ag[cluster]'; or leave cluster= out.") from None
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray tells its makers otherwise
    if address == "local":
        os.environ.setdefault("RAY_worker_niceness", "0")  # of 15, with which other work would starve them
    told: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    told |= {"configure_logging": False, "log_to_driver": False}
    try:
        host, colon, port = address.rpartition(":")
        if colon and "://" not in address:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()  # Ray tries for minutes
        ray.init(address, **told)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cluster={address}: {' '.join(str(error).split())[:300]}; expected local, auto, or the address that "
            "`ray start --head` has printed."
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def resources() -> Mapping[str, float]:
    """Return what the machines of the cluster that this process is connected to have together, by Ray's names."""
    import ray

    found: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def described() -> str:
    """Return what the machines of the cluster have together, as a text."""
    machines = resources()
    return ", ".join(f"{name} {machines.get(name, 0):g}" for name in ("CPU", "GPU", "memory"))


def on_gpu(accelerator: str) -> bool:
    """Whether a run with ``trainer.accelerator`` takes GPUs of the cluster."""
    return accelerator == "gpu" or (accelerator == "auto" and "GPU" in resources())


def check_versions(theirs: Mapping[str, str]) -> None:
    """Compare libraries here with those where work is dealt out.

    Raises:
        UserError: when they are others, so that results would not be comparable.
    """
    mine = versions(*theirs)
    differ = [f"{name} {mine[name]} instead of {other}" for name, other in theirs.items() if mine[name] != other]
    if differ:
        raise UserError(f"cluster: a machine has {', '.join(differ)}: expected the same versions on all of them.")


class Host(Generic[U, R]):
    """A process of the cluster that does units.

    Args:
        make: makes what does them.
        versions: of the libraries where the work is dealt out.
    """

    def __init__(self, make: Callable[[], Callable[[U], R]], versions: Mapping[str, str]) -> None:
        self._make, self._versions = make, versions
        self._do: Callable[[U], R] | None = None

    def do(self, *units: U) -> list[R]:
        """Do units; without one be ready for the next.

        Raises:
            UserError: when the libraries here are others.
        """
        if self._do is None:
            check_versions(self._versions)
            self._do = self._make()
        return [self._do(unit) for unit in units]


def share(
    units: Sequence[U], make: Callable[[], Callable[[U], R]], room: Room, failures: int = 3
) -> Iterator[tuple[U, R | Lost]]:
    """Have units done by the machines of the cluster that this process is connected to.

    A unit whose host dies, alone or with its machine, is done again. Machines that join get hosts too.

    Args:
        units: what is to be done.
        make: makes what does a unit, once in each host.
        room: of a host.
        failures: times that a unit may end its host.

    Yields:
        Each unit with its result, in the order in which they end.

    Raises:
        UserError: when no machine has room, hosts cannot begin, or the libraries of a machine are others.
        Exception: what ``make`` or a unit raised.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    takes: Any = {"num_cpus": room.cpus, "num_gpus": room.gpus, "memory": room.memory or None}
    kind: Any = ray.remote(**takes)(Host)
    ours, todo, left = versions(*LIBRARIES), list(reversed(range(len(units)))), len(units)
    died: Counter[int | None] = Counter()  # hosts, by the number of the unit that they were at; None means in between
    busy: dict[Any, tuple[Any, int | None]] = {}  # hosts and what they are at, by what they promised

    def begin() -> None:
        host = kind.remote(make, ours)
        busy[host.do.remote()] = host, None

    asked_for = min(left, MOST_HOSTS)
    for _ in range(asked_for):
        begin()
    while left:
        host = None  # one without work ends when nothing names it, and another one has its room
        if not todo:  # those that are not ready yet come too late
            busy = {promise: one for promise, one in busy.items() if one[1] is not None}
        ended, _ = ray.wait([*busy], timeout=NO_ROOM_SECONDS)
        if not ended and not room.hosts(resources()):
            raise UserError(f"cluster: it has {described()}, and a host takes {room}: add a machine, or ask for less.")
        for promise in ended:
            host, at = busy.pop(promise)
            result: list[R | Lost] = []
            try:
                result = ray.get(promise)
                died[None] = 0
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:  # it died, alone or with its machine: another one takes its place
                died[at] += 1
                if at is None and died[at] == failures * asked_for:
                    raise UserError(f"cluster: hosts end as they begin: {first_line(error)}") from None
                if at is not None and died[at] == failures:
                    result = [Lost(failures, first_line(error))]
                elif at is not None:
                    todo.append(at)
                if todo:
                    begin()
            else:
                if todo:  # before this process is busy with what came out
                    unit = todo.pop()
                    busy[host.do.remote(units[unit])] = host, unit
            if at is not None and result:
                left -= 1
                yield units[at], result[0]
