"""A decoding step recorded operation by operation and replayed in the same memory, like a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ag.kernels.native import Kernel

#: Operations that synchronise the host with a device.
WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive"}


@contextmanager
def host_reads(notice: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``notice`` for methods that copy a tensor to the host, which are no operations on a CPU."""

    def noticing(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def read(x: Tensor, *given: Any, **options: Any) -> Any:
            notice(name, x)
            return method(x, *given, **options)

        return read

    with patch.object(Tensor, "cpu", noticing("cpu")), patch.object(Tensor, "tolist", noticing("tolist")):
        yield


class Tape(TorchDispatchMode):
    """Record every operation of PyTorch and every call of a kernel in C++, with its memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.waits: list[str] = []  # operations for which the host waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITS or any(x is not None and x.dtype == torch.bool for x in indices):
            self.waits.append(name)
        self.calls.append((func, args, kwargs, out))
        return out

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the operations within the context."""
        call = Kernel.__call__
        reads = host_reads(lambda name, x: self.waits.append(name))

        def seen(kernel: Kernel, *arguments: Any) -> None:
            self.calls.append((lambda *given: call(kernel, *given), arguments, {}, None))
            call(kernel, *arguments)

        with reads, patch.object(Kernel, "__call__", seen), self:
            yield

    def replay(self) -> None:
        """Repeat all operations: each result is written to the memory of the first one."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """The recorder of :class:`ag.engine.step_runner.StepRunner`: one tape for each recording.

    Attributes:
        tapes: the recordings so far.
        replays: number of replays.
    """

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run a function and record it."""
        tape = Tape()
        with tape.running():
            out = run()
        assert not tape.waits
        self.tapes.append(tape)

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return out, replay
