"""State that is some attributes of an object, and is saved and taken over with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Attributes:
    """An object whose state is some of its attributes."""

    #: Their types by name.
    STATE: ClassVar[Mapping[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take exactly these attributes over, each of its type.

        Raises:
            KeyError: when something is missing, or not known.
            TypeError: for something of another type.
        """
        if state.keys() != self.STATE.keys():
            raise KeyError(*(state.keys() ^ self.STATE.keys()))
        for name, kind in self.STATE.items():
            if not isinstance(state[name], kind):
                raise TypeError(name)
        for name, value in state.items():
            setattr(self, name, value)
