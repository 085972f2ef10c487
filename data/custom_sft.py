"""Supervised rows of your own, in the forms of other libraries; the loss is on the answers.

The first columns of this list that a row has decide its form:

- ``messages``, or ``conversations`` (ShareGPT): a chat; the assistant's turns carry loss
  (:func:`ag.model.chat.assistant_tokens`);
- ``prompt`` with ``response`` or ``completion``: two texts, which are joined unchanged, or two lists of messages; the
  second text, or the assistant's turns in the second list, carry loss;
- ``text``: a document, which is cut as ``data.kind=text`` cuts it (:mod:`ag.data.text`).

Gates act on the prompt, which ends where the loss begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ag.config.data import CutConfig, SftConfig, SplitConfig, StoredConfig
from ag.config.keys import as_argument
from ag.data.encode import encode, truncate_prompt, truncation_remedies
from ag.data.rows import Row
from ag.data.sources import TOO_DEEP_ERROR, DataError, Record, check_fields, dataset_name, dataset_of, num_held_out
from ag.data.splits import Counts, SplitCounts, Splits
from ag.data.templates import Example
from ag.data.text import cut_documents
from ag.data.tokens import end_tokens, start_tokens
from ag.errors import UserError
from ag.model.chat import Chat, Message, assistant_tokens, for_template, is_marked, variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_CALL = 64  # rows in a call of the tokenizer
#: Keys that only documents read, which are cut.
CUT_KEYS = ("prompt_min", "prompt_max", "continuation")
#: Other names of columns by the key that names the column; they count while the key has its default.
OTHER_NAMES = {"messages_field": "conversations", "response_field": "completion"}
#: Roles of chat templates by ShareGPT's names; other roles are left as they are.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}


@dataclass(frozen=True)
class RowForm:
    """The form of rows, by the names of their columns."""

    columns: list[str]  # the loss is on the last one
    chat: bool = False  # the columns hold messages, not texts

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Describe in words the form, and the tokens that carry loss."""
        *prompt, answer = self.columns
        if not self.chat:
            return f"{' and '.join(self.columns)}, joined as they are; loss on {answer}"
        method = "as the template marks them" if is_marked(tokenizer) else "found by rendering, as none is marked"
        part = f" of {answer}" if prompt else ""
        return f"messages in {' and '.join(self.columns)}; loss on the assistant's turns{part}, {method}"


