"""``python -m ag.serve``, as a script, with a cluster whose workers start in the warm Python."""

from __future__ import annotations

import os
from pathlib import Path

if __name__ == "__main__":
    from ray._private import ray_constants

    from ag.commands.serve import main
    from ag.serve import cluster

    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).resolve().with_name("ray_worker.py"))
    if seconds := os.environ.get("AG_DRAIN_SECONDS"):
        cluster.DRAIN_SECONDS = float(seconds)  # type: ignore[attr-defined]
    raise SystemExit(main())
