"""Supervised rows of your own, in the forms of other libraries; the loss is on the answers.

The names of the columns tell the form, in this order:

- ``messages``, or ``conversations`` (ShareGPT): a chat, whose turns of the assistant carry loss
  (:func:`ag.model.chat.assistant_tokens`);
- ``prompt`` with ``response`` or ``completion``: two texts, which are joined unchanged, or two lists of messages, where
  the assistant's turns of the second carry loss;
- ``text``: a document, which is cut as ``data.kind=text`` cuts it (:mod:`ag.data.text`).

The prompt, on which gates act, ends where the loss begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ag.data.collate import Collator, Row, end_tokens, padding_token, start_tokens
from ag.data.encode import encode, fitted, left_of_prompts
from ag.data.module import Counts, DataModule, SplitCounts
from ag.data.sources import TOO_DEEP, DataError, Record, called, check_fields, dataset_of, held_out
from ag.data.templates import Example
from ag.data.text import Text
from ag.errors import UserError
from ag.model.chat import Chat, Message, assistant_tokens, for_template, is_marked, variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ag.config import Config, DataConfig

AT_ONCE = 64  # rows in a call of the tokenizer
#: Other names of columns, which count unless a key names one.
ALSO = {"messages_field": "conversations", "response_field": "completion"}
#: Roles of ShareGPT by the names of chat templates; other roles stay.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}


@dataclass(frozen=True)
class Form:
    """The form of rows, by the names of their columns."""

    columns: list[str]  # the last one holds what carries loss
    chat: bool = False  # messages, not texts

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the form and the place of the loss in words."""
        *prompt, answer = self.columns
        if not self.chat:
            return f"{' and '.join(self.columns)}, joined as they are; loss on {answer}"
        how = "as the template marks them" if is_marked(tokenizer) else "found by rendering, as none is marked"
        where = f" of {answer}" if prompt else ""
        return f"messages in {' and '.join(self.columns)}; loss on the assistant's turns{where}, {how}"


