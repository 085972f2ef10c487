"""What the parts of a cache have in common: they follow its text and its sequences, and can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor


class Stateful(Protocol):
    """A part of a cache, which loops over them."""

    def reset(self) -> None:
        """Forget everything."""

    def crop(self, counts: Tensor) -> None:
        """Forget the newest tokens; ``counts`` ``[B]`` own tokens of each sequence stay."""

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``, some of them several times."""

    def join(self, other: Self) -> None:
        """Append the sequences of another one of its kind."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later passes depend on: numbers, tensors, and tuples and dicts of these."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over.

        Raises:
            KeyError: when something is missing, or not known.
            TypeError: for something of another type.
            ValueError: for values that no such part has.
        """


class Attributes:
    """A part whose state is some of its attributes."""

    #: Their types by name.
    STATE: ClassVar[Mapping[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take exactly these attributes over, each of its type."""
        if state.keys() != self.STATE.keys():
            raise KeyError(*(state.keys() ^ self.STATE.keys()))
        for name, kind in self.STATE.items():
            if not isinstance(state[name], kind):
                raise TypeError(name)
        for name, value in state.items():
            setattr(self, name, value)
