"""The text of an answer, given out as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from ag.errors import UserError

CONTEXT = 8  # tokens before an answer that decide whether its first word begins with a space


class Detokenizer:
    """Turns the tokens of an answer into text, one at a time.

    No half of a character is given out, and nothing that could be the beginning of a stop text before it is known not
    to be one.

    Args:
        tokenizer: a fast one of transformers.
        stop: texts that end the answer and are no part of it, none of them empty.
        before: ids of the text that the answer continues; none where it begins a text of its own.

    Raises:
        UserError: when the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{type(tokenizer).__name__}: expected a fast tokenizer, which decodes token by token.")
        self._backend = tokenizer.backend_tokenizer
        self._decode = DecodeStream(ids=list(before[-CONTEXT:]), skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""  # not given out yet
        #: Characters so far, with those that are held back.
        self.length = 0
        #: Characters that were given out.
        self.given = 0
        #: Whether a stop text came.
        self.stopped = False

    def add(self, token: int) -> str:
        """Take the next token; returns the text that is certain now."""
        new = self._decode.step(self._backend, token) or ""
        self.length += len(new)
        self._held += new
        found = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            return self.rest()
        certain = len(self._held) - max((_begun(self._held, text) for text in self._stop), default=0)
        return self._give(certain)

    def rest(self) -> str:
        """Return the text that was held back; the answer is over."""
        return self._give(len(self._held))

    def _give(self, characters: int) -> str:
        given, self._held = self._held[:characters], self._held[characters:]
        self.given += characters
        return given


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop text, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
