"""Supervised rows of one's own: a prompt and a response, or the messages of a chat; the loss is on what answers.

``prompt`` and ``response`` are joined as they are. ``messages`` are rendered by the tokenizer's chat template; each
turn of the assistant carries loss, as the ``{% generation %}`` marks of the template say, or else from where the
template opens the turn to where it closes it. The prompt, on which gates act, ends where the assistant's first turn
begins.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from ag.data.collate import Collator, Row, end_tokens, padding_token, start_tokens
from ag.data.encode import Encoder
from ag.data.module import Counts, DataModule
from ag.data.sources import DataError, Record, Source, check_fields, held_out, local_folder
from ag.data.templates import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

AT_ONCE = 64  # rows in a call of the tokenizer
MARKED = re.compile(r"{%-?\s*generation\s*-?%}")


def build(config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
    """Read and tokenise the rows of ``config.data.name``, a folder or a hub id.

    Without a validation split, the first ``data.val_samples`` training rows are held out. A prompt that does not fit
    loses its left part; a row whose response does not fit is left out, and both are counted. The arguments are those of
    :meth:`ag.data.kinds.DataKind.build`.

    Raises:
        DataError: missing folder, split or field, an empty response, or messages without a chat template.
    """
    data, counts = config.data, Counts()
    folder = local_folder(data.root, data.name) if data.root else Path(data.name).expanduser()
    if not folder.is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", data.name):
        raise DataError(f"data.name={data.name}: no such folder; expected one with train.jsonl, or ORG/NAME of the hub")
    source = Source(data.name, data.subset, data.revision, folder if folder.is_dir() else None)
    first = held_out(source, data)
    limit = min(data.max_length, context)

    def rows(split: str, start: int, stop: int | None, most: int | None) -> list[Row]:
        numbered = itertools.islice(enumerate(source.read(split), start=1), start, stop)
        encoded = _encode(data, tokenizer, numbered, source.where(split))
        return list(itertools.islice(_fitted(encoded, limit, start_tokens(tokenizer), counts), most))

    train = rows("train", first, None, data.train_samples)
    before = counts.skipped
    validation = rows("train" if first else "validation", 0, first or None, data.val_samples)
    counts.val_skipped = counts.skipped - before
    collator = Collator(padding_token(tokenizer))
    return DataModule(train, [(row,) for row in validation], collator, data, config.seed, counts)


def _encode(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Iterator[tuple[int, Record]], where: str
) -> Iterator[Row]:
    """Tokenise rows, each as long as it is; the first says whether all are messages."""
    first = next(rows, None)
    if first is None:
        return
    number, row = first
    rows = itertools.chain([first], rows)
    if data.messages_field in row:
        end = end_tokens(tokenizer) if data.eos else []
        for number, row in rows:
            place = f"{where} row {number}"
            check_fields(row, {data.messages_field: list}, place)
            yield _chat(tokenizer, row[data.messages_field], end, place)
        return
    names = {"prompt_field": data.prompt_field, "response_field": data.response_field}
    if lacking := [key for key, name in names.items() if name not in row]:
        keys = " and ".join(f"data.{key}=NAME" for key in lacking)
        raise DataError(
            f"{where} row {number} has the fields {', '.join(row)}: expected {' and '.join(names.values())}, or "
            f"{data.messages_field}; set {keys}, or data.messages_field=NAME"
        )
    encoder = Encoder(tokenizer, sys.maxsize, before="", end=[] if data.eos is False else end_tokens(tokenizer))
    while some := list(itertools.islice(rows, AT_ONCE)):
        for number, row in some:
            place = f"{where} row {number}"
            check_fields(row, dict.fromkeys(names.values(), str), place)
            if not row[data.response_field].strip():
                raise DataError(f"{place} has an empty {data.response_field}: leave the row out, or write a response")
        examples = [Example(row[data.prompt_field], [row[data.response_field]], 0) for _, row in some]
        yield from itertools.chain.from_iterable(encoder.encode(examples, where, every_choice=False))


def _fitted(rows: Iterator[Row], limit: int, start: list[int], counts: Counts) -> Iterator[Row]:
    """Cut prompts behind their start to rows of ``limit`` tokens; one token of each prompt stays at least."""
    for row in rows:
        prompt, lost = row.prompt_length or 0, max(0, len(row.tokens) - limit)
        first = len(start) if row.tokens[: len(start)].tolist() == start else 0
        if prompt - first <= lost:
            counts.skipped += 1
            continue
        if lost:
            counts.truncated += 1
            counts.truncated_tokens += lost
            cut = np.s_[first : first + lost]
            loss = None if row.loss is None else np.delete(row.loss, cut)
            row = Row(np.delete(row.tokens, cut), prompt - lost, loss=loss)
        yield row


def _chat(tokenizer: PreTrainedTokenizerBase, messages: list[Any], end: list[int], place: str) -> Row:
    """Tokenise a chat, with the turns of the assistant marked."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place} has messages, and the tokenizer {tokenizer.name_or_path} has no chat template: use a model with "
            "one, such as its instruct version, or rows with a prompt and a response"
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{place} has a message that is no object with role and content: {message!r:.80}")
        if message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls")):
            raise DataError(f"{place} has an empty turn of the assistant: leave the row out, or write a response")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{place} has no message with role=assistant: nothing would carry loss; leave the row out")
    try:
        if MARKED.search(str(tokenizer.get_chat_template())):
            out: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, loss = out["input_ids"], np.array(out["assistant_masks"], dtype=np.bool_)
        else:
            ids, loss = _by_prefixes(tokenizer, messages, place)
    except DataError:
        raise
    except (TemplateError, TypeError, ValueError, NotImplementedError) as error:  # a template may do anything
        raise DataError(f"{place} does not go through the tokenizer's chat template: {error}") from error
    if not loss.any():
        raise DataError(
            f"{place}: the chat template marks no token of the assistant's turns; check its generation marks"
        )
    tokens = np.array([*ids, *end], dtype=np.int32)
    return Row(tokens, int(loss.argmax()), loss=np.append(loss, np.ones(len(end), dtype=np.bool_)))


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[Any], place: str) -> tuple[list[int], Any]:
    """Find the assistant's turns by rendering the chat up to each of them, with and without it."""

    def render(count: int, opened: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=opened))

    whole = render(len(messages))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array(encoded["offset_mapping"])[:, 0]
    loss = np.zeros(len(starts), dtype=np.bool_)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        closed, opened = render(turn + 1), render(turn, True) if turn else ""
        if not whole.startswith(closed):
            raise DataError(
                f"{place}: the chat template writes turn {turn + 1} in another way when others follow, so that its "
                "tokens cannot be found: use a template with {% generation %} marks"
            )
        # a template may open a turn with more than it writes there in the end, such as empty thoughts
        loss |= (starts >= len(os.path.commonprefix([opened, closed]))) & (starts < len(closed))
    return encoded["input_ids"], loss
