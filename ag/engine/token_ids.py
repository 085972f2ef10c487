"""The ids of the text that a cache has read, as far as ``model.generate`` gives them."""

from __future__ import annotations

from torch import Tensor

from ag.errors import UserError

HOW_TO_CONTINUE = "to continue, give the whole text so far and what follows; for another text call cache.reset() first"


class TokenIds:
    """Remembers token ids, to refuse a text that begins differently from the text that was read."""

    def __init__(self) -> None:
        #: Ids of the text that was read, ``[B, T]``; None means that they are not known.
        self.ids: Tensor | None = None
        #: Ids of the coming text, ``[B, T]``; None means that none was announced, or that its ids are not known.
        self.announced: Tensor | None = None
        #: Whether a search has put the sequences into the order of its beams.
        self.reordered = False
        #: Whether ``model.generate`` ended by an error: its tokens were read, and are not known.
        self.broken_off = False

    def announce(self, tokens: Tensor | None, num_seen: int) -> None:
        """Note the coming text ``[B, T]``, of which the first ``num_seen`` columns were read; None: it is unknown.

        A text that does not begin with the text that was read is refused. So is any text after beams, as it is not
        known which of its rows belongs to which sequence, and any text while tokens of a broken-off answer are held.
        """
        if num_seen and self.reordered:
            raise UserError(
                "The sequences of this cache are in the order of beams, and the rows of a text may be in another: call "
                "cache.reset() and give the whole text."
            )
        if self.broken_off and self.ids is not None and num_seen > self.ids.shape[1]:
            raise UserError(
                f"model.generate was broken off by an error: of the {num_seen} tokens that this cache has seen, only "
                f"the first {self.ids.shape[1]} are known: call cache.rewind(input_ids), which goes back to them, or "
                "cache.reset()."
            )
        if tokens is not None and num_seen and self.ids is not None and len(self.ids) == len(tokens):
            old_ids = self.ids[:, :num_seen].to(tokens.device)
            differs = (old_ids != tokens[:, : old_ids.shape[1]]).any(0)
            if bool(differs.any()):
                raise UserError(
                    "The tokens that model.generate was given differ from those that this cache has seen, from column "
                    f"{int(differs.long().argmax())} on: {HOW_TO_CONTINUE}."
                )
        self.announced = tokens

    def begin(self) -> None:
        """Take the announced text for the text that is read, when its first forward pass begins."""
        self.ids, self.announced, self.reordered, self.broken_off = self.announced, None, False, False

    def end(self, tokens: Tensor | None, batch: int, broken_off: bool) -> None:
        """Note the text ``[B, T]`` after generation, and forget the announced text."""
        self.announced, self.broken_off = None, broken_off
        if tokens is not None and self.ids is not None and len(tokens) == batch and not self.reordered:
            self.ids = tokens  # sampled answers are in the order of the sequences, beams are not

    def forget(self) -> None:
        """Forget the ids of a text that stays in the cache."""
        self.ids = self.announced = None

    def cut(self, columns: int) -> None:
        """Keep the ids of the first ``columns`` alone, as later ids are not known any more."""
        if self.ids is not None:
            self.broken_off &= columns > self.ids.shape[1]
            self.ids = self.ids[:, :columns]

    def common(self, tokens: Tensor, num_seen: int) -> int:
        """Return the number of first columns, fewer than all, that ``tokens`` ``[B, T]`` shares with the text read."""
        if self.ids is None or len(self.ids) != len(tokens):
            return 0
        max_common = min(num_seen, self.ids.shape[1], tokens.shape[1] - 1)
        if max_common < 1:
            return 0
        differs = (self.ids[:, :max_common].to(tokens.device) != tokens[:, :max_common]).any(0)
        return int(differs.long().argmax()) if bool(differs.any()) else max_common

    def select(self, indices: Tensor, batch: int) -> None:
        """Make the sequences those at ``indices`` of ``batch``; the ids of fewer texts than sequences are forgotten."""
        if self.ids is not None:
            self.ids = self.ids[indices.to(self.ids.device)] if len(self.ids) == batch else None
