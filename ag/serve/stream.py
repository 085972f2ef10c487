"""The stream of a completion: its tokens, and its text, released as it becomes final."""

from __future__ import annotations

import codecs
import queue
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ag.errors import UserError
from ag.serve.request import Reason, Request, Token
from ag.serve.snapshot import Memory

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

    def text(self, token: int, skip_special_tokens: bool = False) -> str:
        """Return the text of a token; part of a character is U+FFFD."""
        decode = partial(self._backend.decode, skip_special_tokens=skip_special_tokens)
        context, text = (str(decode(ids)) for ids in (self._context_ids, [*self._context_ids, token]))
        return text[len(context) :] if text.startswith(context) else str(decode([token]))

    def bytes_of(self, token: int, at_start: bool = False) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character. Special tokens have no bytes.

        Args:
            token: id of the token.
            at_start: True at the beginning of a text, where many tokenizers drop a space.
        """
        token_text = self._backend.id_to_token(token) or ""
        if self._falls_back and (byte := _BYTE.fullmatch(token_text)):
            return bytes.fromhex(byte[1])
        text = str(self._backend.decode([token])) if at_start else self.text(token, skip_special_tokens=True)
        if "\ufffd" in text and LETTERS.keys() >= set(token_text):
            return bytes(LETTERS[letter] for letter in token_text)
        return text.encode()


class Detokenizer:
    """Turns the tokens of a request's completion into text, one token at a time.

    A character is released once it is complete. Bytes that cannot become a character are released as U+FFFD. Text that
    may begin a stop text is pending until it cannot. A stop text that is a special token matches that token's id, and
    the same characters in the text.
    """

    def __init__(self, vocabulary: Vocabulary, request: Request) -> None:
        self._vocabulary, self._request, special = vocabulary, request, vocabulary.special
        self._special = {token: text.encode() for text, token in special.items()} if request.with_special_tokens else {}
        self._stop_tokens = {special[text]: text for text in request.stop if text in special}
        self._min_tokens_left, self._at_start = request.min_tokens, not request.prompt_text_goes_on
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # text that is not released yet
        self.length = 0  # characters so far, pending characters included
        self.num_released = 0  # characters released so far
        self.stopped = False  # True once a stop text has occurred

    def add(self, token: int) -> str:
        """Add the next token and return the text that became final."""
        self._min_tokens_left -= 1
        if token in self._stop_tokens and self._min_tokens_left < 0:
            self._pend(b"", last=True)
            self._pending += (
                self._stop_tokens[token] if self._request.include_stop_str_in_output and not self.stopped else ""
            )
            self.stopped = True
            return self.flush()
        token_bytes = self._vocabulary.bytes_of(token)
        if token_bytes and self._at_start:
            token_bytes, self._at_start = self._vocabulary.bytes_of(token, at_start=True), False
        self._pend(self._special.get(token, token_bytes))
        if self.stopped:
            return self.flush()
        pending, stops = self._pending, self._request.stop
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
        stop = self._request.stop if self._min_tokens_left < 0 else ()
        if stops := [(start, text) for text in stop if (start := self._pending.find(text)) >= 0]:
            start, text = min(stops)
            self.stopped = True
            self._pending = self._pending[: start + len(text) * self._request.include_stop_str_in_output]

    def _release(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self.num_released += length
        return text


#: Events of a stream: tokens, then an error, or None at a normal end.
Event = Token | Exception | None


@dataclass(eq=False)
class Stream:
    """One completion while it is generated. Iteration waits for tokens. Any thread may read or cancel it."""

    detokenizer: Detokenizer  # after the end its ``flush()`` returns the pending text
    #: Is called with each event in the scheduler's thread, must not block, and iteration yields nothing. None: events
    #: are queued for iteration.
    on_event: Callable[[Event], None] | None = None
    reason: Reason | None = None  # why the completion ended; None: it goes on
    cancelled: bool = False  # whether :meth:`cancel` was called
    # set before the first event
    prompt: tuple[Token, ...] = ()  # prompt tokens with log-probabilities, if requested
    num_cached_tokens: int = 0  # prompt tokens from a cached prefix
    kept_share: float | None = None  # of the prompt's entries after prefill, if requested
    memory: Memory = Memory()  # what the cache holds of the prompt and the completion; set after each step too

    def __post_init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.put = self.on_event or self._events.put

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens.

        Raises:
            Exception: the error that ended the completion.
        """
        while (event := self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        """End the completion before the next step, which frees its blocks."""
        self.cancelled = True
