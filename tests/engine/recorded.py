"""What a decoding step does, operation by operation, as a CUDA graph would record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "ag.engine.store": ["pool_append", "pool_expired"],
    "ag.engine.allocators.base": ["row_worst"],
}


class Recorded(TorchDispatchMode):
    """Records operations: name, shapes, and the memory of operands that were there before.

    Attributes:
        operations: of each its name and operands; an operand is its shape and, where the recording has not made its
            memory, the address of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[Any]]] = []
        self._made: dict[int, Any] = {}  # storages, kept so that no later one gets their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.note(name, args, kwargs)
        out = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.keep(out, given)
        return out

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
def kernels_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Recorded]]:
    """Let kernels count as one operation each; yields what makes a recording."""
    current: list[Recorded] = []

    def seen(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not current:
                return kernel(*args, **kwargs)
            current[-1].note(name, args, kwargs)
            with _disable_current_modes():
                out = kernel(*args, **kwargs)
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            current[-1].keep(out, given)
            return out

        return call

    with monkeypatch.context() as patch:
        for module, names in KERNELS.items():
            for name in names:
                place = f"{module}.{name}"
                patch.setattr(place, seen(name, pytest.importorskip(module).__dict__[name]))

        def recording() -> Recorded:
            current.append(Recorded())
            return current[-1]

        yield recording
