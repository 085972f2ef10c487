"""Work that two machines of a Ray cluster share, each a process here."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

ray = pytest.importorskip("ray", reason="needs ag[cluster]: bash scripts/test.sh")

from ag import cluster  # noqa: E402
from ag.errors import UserError  # noqa: E402
from tests.support.machines import MACHINE  # noqa: E402
from tests.support.refused import refuses  # noqa: E402

pytestmark = pytest.mark.slow  # a cluster is started


class Doubles:
    """Does units: twice a number, and where."""

    def __init__(self, seconds, before=None):
        self.seconds, self.begun = seconds, time.monotonic()
        if before is not None:
            raise before

    def __call__(self, number):
        if number < 0:
            os._exit(number)
        time.sleep(self.seconds)
        return 2 * number, os.getpid()


class Meets(Doubles):
    """Does its units once two have begun."""

    def __init__(self, folder):
        super().__init__(0.01)
        self.folder = folder

    def __call__(self, number):
        (self.folder / str(os.getpid())).touch()
        while len([*self.folder.iterdir()]) < 2:
            time.sleep(0.01)
        return super().__call__(number)


def test_units_are_shared(machines, tmp_path):
    """By as many hosts as have room, each of which begins once."""
    with cluster.connected(machines.address):
        found = dict(cluster.share(range(40), partial(Meets, tmp_path), cluster.Resources()))
    assert {unit: result[0] for unit, result in found.items()} == {n: 2 * n for n in range(40)}
    assert len({process for _, process in found.values()}) == 2


def test_errors_of_units_and_hosts_are_raised(machines):
    with cluster.connected(machines.address):
        with refuses(UserError, "no model"):
            list(cluster.share([1], partial(Doubles, 0, UserError("no model")), cluster.Resources()))
        with pytest.raises(TypeError):
            list(cluster.share([None], partial(Doubles, 0), cluster.Resources()))


def test_a_unit_that_ends_its_hosts_is_lost_alone(machines):
    """As one that runs out of memory is."""
    with cluster.connected(machines.address):
        found = dict(cluster.share([1, -9, 2, 3], partial(Doubles, 0.05), cluster.Resources(), failures=2))
    assert isinstance(found[-9], cluster.LostUnit) and found[-9].times == 2 and found[-9].why
    assert [found[n][0] for n in (1, 2, 3)] == [2, 4, 6]


def test_what_is_refused(machines, monkeypatch):
    with refuses(UserError, "cluster=127.0.0.1:1", "ray start"), cluster.connected("127.0.0.1:1"):
        pass
    with cluster.connected(machines.address):
        monkeypatch.setattr(cluster, "NO_ROOM_SECONDS", 0.0)
        with refuses(UserError, "GPU 0", "gpus=1"):
            list(cluster.share([1], partial(Doubles, 0), cluster.Resources(gpus=1)))
        with refuses(UserError, "CPU 2", "2 machines", "cpus=2"):
            list(cluster.share([1], partial(Doubles, 0), cluster.Resources(cpus=2)))
        monkeypatch.setattr(cluster, "versions", lambda *names: dict.fromkeys(names, "0.1"))
        with refuses(UserError, "torch", "0.1", "equal versions"):
            list(cluster.share([1], partial(Doubles, 0), cluster.Resources()))


def test_nothing_of_the_environment_is_sent(machines, monkeypatch):
    monkeypatch.setenv("AG_API_KEY", "secret")
    with cluster.connected(machines.address):
        found = cluster.share(["AG_API_KEY"], lambda: os.environ.get, cluster.Resources())
        assert list(found) == [("AG_API_KEY", None)]


@pytest.mark.nightly
def test_a_machine_that_is_killed_loses_nothing(machines):
    """Its unit is done elsewhere, once; a machine that joins takes part."""
    third = machines.add_node(**MACHINE)
    found = []
    with cluster.connected(machines.address):
        for unit, result in cluster.share(range(60), partial(Doubles, 0.1), cluster.Resources()):
            found.append((unit, result[0]))
            if len(found) == 10:
                machines.remove_node(third, allow_graceful=False)
    assert sorted(found) == [(n, 2 * n) for n in range(60)]
