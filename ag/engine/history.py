"""What has gone by in a cache: the columns of its input, and the prompt among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ag.engine.passes import Pass, Tokens
from ag.errors import UserError


@dataclass
class History:
    """The columns of the input that a cache was shown.

    Attributes:
        valid: ``[B, seen]`` bool, False on padding.
        before: columns seen before the last forward pass.
        prompt_columns: columns of the prompt.
        prompt_lengths: ``[B]`` long, own tokens of each prompt, as far as they are known.
        unpadded: columns that came without padding: each sequence has at least so many own tokens.
        right_padded: whether some sequence ends with padding in the last forward pass.
        gaps: whether one did in any.
    """

    valid: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bool))
    before: int = 0
    prompt_columns: int = 0
    prompt_lengths: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    unpadded: int = 0
    right_padded: bool = False
    gaps: bool = False
    _expected: Tensor | None = None
    _text: Tensor | None = None  # what model.generate said of the text so far, [B, T]
    _ends: Tensor | None = None  # final hidden states [B, d] of the last own tokens, while parts of a prompt come

    @property
    def seen(self) -> int:
        """Columns of the input that went by."""
        return self.valid.shape[1]

    # ---- the text, as model.generate tells it

    def expect(self, valid: Tensor, tokens: Tensor | None) -> None:
        """Take note of the text that is to come; see :meth:`ag.engine.cache.EvictionCache.expect`."""
        if tokens is not None:
            self._check_goes_on(tokens)
            self._text = tokens
        if not self.seen:
            self._expected = valid

    def saw(self, tokens: Tensor) -> None:
        """Take note of the text ``[B, T]`` that went by."""
        if self._text is not None and len(self._text) == len(tokens) == len(self.valid):  # no beams
            self._text = tokens

    def _check_goes_on(self, tokens: Tensor) -> None:
        seen = self.seen
        again = "to continue, give the whole text so far and what follows; for another text call cache.reset() first"
        if seen and tokens.shape[1] <= seen:
            raise UserError(
                f"model.generate was given {tokens.shape[1]} tokens, and this cache has seen {seen}: {again}."
            )
        if not seen or self._text is None or len(self._text) != len(tokens):
            return
        before = self._text[:, :seen].to(tokens.device)
        differs = (before != tokens[:, : before.shape[1]]).any(0)
        if bool(differs.any()):
            raise UserError(
                f"The tokens that model.generate was given differ from those that this cache has seen, from column "
                f"{int(differs.long().argmax())} on: {again}."
            )

    # ---- a forward pass

    def prompt_to_come(self, length: int) -> int:
        """Return the columns of the prompt that a first forward pass of ``length`` tokens begins."""
        return length if self._expected is None else self._expected.shape[1]

    def real(self, mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
        """Return which new tokens are not padding, ``[B, length]`` bool.

        Args:
            mask: ``[B, seen + length]``, nonzero on real tokens; None: there is no padding.
            batch: sequences that come.
            length: new tokens of each.
            device: of the result, where there is no mask.
        """
        if self.seen and batch != len(self.valid):
            raise UserError(
                f"This cache holds {len(self.valid)} sequences, not {batch}; for another text call cache.reset() first."
            )
        if mask is None:
            return torch.ones(batch, length, dtype=torch.bool, device=device)
        if mask.ndim != 2 or mask.shape[1] != self.seen + length:
            raise UserError(
                f"attention_mask {tuple(mask.shape)}: expected {(batch, self.seen + length)}, one entry for each "
                "token seen and coming; for another text call cache.reset() first."
            )
        return mask[:, self.seen :].bool()

    def extend(self, new: Tensor, *, padded: bool) -> Tokens:
        """Add the columns of a forward pass, and return its tokens.

        Args:
            new: ``[B, T]`` bool, which of them are not padding.
            padded: whether some are.
        """
        seen = self.before = self.seen
        if not seen:
            self._begin_prompt(new)
        self.valid = torch.cat([self.valid.to(new.device), new], 1) if seen else new
        self.prompt_lengths = self.prompt_lengths.to(new.device)
        if self.seen >= self.prompt_columns > seen:
            self.prompt_lengths = self.valid[:, : self.prompt_columns].sum(1)
        self.right_padded = padded and not bool(new[:, -1].all())
        self.gaps |= self.right_padded
        self.unpadded += 0 if padded else new.shape[1]
        return Tokens(ranks=(self.valid.cumsum(1) - 1)[:, seen:], real=new)

    def _begin_prompt(self, new: Tensor) -> None:
        whole = new if self._expected is None else self._expected.to(new.device)
        self._expected = None
        if len(whole) != len(new):  # beams: each prompt comes several times
            whole = whole.repeat_interleave(len(new) // len(whole), 0)
        self.prompt_columns, self.prompt_lengths = whole.shape[1], whole.sum(1)

    def positions(self, now: Pass, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions ``[B, w]`` that the model rotates the tokens of a pass by; None: the usual ones.

        Args:
            now: the pass.
            given: ``position_ids`` ``[B or 1, T]`` of the forward pass, or None.
            columns: ``[B, w]``, those of the pass among the new tokens; None: all.
        """
        if now.positions is not None:
            return now.positions
        if self.gaps:  # transformers goes on counting from the padding
            return now.ranks.clamp_min(0)
        if columns is None:
            return given
        if given is None:
            given = torch.arange(self.before, self.seen, device=columns.device)[None]
        return given.expand(len(columns), -1).gather(1, columns.clamp_min(0))

    def ended(self, states: Tensor) -> Tensor:
        """Return final hidden states ``[B, T, d]`` with that of each sequence's own last token in the last column.

        Columns of padding have no meaning, so that nothing is lost; those on the right would otherwise be continued.
        """
        more = self.seen < self.prompt_columns  # a later part may hold nothing but padding of a sequence
        if not (more or self.right_padded):
            return states
        real = self.valid[:, self.before :].to(states.device)
        last = real.long().cumsum(1).argmax(1)
        ends = states[torch.arange(len(states), device=states.device), last]
        if self._ends is not None:
            ends = ends.where(real.any(1, keepdim=True), self._ends.to(states.device))
        self._ends = ends if more else None
        return torch.cat([states[:, :-1], ends[:, None]], 1) if self.right_padded else states

    # ---- going back, other sequences

    def crop(self, remove: int) -> None:
        """Forget the newest columns."""
        self.valid, self.unpadded = self.valid[:, :-remove], max(0, self.unpadded - remove)
        self.prompt_columns = min(self.prompt_columns, self.seen)

    def join(self, other: History) -> None:
        """Append the sequences of another one; those with fewer columns get padding on their left.

        What was read so far counts as the prompt: none of it is taken back, and positions go on with each text.
        """
        seen = max(self.seen, other.seen)
        device = self.valid.device
        both = [F.pad(x.valid.to(device), (seen - x.seen, 0)) for x in (self, other)]
        self.valid, self.before, self.prompt_columns = torch.cat(both), seen, seen
        self.prompt_lengths = torch.cat([x.prompt_lengths.to(device) for x in (self, other)])
        self.unpadded = min(self.unpadded, other.unpadded)
        self.right_padded, self.gaps, self._expected, self._text, self._ends = False, True, None, None, None

    def select_sequences(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        if self._text is not None:  # beams are more than the text has rows
            self._text = self._text[indices.to(self._text.device)] if len(self._text) == len(self.valid) else None
        self.valid, self.prompt_lengths = (x[indices.to(x.device)] for x in (self.valid, self.prompt_lengths))
