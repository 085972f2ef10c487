"""What a decoding step does, operation by operation, as a CUDA graph would record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

#: Operations for which the host waits until the device has come so far.
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2", "unique_consecutive"}
#: Operations that compute nothing.
FREE = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"}
FREE |= {"as_strided", "detach", "alias", "split", "unbind", "_reshape_alias", "split_with_sizes", "empty", "unfold"}
FREE |= {"empty_like", "new_empty", "empty_strided", "new_empty_strided"}
#: Where the engine calls kernels from.
KERNELS = {
    "ag.engine.attend": ["paged_decode", "paged_decode_weights"],
    "ag.engine.store": ["pool_append"],
    "ag.engine.allocators.base": ["row_worst", "row_going"],
    "torch.nn.functional": ["rms_norm"],  # one operation on a card
}


class Recorded(TorchDispatchMode):
    """Records operations: name, shapes, and the memory of operands that were there before; and does them again.

    Attributes:
        operations: of each its name and operands; an operand is its shape and, where the recording has not made its
            memory, the address of that.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[str, list[Any]]] = []
        self._made: dict[int, Any] = {}  # storages, kept so that no later one gets their address
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.do(func.overloadpacket.__name__, func, args, kwargs or {})

    def do(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record an operation, and do it."""
        self.note(name, args, kwargs)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        self.keep(out, {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)})
        self._calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Do all operations again, in the same memory, as a CUDA graph does."""
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for x, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(x, Tensor) and x.data_ptr() != new.data_ptr():
                    x.copy_(new)

    def note(self, name: str, *given: Any) -> None:
        """Record an operation."""
        self.operations.append((name, [self._operand(x) for x in tree_leaves(given)]))

    def keep(self, out: Any, given: set[int]) -> None:
        """Take note of memory that an operation made, which is none of the ``given``."""
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self._made[storage._cdata] = storage

    def _operand(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return repr(x) if isinstance(x, (int, float, bool, str, torch.dtype)) else type(x).__name__
        own = x.untyped_storage()._cdata in self._made
        return tuple(x.shape), str(x.dtype), None if own else x.data_ptr()

    @property
    def waits(self) -> list[str]:
        """The operations for which the host waits."""
        return [name for name, _ in self.operations if name in WAITS]

    @property
    def work(self) -> list[str]:
        """The operations that compute something."""
        return [name for name, _ in self.operations if name not in FREE]


@contextmanager
def kernels_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], AbstractContextManager[Recorded]]]:
    """Let kernels count as one operation each; yields what makes a recording."""
    current: list[Recorded] = []

    def seen(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not current:
                return kernel(*args, **kwargs)
            return current[-1].do(name, kernel, args, kwargs)

        return call

    with monkeypatch.context() as patch:
        for module, names in KERNELS.items():
            for name in names:
                place = f"{module}.{name}"
                patch.setattr(place, seen(name, pytest.importorskip(module).__dict__[name]))

        @contextmanager
        def recording() -> Iterator[Recorded]:
            current.append(Recorded())
            with current[-1]:
                yield current[-1]
            current.pop()

        yield recording
