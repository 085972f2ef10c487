"""``python -m ag.serve``, as a script, with a cluster whose workers start in the warm Python."""

from __future__ import annotations

from pathlib import Path

if __name__ == "__main__":
    from ray._private import ray_constants

    from ag.commands.serve import main

    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).resolve().with_name("ray_worker.py"))
    raise SystemExit(main())
