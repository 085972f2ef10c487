"""In which types and under which modes of PyTorch a text is read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ag.errors import UserError


class Kind(NamedTuple):
    """The types of weights and of autocast in which a pass computes, and whether that is under inference mode."""

    weights: torch.dtype
    autocast: torch.dtype | None  # None means that autocast is off
    inference: bool

    def behind(self, held: Kind) -> Kind:
        """Return of which kind what is held is after a pass of this kind.

        Raises:
            UserError: when tokens of the pass cannot lie beside those that are held.
        """
        if self[:2] != held[:2]:
            said = [f"{one.weights}, autocast {one.autocast or 'off'}" for one in (held, self)]
            raise UserError(
                f"EvictionCache: what is held was computed in {said[0]}, and the model now computes in {said[1]}: go "
                "on as before, or call cache.reset() and read the text again."
            )
        if held.inference and not self.inference:
            raise UserError(
                "EvictionCache: a context was read under torch.inference_mode(), whose tensors cannot be changed "
                "outside of it: go on under torch.inference_mode(), or read it under torch.no_grad()."
            )
        return self
