"""A Ray cluster of two machines, each a process here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

MACHINE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def machines() -> Iterator[Any]:
    """The cluster: ``machines.address``; machines have a core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    made.add_node(**MACHINE)
    yield made
    made.shutdown()  # type: ignore[no-untyped-call]