def build(config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> DataModule:
    """Read and tokenise the rows of ``config.data.name``, a folder or a hub id.

    Without a validation split, the first ``data.val_samples`` training rows are held out. A prompt that does not fit
    loses its left part; a row whose response does not fit is left out, and both are counted. The arguments are those of
    :meth:`ag.data.module.DataKind.build`.

    Raises:
        DataError: missing folder, split or field, an empty response, or messages without a chat template.
    """
    data, counts = config.data, Counts()
    source = dataset_of(data)
    form = recognise(next(source.read("train"), None), data, source.where("train"))
    if form.columns == [data.text_field]:
        module = Text().build(config, tokenizer, context)
        module.about = (
            f"{called(data)}: {data.text_field}, documents that are cut into a prompt and its continuation, which "
            "carries the loss (data.kind=text data.packing=packed: loss on all tokens)"
        )
        return module
    if form.chat and tokenizer.chat_template is None:
        raise DataError(
            f"{source.where('train')} has messages, and the tokenizer {tokenizer.name_or_path} has no chat template: "
            "use a model with one, such as its instruct version, or rows with a prompt and a response"
        )
    first = counts.held_out = held_out(source, data)
    limit, begin = min(data.max_length, context), start_tokens(tokenizer)
    longer, counts.cut_remedy = left_of_prompts(data, context)
    counts.remedy = f"without a prompt, or with no room for one beside the response; {longer}"

    def rows(split: str, start: int, stop: int | None, most: int | None, counts: SplitCounts) -> list[Row]:
        numbered = itertools.islice(enumerate(source.read(split), start=1), start, stop)
        encoded = (_chats if form.chat else _pairs)(form, data, tokenizer, numbered, source.where(split))
        fits = (fit for row in encoded if (fit := fitted(row, limit, begin, counts)) is not None)
        return list(itertools.islice(fits, most))

    train = rows("train", first, None, data.train_samples, counts.train)
    held = "train" if first else "validation"
    validation = rows(held, 0, first or None, data.val_samples, counts.validation)
    collator = Collator(padding_token(tokenizer))
    module = DataModule(train, [(row,) for row in validation], collator, data, config.seed, counts)
    module.about = f"{called(data)}: {form.describe(tokenizer)}"
    return module


def recognise(row: Record | None, data: DataConfig, where: str) -> Form:
    """Return the form of all rows by the first; columns that a key of ``data`` names come before others.

    Raises:
        DataError: there is no row, or none of the columns is known.
    """
    if row is None:
        raise DataError(f"{where} has no rows: expected at least one to train on")
    keys = ("messages_field", "prompt_field", "response_field", "text_field")
    names = {key: [getattr(data, key)] for key in keys}
    chosen = {names[key][0] for key in keys if getattr(data, key) != getattr(type(data), key)}
    for key, other in ALSO.items():
        if not chosen & set(names[key]):
            names[key].append(other)
    [prompt], [text] = names["prompt_field"], names["text_field"]
    forms = [
        *(Form([name], chat=True) for name in names["messages_field"]),
        *(Form([prompt, name], chat=isinstance(row.get(name), list)) for name in names["response_field"]),
        Form([text]),
    ]
    for form in [form for form in forms if chosen & set(form.columns)] or forms:
        if row.keys() >= set(form.columns):
            return form
    known = f"{prompt} and {' or '.join(names['response_field'])}, {' or '.join(names['messages_field'])}, or {text}"
    keys_of_columns = ", ".join(f"data.{key}=NAME" for key in keys)
    raise DataError(f"{where} has the fields {', '.join(row)}: expected {known}; name others by {keys_of_columns}")


def _pairs(
    form: Form, data: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Iterator[tuple[int, Record]], where: str
) -> Iterator[Row]:
    """Tokenise rows of two texts, of any length."""
    end, last = ([], "") if data.eos is False else (end_tokens(tokenizer), str(tokenizer.eos_token))
    prompt, answer = form.columns
    while some := list(itertools.islice(rows, AT_ONCE)):
        for number, row in some:
            place = f"{where} row {number}"
            check_fields(row, dict.fromkeys(form.columns, str), place)
            if not row[answer].strip():
                raise DataError(f"{place} has an empty {answer}: leave the row out, or write a response")
        examples = [Example(row[prompt], [row[answer].removesuffix(last)], 0) for _, row in some]
        yield from itertools.chain.from_iterable(encode(tokenizer, examples, before="", end=end))


def _chats(
    form: Form, data: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Iterator[tuple[int, Record]], where: str
) -> Iterator[Row]:
    """Tokenise rows of messages, of any length; the prompt ends where the loss begins."""
    end = end_tokens(tokenizer) if data.eos else []
    for number, row in rows:
        place = f"{where} row {number}"
        check_fields(row, dict.fromkeys(form.columns, list), place)
        system = _system(row, row[form.columns[0]], place)
        given = len(system) + len(row[form.columns[0]]) if len(form.columns) > 1 else 0
        try:
            messages = [_message(one, place) for name in form.columns for one in row[name]]
            chat = Chat(system + messages, variables(_without_filled(row)))
            taught = _taught(chat, given, place)
            ids, loss = assistant_tokens(tokenizer, chat, taught)
        except RecursionError as error:
            raise DataError(f"{place} {TOO_DEEP}") from error
        except DataError:
            raise
        except UserError as error:
            raise DataError(f"{place}: {error}") from error
        ending = end if taught[-1] == len(chat.messages) - 1 else []  # a model never ends the turn of a user
        tokens = np.array([*ids, *ending], dtype=np.int32)
        yield Row(tokens, int(loss.argmax()), loss=np.append(loss, np.ones(len(ending), dtype=np.bool_)))


def _taught(chat: Chat, given: int, place: str) -> list[int]:
    """Return the turns that carry loss: the assistant's from ``given`` on, without those of weight 0 (OpenAI)."""
    weights = [message.pop("weight", 1) for message in chat.messages]
    if wrong := [weight for weight in weights if weight not in (0, 1)]:
        raise DataError(f"{place} has a message with weight={wrong[0]!r:.80}: expected 0 (no loss on it) or 1")
    of_assistant = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
    taught = [turn for turn in of_assistant if turn >= given and weights[turn]]
    if not taught:
        raise DataError(f"{place} has no message with role=assistant that carries loss; leave the row out")
    for message in (chat.messages[turn] for turn in taught):
        content = message.get("content")
        if not (content.strip() if isinstance(content, str) else content) and not message.get("tool_calls"):
            raise DataError(f"{place} has an empty turn of the assistant: leave the row out, or write a response")
    return taught


def _message(message: Any, place: str) -> Message:
    """Return a message with the keys and roles of chat templates, without what a table filled in (None)."""
    message = _without_filled(message)
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        named = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        message = named | {key: value for key, value in message.items() if key not in ("from", "value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{place} has a message without role and content (or from and value): {message!r:.80}")
    return for_template(message)


def _without_filled(value: Any) -> Any:
    """Return a value without the keys that hold None, which tables fill in where other rows have a value."""
    if isinstance(value, dict):
        return {key: _without_filled(inner) for key, inner in value.items() if inner is not None}
    return [_without_filled(inner) for inner in value] if isinstance(value, list) else value


def _system(row: Record, messages: list[Any], place: str) -> list[Message]:
    """Return the message of the column ``system`` of ShareGPT, in a list, which is empty where the chat has it."""
    told = row.get("system")
    if not told:
        return []
    if not isinstance(told, str):
        raise DataError(f"{place}: field system is {type(told).__name__}, expected the text of a system message")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if "system" not in (first.get("role"), first.get("from")):
        return [{"role": "system", "content": told}]
    if told not in (first.get("content"), first.get("value")):
        raise DataError(f"{place} has a field system and a first message that is another system message: keep one")
    return []
