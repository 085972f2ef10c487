"""Objects whose saved state is a set of attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Attributes:
    """An object whose saved state is the attributes in ``STATE``."""

    #: Types of the attributes, by name.
    STATE: ClassVar[Mapping[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes.

        Raises:
            KeyError: an attribute is missing or unknown.
            TypeError: an attribute has another type.
        """
        if state.keys() != self.STATE.keys():
            raise KeyError(*(state.keys() ^ self.STATE.keys()))
        for name, kind in self.STATE.items():
            if not isinstance(state[name], kind):
                raise TypeError(name)
        for name, value in state.items():
            setattr(self, name, value)
