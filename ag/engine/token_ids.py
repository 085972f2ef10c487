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

    def announce(self, tokens: Tensor | None, num_seen: int) -> None:
        """Note the coming text ``[B, T]``, of which the first ``num_seen`` columns were read; None: it is unknown.

        A text that does not begin with the text that was read is refused, and any text after beams: which of its rows
        belongs to which sequence is not known.
        """
        if num_seen and self.reordered:
            raise UserError(
                "The sequences of this cache are in the order of beams, and the rows of a text may be in another: call "
                "cache.reset() and give the whole text."
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
        self.ids, self.announced, self.reordered = self.announced, None, False

    def end(self, tokens: Tensor | None, batch: int) -> None:
        """Note the text ``[B, T]`` after generation, and forget the announced text."""
        self.announced = None
        if tokens is not None and self.ids is not None and len(self.ids) == len(tokens) == batch:
            # as many answers as texts, so that each row is still its own text; not so after beams
            self.ids = tokens

    def cut(self, columns: int) -> None:
        """Keep the ids of the first ``columns`` alone, as later ids are not known any more."""
        self.ids = None if self.ids is None else self.ids[:, :columns]

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
        """Make the sequences those at ``indices`` of ``batch``; several answers are more than the text has rows."""
        if self.ids is not None:
            self.ids = self.ids[indices.to(self.ids.device)] if len(self.ids) == batch else None
