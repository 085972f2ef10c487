"""From the parameters of a client to the request of a scheduler: chat template, tokens, limits, protected spans."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from ag.commands.serve import ServeConfig
from ag.errors import UserError
from ag.model.chat import Chat, spans
from ag.serve.protocol import ApiError, Asked, ChatAsked, CompletionAsked
from ag.serve.request import Request
from ag.serve.scheduler import Scheduler
from ag.serve.structured import Grammars
from ag.serve.tools import Divider, calls_of

TEXT_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions

_PARAMETERS = {field.name for field in fields(Request)}


class Prompts:
    """Makes the requests of a scheduler from the parameters of clients.

    Args:
        scheduler: that answers them.
        limits: limits of requests.
    """

    def __init__(self, scheduler: Scheduler, limits: ServeConfig) -> None:
        model = scheduler.model.config.get_text_config()
        self.tokenizer, self.limits = scheduler.tokenizer, limits
        self._texts, self._batch = scheduler.vocabulary, scheduler.batch
        self._context: int | None = getattr(model, "max_position_embeddings", None)
        self._vocabulary = int(model.vocab_size)
        self._grammars = Grammars(self.tokenizer, self._vocabulary, scheduler.ends)
        self._calls = calls_of(self.tokenizer)

    def __call__(self, asked: Asked) -> Request:
        """Return the request.

        Raises:
            ApiError: for parameters that this model, its tokenizer or its chat template cannot serve.
            UserError: for a value out of range.
        """
        if asked.n > self._batch:
            raise ApiError(400, f"n={asked.n}: expected at most {self._batch} here.", "n")
        tokens, protect = self._chat(asked) if isinstance(asked, ChatAsked) else self._text(asked)
        if not tokens:
            raise ApiError(400, "the prompt is empty: expected one token or more.", "prompt")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise ApiError(400, f"prompt: expected tokens of 0 to {self._vocabulary - 1}.", "prompt")
        same = {name: getattr(asked, name) for name in type(asked).model_fields if name in _PARAMETERS}
        other: dict[str, Any] = {
            "tokens": tokens,
            "max_tokens": self._longest(asked, len(tokens)),
            "top_k": max(asked.top_k, 0),
            "logit_bias": asked.biases(self._vocabulary),
            "stop": (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
            "continues": isinstance(asked, CompletionAsked),
            "special": isinstance(asked, ChatAsked) and bool(asked.callable) and self._calls is not None,
            "logprobs": asked.best,
            "grammar": self._grammar(asked),
            "protect": tuple((first, behind) for first, behind in protect),
            "wait_seconds": self.limits.wait_seconds,
            "answer_seconds": self.limits.answer_seconds,
        }
        return Request(**(same | other))

    # ---- grammars and calls

    def divider(self, asked: Asked, tokens: Sequence[int]) -> Callable[[], Divider] | None:
        """Return what makes the divider of an answer to a prompt; None means that an answer is content alone."""
        if not isinstance(asked, ChatAsked) or not asked.callable or self._calls is None:
            return None
        tools = asked.variables["tools"]
        return partial(Divider, self._calls, self.tokenizer.decode(tokens), tools, asked.parallel_tool_calls)

    def _grammar(self, asked: Asked) -> Any:
        """Return a matcher of the grammar that the answers follow; None means free text."""
        rule, chat = asked.rule, asked if isinstance(asked, ChatAsked) and asked.callable else None
        found, forced = None if rule is None else self._compiled(*rule), chat is not None and chat.forced
        for name in ("ignore_eos", "min_tokens"):
            if getattr(asked, name, None) and (rule or forced):
                raise ApiError(400, f"{name}: an answer by a grammar excludes it: leave one of them out.", name)
        if chat is None or not (rule or forced):
            return found
        if chat.structured_outputs:
            message = "structured_outputs excludes calls of tools: leave it out, or set tool_choice='none'."
            raise ApiError(400, message, "structured_outputs")
        if self._calls is None or self._calls.before is None:
            param = "tool_choice" if forced else "response_format"
            message = f"{param}: how the chat template writes calls is unknown here: leave it out, or the tools."
            raise ApiError(400, message, param)
        other = None if forced or rule is None else rule[2]
        return self._compiled("tools", "lark", self._calls.grammar(chat.callable, other, self._texts.special))

    def _compiled(self, param: str, kind: str, text: str) -> Any:
        try:
            return self._grammars(kind, text)
        except UserError as error:
            raise ApiError(400, f"{param}: {error}", param) from None

    def _longest(self, asked: Asked, prompt: int) -> int:
        """Return the limit of an answer in tokens, for a prompt of this number of tokens."""
        most, context = self.limits.answer_tokens, self._context
        room = most if context is None else context - prompt
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens: expected fewer than {context}, the context of the model; shorten it.",
                asked.text,
                "context_length_exceeded",
            )
        least = min(room, most)
        if asked.longest is None:
            return least if isinstance(asked, ChatAsked) else min(least, TEXT_TOKENS)
        name, number = asked.longest
        if number > least:
            message = f"{name}={number}: expected at most {least} here, behind a prompt of {prompt} tokens."
            raise ApiError(400, message, name, None if number > most else "context_length_exceeded")
        return number

    def _text(self, asked: Asked) -> tuple[list[int], Any]:
        """Return the token ids of a text, and its protected spans."""
        assert isinstance(asked, CompletionAsked)
        prompt = asked.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(400, f"{len(prompt)} prompts: expected one; send the others by themselves.", "prompt")
            prompt = prompt[0]
        return self.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt, asked.protect

    # ---- chats

    def _chat(self, asked: ChatAsked) -> tuple[list[int], Any]:
        """Return the token ids of a chat, and its protected spans."""
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions.", "messages")
        try:
            chat, text = self._rendered(Chat([message.for_template() for message in asked.messages], asked.variables))
            self._check_rendered(chat)
            without = "tools" in asked.variables and replace(chat, variables=asked.chat_template_kwargs)
            if without and without.text(self.tokenizer) == text:
                raise ApiError(400, "the chat template of the model leaves tools out: leave them out too.", "tools")
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        parts = self.limits.protect if asked.protect is None else asked.protect
        protect = spans(self.tokenizer, chat, parts) if parts else ()
        # the template writes the special tokens itself
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], protect

    def _rendered(self, chat: Chat) -> tuple[Chat, str]:
        """Return the chat and its text, with empty contents for tool calls where the template needs a content."""
        try:
            return chat, chat.text(self.tokenizer)
        except UserError:
            filled = replace(chat, messages=[{"content": ""} | message for message in chat.messages])
            if filled == chat:
                raise
            return filled, filled.text(self.tokenizer)

    def _check_rendered(self, chat: Chat) -> None:
        """Refuse tool calls and results of tools that the template leaves out.

        A random word takes the place of each of them, and has to appear in the text.
        """
        words: dict[str, str] = {}  # by parameter
        messages = [dict(message) for message in chat.messages]
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                message["content"] = words[f"messages[{place}].content"] = uuid.uuid4().hex
            calls = message.pop("tool_calls", [])
            for number, call in enumerate(calls):
                word = words[f"messages[{place}].tool_calls[{number}]"] = uuid.uuid4().hex
                called = call | {"function": call["function"] | {"arguments": {"text": word}}}
                message["tool_calls"] = [*message.get("tool_calls", []), called]
        text = replace(chat, messages=messages).text(self.tokenizer) if words else ""
        for param, word in words.items():
            if word not in text:
                raise ApiError(
                    400,
                    f"{param}: the chat template of the model leaves it out: say it in the content of a message of the "
                    "assistant or the user.",
                    param,
                )
