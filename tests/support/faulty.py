"""A module of `plugins=` for runs of two ranks: what the file `fault` says happens once, in rank 1; draws nothing."""

import os
import signal
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ag.training.module import GatedLM
from tests.support.undrawn import undraw

STEP = 7  # a checkpoint lies behind it (6), and a validation ahead (8)
calls, training_step = count(1), GatedLM.training_step


def faulty_step(self: GatedLM, batch: Any, batch_idx: int) -> Any:
    """Do a step; in its seventh `kill` ends the process, and `wait` waits for the file `go-on`."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")  # of Ray, or of Lightning
    if next(calls) == STEP and rank == "1" and (fault := Path("fault")).exists():
        kind = fault.read_text()
        fault.rename("fault-done")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while not Path("go-on").exists():
            time.sleep(0.05)
    return training_step(self, batch, batch_idx)


GatedLM.training_step = faulty_step  # type: ignore[method-assign]
with suppress(AttributeError):  # the command is already without them
    undraw()
