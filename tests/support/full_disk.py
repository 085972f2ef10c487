"""A full disk, which the system simulates for the files of this process."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file grow beyond ``room`` bytes: writing further is an ``OSError``, "File too large"."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the signal would end the process
    limit, highest = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, highest))
        signal.signal(signal.SIGXFSZ, handler)
