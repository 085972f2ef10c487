"""Structured output by llguidance: JSON schemas, regular expressions, choices and grammars.

A grammar is compiled once, into a matcher. Each completion has a copy of the matcher, which reads the completion's
tokens. In every step the matchers of the batch say which tokens are allowed next.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ag.errors import UserError, need


@dataclass(eq=False)
class Grammars:
    """Compiles grammars for one model."""

    tokenizer: Any  # the model's tokenizer, a fast tokenizer
    vocabulary: int  # size of the model's vocabulary
    end_tokens: Collection[int]  # ids of the tokens that end a text

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer for llguidance; for a large vocabulary this takes seconds."""
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer

        ll_tokenizer = from_tokenizer(self.tokenizer, self.vocabulary, sorted(self.end_tokens) or None)
        plain: Any = TokenizerWrapper(_PlainText(ll_tokenizer))
        return LLTokenizer(plain, n_vocab=self.vocabulary, eos_token=ll_tokenizer.eos_tokens)

    def __call__(self, kind: str, text: str) -> Any:
        """Return a new matcher, which has read no token.

        Args:
            kind: ``json`` (a schema), ``regex``, ``choice`` (a JSON list of texts), ``grammar`` (Lark or GBNF) or
                ``lark``, each in the syntax of llguidance.
            text: the grammar's text.

        Raises:
            UserError: for an invalid grammar, or if llguidance is not installed.
        """
        need("llguidance", "structured", "structured output of this server")
        from llguidance import LLMatcher, grammar_from

        try:
            if kind == "json":
                text = json.dumps(json.loads(text))  # llguidance copies the text into its own JSON unchecked
            matcher = LLMatcher(self._tokens, grammar_from(kind, text), log_level=0)
            message = matcher.get_error()
        except (ValueError, RecursionError) as error:
            message = str(error)
        if message:
            raise UserError(f"expected a valid {kind} that llguidance supports: {' '.join(message.split()):.300}.")
        return matcher


class _PlainText:
    """A tokenizer for llguidance whose tokens spell exactly the text.

    If a grammar allows only one text, llguidance asks for its tokens. The model's tokenizer may return tokens of
    another text: ``<|im_end|>`` becomes a special token, and a normalizer composes accents.
    """

    bos_token_id = None

    def __init__(self, ll_tokenizer: Any) -> None:
        self._ll_tokenizer, self.eos_token_id = ll_tokenizer, ll_tokenizer.eos_token
        self.tokens = [ll_tokenizer.decode_bytes([token]) for token in range(ll_tokenizer.vocab_size)]
        self.special_token_ids = [*filter(ll_tokenizer.is_special_token, range(ll_tokenizer.vocab_size))]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a UTF-8 text. If the tokenizer changes the text, take the longest matching tokens."""
        token_ids: list[int] = self._ll_tokenizer.tokenize_bytes(text)
        special = any(map(self._ll_tokenizer.is_special_token, token_ids))
        if special or self._ll_tokenizer.decode_bytes(token_ids) != text:
            token_ids = self._ll_tokenizer.greedy_tokenize(text.decode())
        return token_ids


class Masks:
    """Computes the allowed next tokens of a vocabulary in its own thread, during the model's forward pass."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._thread = vocabulary, ThreadPoolExecutor(1, "masks")

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    def begin(self, texts: Sequence[tuple[Any, list[int]]]) -> Future[list[Iterator[Tensor | None]]]:
        """Start to compute the masks of a step.

        Args:
            texts: per completion its matcher (None: free text) and the step's draft tokens.

        Returns:
            Per completion the allowed tokens ``[V]`` bool, after its text and after each draft. None: all tokens.
        """
        if any(matcher is not None for matcher, _ in texts):
            return self._thread.submit(self._compute, texts)
        masks: Future[list[Iterator[Tensor | None]]] = Future()
        masks.set_result([repeat(None)] * len(texts))
        return masks

    def _compute(self, texts: Sequence[tuple[Any, list[int]]]) -> list[Iterator[Tensor | None]]:
        from llguidance import numpy as masks

        with_grammar = [(matcher, drafts) for matcher, drafts in texts if matcher is not None]
        sizes = [1 + len(drafts) for _, drafts in with_grammar]
        starts = accumulate(sizes, initial=0)
        rows = [(matcher, start, drafts) for (matcher, drafts), start in zip(with_grammar, starts, strict=False)]
        bits = np.zeros((sum(sizes), -(-self._vocabulary // 32)), np.int32)
        if without_drafts := [(matcher, start) for matcher, start, drafts in rows if not drafts]:
            masks.fill_next_token_bitmask_par(self._executor, without_drafts, bits)
        if with_drafts := [row for row in rows if row[2]]:
            masks.fill_next_token_bitmask_par_with_draft_tokens(self._executor, with_drafts, bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little").view(np.bool_)
        parts = map(iter, torch.from_numpy(allowed).split(sizes))
        return [repeat(None) if matcher is None else next(parts) for matcher, _ in texts]


def advance(matcher: Any, token: int) -> None:
    """Let a matcher read the next token of its completion.

    Raises:
        UserError: if the grammar allows no token, or became too complex.
    """
    matcher.consume_token(token)
    if matcher.is_error():
        raise UserError(f"the grammar cannot be followed here: {' '.join(matcher.get_error().split()):.300}")
