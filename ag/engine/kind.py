"""What a pass has to be like to go on from what a cache holds."""

from __future__ import annotations

import torch
from torch import nn

from ag.engine.policy import Policy
from ag.engine.sequences import SequenceState
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.hooks import device_of


def check_scope(policy: Policy, gates: AttentionGates | None, sequences: SequenceState, length: int) -> None:
    """Refuse so many tokens of a longer prompt for gates that read it whole."""
    announced = 0 if sequences.columns else sequences.announced
    if gates is not None and gates.config.scope == "prompt" and length < announced:
        raise UserError(
            f"{policy!r}: gates of gate.scope=prompt read the prompt in one forward pass, and {length} of "
            f"{announced} tokens came; leave prefill_chunk_size out, or use gates of gate.scope=causal."
        )


class Kind:
    """The types of weights and of autocast in which a text is read, and whether that is under inference mode."""

    def __init__(self) -> None:
        self._types: tuple[torch.dtype, torch.dtype | None] | None = None
        self._inference = False

    def check(self, decoder: nn.Module, fresh: bool) -> None:
        """Refuse tokens that cannot lie beside those that are held; a ``fresh`` text holds none."""
        device = device_of(decoder).type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        types = next(decoder.parameters()).dtype, autocast
        if fresh or self._types is None:  # what was loaded is of the model's type
            self._types, self._inference = types, False
        if self._types != types:
            said = [f"{weights}, autocast {auto or 'off'}" for weights, auto in (self._types, types)]
            raise UserError(
                f"EvictionCache: what is held was computed in {said[0]}, and the model now computes in {said[1]}: go "
                "on as before, or call cache.reset() and read the text again."
            )
        if self._inference and not torch.is_inference_mode_enabled():
            raise UserError(
                "EvictionCache: a context was read under torch.inference_mode(), whose tensors cannot be changed "
                "outside of it: go on under torch.inference_mode(), or read it under torch.no_grad()."
            )
        self._inference |= torch.is_inference_mode_enabled()