def read(data: SftConfig, seed: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Splits:
    """Read and tokenise the rows of ``data.name``, a folder or a hub id.

    Without a validation split, the first ``data.val_samples`` training rows are held out. A prompt that does not fit
    loses its left part; a row whose response does not fit is left out. Both are counted. For the arguments see
    :meth:`ag.data.splits.DataKind.read`.

    Raises:
        DataError: missing folder, split or field, an empty response, messages without a chat template, or a key that
            rows of this form do not read.
    """
    source, counts = dataset_of(data), Counts()
    form = detect_form(next(source.read("train"), None), data, source.where("train"))
    if form.columns == [data.text_field]:
        if data.eos:
            raise DataError(
                f"data.eos=true: {source.where('train')} has documents ({data.text_field}), whose "
                "rows end anywhere in them: expected rows with a prompt and a response, or messages; leave data.eos out"
            )
        shared = {field.name for part in (StoredConfig, CutConfig) for field in fields(part)} - {"kind"}
        documents = SplitConfig(**{name: getattr(data, name) for name in shared})
        description = (
            f"{dataset_name(data)}: {data.text_field}, documents that are cut into a prompt and its continuation, "
            "which carries the loss (data.kind=text data.packing=packed: loss on all tokens)"
        )
        return replace(cut_documents(documents, seed, tokenizer, context), description=description)
    refuse_unread(
        data,
        CUT_KEYS,
        f"{source.where('train')}: rows with {' and '.join(form.columns)} are not cut and do",
        f"leave it out, or give documents ({data.text_field})",
    )
    if form.chat and tokenizer.chat_template is None:
        raise DataError(
            f"{source.where('train')} has messages, and the tokenizer {tokenizer.name_or_path} has no chat template: "
            "use a model with one, such as its instruct version, or rows with a prompt and a response"
        )
    first = counts.held_out = num_held_out(source, data)
    limit, leading_tokens = min(data.max_length, context), start_tokens(tokenizer)
    remedy, counts.cut_remedy = truncation_remedies(data, context)
    counts.remedy = f"without a prompt, or with no room for one beside the response; {remedy}"

    def rows(split: str, start: int, stop: int | None, max_rows: int | None, split_counts: SplitCounts) -> list[Row]:
        numbered = itertools.islice(enumerate(source.read(split), start=1), start, stop)
        encoded = encoded_rows(form, data, tokenizer, numbered, source.where(split))
        cut_rows = (truncate_prompt(row, limit, leading_tokens, split_counts) for row in encoded)
        return list(itertools.islice((row for row in cut_rows if row is not None), max_rows))

    train = rows("train", first, None, data.train_samples, counts.train)
    validation_split = "train" if first else "validation"
    validation = rows(validation_split, 0, first or None, data.val_samples, counts.validation)
    description = f"{dataset_name(data)}: {form.describe(tokenizer)}"
    return Splits(train, [(row,) for row in validation], counts, description=description)


def refuse_unread(data: SftConfig, names: Iterable[str], reader: str, fix: str) -> None:
    """Refuse the values of keys that are not read, unless they are the defaults.

    Args:
        data: the configuration.
        names: the keys that are not read.
        reader: what does not read them, to stand before "not read data.KEY".
        fix: what to do instead.

    Raises:
        DataError: a key has another value than its default.
    """
    for name in names:
        if (value := getattr(data, name)) != getattr(SftConfig, name):
            raise DataError(f"data.{name}={as_argument(value)} with {reader} not read data.{name}; {fix}")


def detect_form(row: Record | None, data: SftConfig, source_name: str) -> RowForm:
    """Return the form of all rows by the first row. Columns that a key of ``data`` names go first.

    Raises:
        DataError: there is no row, or the row has the columns of no form.
    """
    if row is None:
        raise DataError(f"{source_name} has no rows: expected at least one to train on")
    keys = ("messages_field", "prompt_field", "response_field", "text_field")
    names = {key: [getattr(data, key)] for key in keys}
    chosen = {names[key][0] for key in keys if getattr(data, key) != getattr(type(data), key)}
    for key, other in OTHER_NAMES.items():
        if not chosen & set(names[key]):
            names[key].append(other)
    [prompt], [text] = names["prompt_field"], names["text_field"]
    forms = [
        *(RowForm([name], chat=True) for name in names["messages_field"]),
        *(RowForm([prompt, name], chat=isinstance(row.get(name), list)) for name in names["response_field"]),
        RowForm([text]),
    ]
    for form in [form for form in forms if chosen & set(form.columns)] or forms:
        if row.keys() >= set(form.columns):
            return form
    expected = f"{prompt} and {' or '.join(names['response_field'])}, {' or '.join(names['messages_field'])}, or {text}"
    keys_of_columns = ", ".join(f"data.{key}=NAME" for key in keys)
    raise DataError(
        f"{source_name} has the fields {', '.join(row)}: expected {expected}; name others by {keys_of_columns}"
    )


def encoded_rows(
    form: RowForm,
    data: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[tuple[int, Record]],
    source_name: str,
) -> Iterator[Row]:
    """Tokenise numbered rows of chats, or of prompts and responses, of any length.

    Raises:
        DataError: a row has another form, or no answer; the message names it.
    """
    return (_chats if form.chat else _pairs)(form, data, tokenizer, rows, source_name)


def _pairs(
    form: RowForm,
    data: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[tuple[int, Record]],
    source_name: str,
) -> Iterator[Row]:
    """Tokenise rows of two texts, of any length."""
    end, last = ([], "") if data.eos is False else (end_tokens(tokenizer), str(tokenizer.eos_token))
    prompt, answer = form.columns
    while numbered_rows := list(itertools.islice(rows, ROWS_PER_CALL)):
        for number, row in numbered_rows:
            location = f"{source_name} row {number}"
            check_fields(row, dict.fromkeys(form.columns, str), location)
            if not row[answer].strip():
                raise DataError(f"{location} has an empty {answer}: leave the row out, or write a response")
        examples = [Example(row[prompt], [row[answer].removesuffix(last)], 0) for _, row in numbered_rows]
        yield from itertools.chain.from_iterable(encode(tokenizer, examples, separator="", end=end))


def _chats(
    form: RowForm,
    data: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[tuple[int, Record]],
    source_name: str,
) -> Iterator[Row]:
    """Tokenise rows of messages, of any length; the prompt ends where the loss begins."""
    end = end_tokens(tokenizer) if data.eos else []
    for number, row in rows:
        location = f"{source_name} row {number}"
        check_fields(row, dict.fromkeys(form.columns, list), location)
        system = _system(row, row[form.columns[0]], location)
        num_prompt_messages = len(system) + len(row[form.columns[0]]) if len(form.columns) > 1 else 0
        try:
            messages = [_message(message, location) for name in form.columns for message in row[name]]
            chat = Chat(system + messages, variables(_without_none(row)))
            turns_with_loss = _turns_with_loss(chat, num_prompt_messages, location)
            ids, loss = assistant_tokens(tokenizer, chat, turns_with_loss)
        except RecursionError as error:
            raise DataError(f"{location} {TOO_DEEP_ERROR}") from error
        except DataError:
            raise
        except UserError as error:
            raise DataError(f"{location}: {error}") from error
        ending = end if turns_with_loss[-1] == len(chat.messages) - 1 else []  # a model never ends the turn of a user
        tokens = np.array([*ids, *ending], dtype=np.int32)
        yield Row(tokens, int(loss.argmax()), loss=np.append(loss, np.ones(len(ending), dtype=np.bool_)))


def _turns_with_loss(chat: Chat, num_prompt_messages: int, location: str) -> list[int]:
    """Return the turns that carry loss: the assistant's after the prompt, except turns of weight 0 (OpenAI)."""
    weights = [message.pop("weight", 1) for message in chat.messages]
    if invalid_weights := [weight for weight in weights if weight not in (0, 1)]:
        raise DataError(
            f"{location} has a message with weight={invalid_weights[0]!r:.80}: expected 0 (no loss on it) or 1"
        )
    assistant_turns = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
    turns_with_loss = [turn for turn in assistant_turns if turn >= num_prompt_messages and weights[turn]]
    if not turns_with_loss:
        raise DataError(f"{location} has no message with role=assistant that carries loss; leave the row out")
    for message in (chat.messages[turn] for turn in turns_with_loss):
        content = message.get("content")
        if not (content.strip() if isinstance(content, str) else content) and not message.get("tool_calls"):
            raise DataError(f"{location} has an empty turn of the assistant: leave the row out, or write a response")
    return turns_with_loss


def _message(message: Any, location: str) -> Message:
    """Return a message with the keys and roles of chat templates, without the values None that a table filled in."""
    message = _without_none(message)
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        role_and_content = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        message = role_and_content | {key: value for key, value in message.items() if key not in ("from", "value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{location} has a message without role and content (or from and value): {message!r:.80}")
    return for_template(message)


def _without_none(value: Any) -> Any:
    """Remove keys whose value is None: tables fill them in if another row has a value."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _system(row: Record, messages: list[Any], location: str) -> list[Message]:
    """Return ShareGPT's column ``system`` as a list of one message, or no message if the chat has it already."""
    system_text = row.get("system")
    if not system_text:
        return []
    if not isinstance(system_text, str):
        raise DataError(
            f"{location}: field system is {type(system_text).__name__}, expected the text of a system message"
        )
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if "system" not in (first.get("role"), first.get("from")):
        return [{"role": "system", "content": system_text}]
    if system_text not in (first.get("content"), first.get("value")):
        raise DataError(f"{location} has a field system and a first message that is another system message: keep one")
    return []
