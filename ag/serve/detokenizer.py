"""The text of a completion, released as it becomes final, and the texts of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ag.errors import UserError

LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}  # the alphabet of byte-level tokenizers
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # token of a byte in a tokenizer with byte fallback


class Vocabulary:
    """The texts of a tokenizer's tokens, as in the middle of a text: with the space before a word.

    Args:
        tokenizer: a fast tokenizer of transformers.

    Raises:
        UserError: when the tokenizer is not fast.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{type(tokenizer).__name__}: expected a fast tokenizer, which decodes token by token.")
        self._backend = tokenizer.backend_tokenizer
        self._context_ids: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        letter = self._backend.token_to_id("<0x41>")
        self._falls_back = letter is not None and self._backend.decode([letter]) == "A"
        added = self._backend.get_added_tokens_decoder()
        #: Ids of the special tokens, by text.
        self.special: dict[str, int] = {token.content: number for number, token in added.items() if token.special}

    def text(self, token: int) -> str:
        """Return the text of a token, special or not; part of a character is U+FFFD."""
        return self._decode(token, skip_special_tokens=False)

    def bytes_of(self, token: int, at_start: bool = False) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character. Special tokens have no bytes.

        Args:
            token: id of the token.
            at_start: True at the beginning of a text, where many tokenizers drop a space.
        """
        token_text = self._backend.id_to_token(token) or ""
        if self._falls_back and (byte := _BYTE.fullmatch(token_text)):
            return bytes.fromhex(byte[1])
        text = str(self._backend.decode([token])) if at_start else self._decode(token, skip_special_tokens=True)
        if "\ufffd" in text and LETTERS.keys() >= set(token_text):
            return bytes(LETTERS[letter] for letter in token_text)
        return text.encode()

    def _decode(self, token: int, **options: bool) -> str:
        context, text = (
            str(self._backend.decode(ids, **options)) for ids in (self._context_ids, [*self._context_ids, token])
        )
        return text[len(context) :] if text.startswith(context) else str(self._backend.decode([token], **options))


@dataclass(eq=False)
class Detokenizer:
    """Turns the tokens of a completion into text, one token at a time.

    A character is released once it is complete. Bytes that cannot become a character are released as U+FFFD. Text that
    may begin a stop text is pending until it cannot.
    """

    vocabulary: Vocabulary  # texts of the tokenizer's tokens
    #: Non-empty texts that end the completion. The text of a special token matches that token's id only.
    stop: Sequence[str] = ()
    include_stop: bool = False  # True if the completion includes the stop text that ends it
    min_tokens: int = 0  # number of tokens before which no stop text ends the completion; falls with each token
    continues: bool = False  # True if the completion continues a text: its first word may begin with a space
    keep_special: bool = False  # True if special tokens have a text, as in a prompt
    length: int = 0  # characters so far, pending characters included
    num_released: int = 0  # characters released so far
    stopped: bool = False  # True once a stop text has occurred

    def __post_init__(self) -> None:
        special = self.vocabulary.special
        self._special = {token: text.encode() for text, token in special.items()} if self.keep_special else {}
        self._stop_tokens = {special[text]: text for text in self.stop if text in special}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # text that is not released yet

    def add(self, token: int) -> str:
        """Add the next token and return the text that became final."""
        self.min_tokens -= 1
        if token in self._stop_tokens and self.min_tokens < 0:
            self._pend(b"", last=True)
            self._pending += self._stop_tokens[token] if self.include_stop and not self.stopped else ""
            self.stopped = True
            return self.flush()
        token_bytes = self.vocabulary.bytes_of(token)
        if token_bytes and not self.continues:
            token_bytes, self.continues = self.vocabulary.bytes_of(token, at_start=True), True
        self._pend(self._special.get(token, token_bytes))
        if self.stopped:
            return self.flush()
        pending, stops = self._pending, self.stop
        prefixes = (text[:length] for text in stops for length in range(min(len(text), len(pending) + 1)))
        return self._release(len(pending) - max((len(x) for x in prefixes if pending.endswith(x)), default=0))

    def flush(self) -> str:
        """Return the pending text after the last token; an incomplete character is U+FFFD."""
        if not self.stopped:
            self._pend(b"", last=True)
        return self._release(len(self._pending))

    def _pend(self, data: bytes, last: bool = False) -> None:
        """Add the characters of ``data`` to the pending text, up to a stop text; ``last`` ends the text."""
        text = self._decoder.decode(data, last)
        self.length += len(text)
        self._pending += text
        stop = self.stop if self.min_tokens < 0 else ()
        if stops := [(start, text) for text in stop if (start := self._pending.find(text)) >= 0]:
            start, text = min(stops)
            self.stopped = True
            self._pending = self._pending[: start + len(text) * self.include_stop]

    def _release(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self.num_released += length
        return text
