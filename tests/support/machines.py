"""A Ray cluster of two machines, each a process here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import ray_worker
from tests.support.warm import started

MACHINE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def warm_workers() -> None:
    """Clusters that this process makes start their workers in the warm Python."""
    from ray._private import ray_constants

    os.environ[ray_worker.PYTHON] = started()
    ray_constants.SETUP_WORKER_FILENAME = ray_worker.__file__


@pytest.fixture(scope="session")
def machines(warm_workers: None) -> Iterator[Any]:
    """The cluster: ``machines.address``; machines have a core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    made.add_node(**MACHINE)
    yield made
    made.shutdown()  # type: ignore[no-untyped-call]
