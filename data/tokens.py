"""Tokens of texts, and the special tokens around them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ag.data.sources import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Put before a text that continues another one; the first character that does not merge with the text is used.
LEADING_CHARACTERS = "\n" + string.punctuation
DAY = "26 Jul 2024"  # in prompts whose chat template prints one


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token, or of EOS for a tokenizer without one.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(
        f"the tokenizer {tokenizer.name_or_path} has neither a padding nor an end-of-sequence token: "
        "set tokenizer.pad_token"
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at the end of a response, ``[EOS]``.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path} has no end-of-sequence token: set tokenizer.eos_token")
    return [int(tokenizer.eos_token_id)]


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text: ``[BOS]`` for Llama-2, none for SmolLM2."""
    first: list[int] = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Return messages in the tokenizer's chat template, up to the beginning of an answer.

    Templates such as Llama 3.2's print the day. Here it is always :data:`DAY`, Llama's own where there is no clock:
    samples are the same tomorrow.
    """
    # a macro of this name comes before the function that transformers gives to templates; the line break after it is
    # dropped, and the template begins a line as it would alone
    template = f"{{% macro strftime_now(form) %}}{DAY}{{% endmacro %}}\n{tokenizer.get_chat_template()}"
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
    return str(tokenizer.apply_chat_template(messages, **options))


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts in one call, without special tokens."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the start tokens and the tokens of a text."""
    return start_tokens(tokenizer) + tokenize(tokenizer, [text])[0]


def tokenize_after(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts that continue others, without special tokens.

    SentencePiece and others put a space before a text. Such a tokenizer gets a leading character and the text, and the
    character's tokens are cut off.
    """
    token_ids, remaining = tokenize(tokenizer, texts), list(range(len(texts)))
    [word] = tokenize(tokenizer, ["a"])
    if tokenizer.decode(word + word) == 2 * str(tokenizer.decode(word)):
        return token_ids
    for lead in LEADING_CHARACTERS:
        if not remaining:
            break
        lead_ids, word, *prefixed_ids = tokenize(tokenizer, [lead, f"{lead}a", *(lead + texts[i] for i in remaining)])
        if word[: len(lead_ids)] == lead_ids and str(tokenizer.decode(word)).endswith(f"{lead}a"):
            pairs = zip(remaining, prefixed_ids, strict=True)
            separated = {i: ids[len(lead_ids) :] for i, ids in pairs if ids[: len(lead_ids)] == lead_ids}
            token_ids = [separated.get(i, ids) for i, ids in enumerate(token_ids)]
            remaining = [i for i in remaining if i not in separated]
    return token_ids
