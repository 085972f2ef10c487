"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, by llguidance.

A grammar is compiled once, to a matcher. Each answer has a copy of the matcher, which reads the answer's tokens. For
every step the matchers of the batch say which tokens may come next.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ag.errors import UserError


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: of the model, a fast one.
        vocabulary: size of the model's vocabulary.
        ends: ids of the tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends

    @cached_property
    def _tokens(self) -> Any:
        """The tokens as llguidance has them; it takes seconds to make them of a large vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer

        made = from_tokenizer(self._tokenizer, self._vocabulary, sorted(self._ends) or None)
        plain: Any = TokenizerWrapper(_PlainText(made))
        return LLTokenizer(plain, n_vocab=self._vocabulary, eos_token=made.eos_tokens)

    def __call__(self, kind: str, text: str) -> Any:
        """Return a matcher that has read nothing.

        Args:
            kind: ``json`` (a schema), ``regex``, ``choice`` (a JSON list of texts), ``grammar`` (Lark or GBNF) or
                ``lark``, each in the syntax of llguidance.
            text: of the grammar.

        Raises:
            UserError: for a text that is no such grammar, or when llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher, grammar_from
        except ModuleNotFoundError as error:
            raise UserError("this server lacks llguidance: pip install 'ag[structured]'.") from error
        try:
            if kind == "json":
                text = json.dumps(json.loads(text))  # llguidance puts it into its own JSON unread
            matcher = LLMatcher(self._tokens, grammar_from(kind, text), log_level=0)
            wrong = matcher.get_error()
        except (ValueError, RecursionError) as error:
            wrong = str(error)
        if wrong:
            raise UserError(f"expected a valid {kind} that llguidance supports: {' '.join(wrong.split()):.300}.")
        return matcher


class _PlainText:
    """A tokenizer of llguidance whose tokens spell each text letter by letter.

    Where a grammar allows one text alone, llguidance asks for the tokens of that text. Those of the model's tokenizer
    may spell another text: ``<|im_end|>`` becomes a special token, and a normalizer composes accents.

    Args:
        made: the tokenizer of llguidance.
    """

    bos_token_id = None

    def __init__(self, made: Any) -> None:
        self._made, self.eos_token_id = made, made.eos_token
        self.tokens = [made.decode_bytes([token]) for token in range(made.vocab_size)]
        self.special_token_ids = [token for token in range(made.vocab_size) if made.is_special_token(token)]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text in UTF-8: those of the tokenizer, or the longest ones where those differ."""
        found: list[int] = self._made.tokenize_bytes(text)
        special = any(map(self._made.is_special_token, found))
        if special or self._made.decode_bytes(found) != text:
            found = self._made.greedy_tokenize(text.decode())
        return found


class Masks:
    """Computes the tokens that may come next in a thread of its own, beside the model's forward pass.

    Args:
        vocabulary: size of the model's vocabulary.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._thread = vocabulary, ThreadPoolExecutor(1, "masks")

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    def begin(self, wanted: Sequence[tuple[Any, list[int]]]) -> Future[list[Iterator[Tensor | None]]]:
        """Begin to compute the masks of a step.

        Args:
            wanted: for each answer its matcher, or None for free text, and the draft tokens of the step.

        Returns:
            For each answer the allowed tokens, ``[V]`` bool, after its text and after each draft; None means all.
        """
        if any(matcher is not None for matcher, _ in wanted):
            return self._thread.submit(self._compute, wanted)
        done: Future[list[Iterator[Tensor | None]]] = Future()
        done.set_result([repeat(None)] * len(wanted))
        return done

    def _compute(self, wanted: Sequence[tuple[Any, list[int]]]) -> list[Iterator[Tensor | None]]:
        from llguidance import numpy as masks

        ruled = [(matcher, drafts) for matcher, drafts in wanted if matcher is not None]
        sizes = [1 + len(drafts) for _, drafts in ruled]
        rows = [(*each, first) for each, first in zip(ruled, accumulate(sizes, initial=0), strict=False)]
        bits = np.zeros((sum(sizes), -(-self._vocabulary // 32)), np.int32)
        if alone := [(matcher, first) for matcher, drafts, first in rows if not drafts]:
            masks.fill_next_token_bitmask_par(self._executor, alone, bits)
        if drafted := [(matcher, first, drafts) for matcher, drafts, first in rows if drafts]:
            masks.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little").view(np.bool_)
        parts = map(iter, torch.from_numpy(allowed).split(sizes))
        return [repeat(None) if matcher is None else next(parts) for matcher, _ in wanted]


def advance(matcher: Any, token: int) -> None:
    """Let a matcher read the next token of its answer.

    Raises:
        UserError: when the grammar allows no token, or became too complex.
    """
    matcher.consume_token(token)
    if matcher.is_error():
        raise UserError(f"the grammar cannot be followed here: {' '.join(matcher.get_error().split()):.300}")
