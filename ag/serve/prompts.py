"""From the parameters of a client to the request of a scheduler: chat template, tokens, limits, protected spans."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

from ag.commands.serve import ServeConfig
from ag.config.spec import ENGINE, PolicySpec
from ag.engine.cache import EvictionCache
from ag.engine.policy import Policy, policy
from ag.errors import UserError
from ag.model.chat import Chat, reads, spans
from ag.serve.detokenizer import Detokenizer
from ag.serve.protocol import ApiError, Asked, Body, ChatAsked, CompletionAsked, DetokenizeAsked, TokenizeAsked
from ag.serve.request import Prompt, Request, Token
from ag.serve.responses import ResponsesAsked
from ag.serve.scheduler import Scheduler
from ag.serve.structured import Grammars
from ag.serve.tools import Divider, calls_of

TEXT_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
POLICIES = 64  # policies of requests that are remembered
RESERVED = 1024  # tokens for which admission keeps blocks, of an answer that has no limit of its own

#: The parameters of a request, by path.
ASKED: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatAsked,
    "/v1/completions": CompletionAsked,
    "/v1/responses": ResponsesAsked,
    "/tokenize": TokenizeAsked,
    "/detokenize": DetokenizeAsked,
}

_PARAMETERS = {field.name for field in fields(Request)}


class Prompts:
    """Makes the requests of a scheduler from the parameters of clients.

    Args:
        scheduler: that answers them.
        limits: limits of requests.
    """

    def __init__(self, scheduler: Scheduler, limits: ServeConfig) -> None:
        self.tokenizer, self.limits = scheduler.tokenizer, limits
        self._texts, self._batch, self._queue = scheduler.vocabulary, scheduler.batch, scheduler.queue
        self._model, self._own, self._ends_of = scheduler.model, scheduler.policy, scheduler.ends_of
        self._policy = lru_cache(POLICIES, typed=True)(self._made)
        self.context, self._context_of = scheduler.context, scheduler.context_of
        self._vocabulary = scheduler.model.config.get_text_config().vocab_size
        self._grammars = Grammars(self.tokenizer, self._vocabulary, scheduler.ends)
        self._calls, self._ruled_calls = calls_of(self.tokenizer), calls_of(self.tokenizer, ruled=True)

    def __call__(self, asked: Body) -> list[Prompt] | dict[str, Any]:
        """Return the requests, one for each prompt, or what ``/tokenize`` and ``/detokenize`` return.

        Raises:
            ApiError: for parameters that this model, its tokenizer or its chat template cannot serve.
            UserError: for a value out of range.
        """
        if isinstance(asked, DetokenizeAsked):
            self._check(asked.tokens, "tokens")
            return {"prompt": self.tokenizer.decode(asked.tokens)}
        if isinstance(asked, TokenizeAsked):
            return self._tokenized(asked)
        assert isinstance(asked, ChatAsked | CompletionAsked)
        if asked.n > self._batch:
            raise ApiError(400, f"n={asked.n}: expected at most {self._batch} here.", "n")
        if isinstance(asked, ChatAsked):
            request = self._request(asked, *self._of_chat(asked), asked.text)
            return [Prompt(request, self._policy_text(request))]
        texts = asked.prompts
        if len(texts) > self._queue:
            raise ApiError(400, f"{len(texts)} prompts: expected at most {self._queue} here.", "prompt")
        return [
            self._text(asked, text, "prompt" if len(texts) == 1 else f"prompt[{place}]")
            for place, text in enumerate(texts)
        ]

    def _request(self, asked: Asked, tokens: list[int], protect: Any, param: str) -> Request:
        """Return the request of one prompt, which the parameter ``param`` holds."""
        if not tokens:
            raise ApiError(400, "the prompt is empty: expected one token or more.", param)
        self._check(tokens, param)
        self._check(asked.stop_token_ids, "stop_token_ids")
        self._check([*asked.logit_bias], "logit_bias")
        if not all(0 <= first < behind <= len(tokens) for first, behind in protect):
            message = f"ag.protect: expected pairs such as [0, 40], within the {len(tokens)} tokens of the prompt."
            raise ApiError(400, message, "ag.protect")
        longest = self._longest(asked, len(tokens), param)
        if asked.min_tokens > longest:
            raise ApiError(
                400, f"min_tokens={asked.min_tokens}: expected at most {longest}, the most tokens here.", "min_tokens"
            )
        same = {name: getattr(asked, name) for name in type(asked).model_fields if name in _PARAMETERS}
        other: dict[str, Any] = {
            "tokens": tokens,
            "max_tokens": longest,
            "reserved": None if asked.longest else RESERVED,
            "top_k": max(asked.top_k, 0),
            "stop": (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
            "continues": not isinstance(asked, ChatAsked) or asked.continue_final_message,
            "logprobs": asked.best,
            "prompt_logprobs": asked.best_of_prompt,
            "policy": self._policy(asked.ag.policy, asked.ag.budget) if asked.ag else None,
            "kept": asked.ag is not None,
            "special": isinstance(asked, ChatAsked) and bool(asked.callable) and self._calls is not None,
            "grammar": self._grammar(asked, tokens),
            "protect": tuple((first, behind) for first, behind in protect),
            "wait_seconds": self.limits.wait_seconds,
            "answer_seconds": self.limits.answer_seconds,
        }
        request = Request(**(same | other))
        try:
            self._ends_of(request)
        except UserError as error:
            raise ApiError(400, str(error), "min_tokens") from None
        return request

    def _made(self, text: str | None, budget: int | float | None) -> Policy | None:
        """Return the policy of a request; None means the server's.

        What the request leaves out is as in the server's policy. Gates are those of the server.
        """
        own, param = self._own, "ag.budget" if text is None else "ag.policy"
        if text is None and budget is None:
            return None
        try:
            spec = own.spec if text is None else PolicySpec.parse(text)
            if text is not None and spec.path is not None:
                raise UserError(f"ag.policy={text!r:.80}: expected no path: gates are those of the server.")
            same = spec.resolved().scorer == own.spec.resolved().scorer
            evicts = spec.takes_budget
            param = "ag.budget" if evicts and budget is None and own.budget is None and not spec.bare else param
            param = "ag.budget" if budget is not None and not evicts else param
            made = policy(
                replace(spec, path=None),
                budget if budget is not None or not evicts else own.budget,
                own.schedule if evicts else "prefill",
                **{name: value for name, value in own.options.items() if name in ENGINE or (same and evicts)},
            )
            if made.by_gates and own.gates is not None:
                made = replace(made, gates=own.gates, spec=replace(spec, path=own.spec.path)).trained_with(own.gates)
            EvictionCache(self._model, made)  # refuses what the model lacks
            return made
        except UserError as error:
            raise ApiError(400, str(error), param) from None

    def _policy_text(self, request: Request) -> str:
        return policy_text(request.policy or self._own)

    def _check(self, tokens: Sequence[int], param: str) -> None:
        """Refuse tokens outside of the vocabulary."""
        wrong = [token for token in tokens if not 0 <= token < self._vocabulary]
        if wrong:
            raise ApiError(400, f"{param}: {wrong[0]}: expected tokens of 0 to {self._vocabulary - 1}.", param)

    def _tokenized(self, asked: TokenizeAsked) -> dict[str, Any]:
        """Return the tokens of a text or a chat, in the form of vLLM."""
        if asked.prompt is None:
            text, special = self._chat(asked)[1], bool(asked.add_special_tokens)
        else:
            text, special = asked.prompt, asked.add_special_tokens is not False
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        names = self.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.context, "tokens": ids, "token_strs": names}

    # ---- grammars and calls

    def divider(self, asked: Asked, tokens: Sequence[int]) -> Callable[[], Divider] | None:
        """Return what makes the divider of an answer to a prompt; None means that an answer is content alone."""
        if not isinstance(asked, ChatAsked) or not asked.callable:
            return None
        calls = self._ruled_calls if asked.rule or asked.forced else self._calls
        if calls is None:
            return None
        tools = asked.variables["tools"]
        return partial(Divider, calls, self.tokenizer.decode(tokens), tools, asked.parallel_tool_calls)

    def _grammar(self, asked: Asked, tokens: Sequence[int]) -> Any:
        """Return a matcher of the grammar that the answers to a prompt follow; None means free text."""
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
        other, divider = None if forced or rule is None else rule[2], self.divider(chat, tokens)
        thinks = divider is not None and divider().thinks
        return self._compiled("tools", "lark", self._calls.grammar(chat.callable, other, self._texts.special, thinks))

    def _compiled(self, param: str, kind: str, text: str) -> Any:
        try:
            return self._grammars(kind, text)
        except UserError as error:
            raise ApiError(400, f"{param}: {error}", param) from None

    def _longest(self, asked: Asked, prompt: int, param: str) -> int:
        """Return the limit of an answer in tokens, for a prompt of this number of tokens."""
        most, context = self.limits.answer_tokens or sys.maxsize, self._context_of(prompt)
        room = most if context is None else context - prompt
        if room < (0 if asked.longest is not None and asked.longest[1] == 0 else 1):
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens: expected fewer than {context}, the context of the model; shorten it.",
                param,
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

    def _text(self, asked: CompletionAsked, text: str | list[int], param: str) -> Prompt:
        """Return the request of a text or its token ids, which the parameter ``param`` holds."""
        ids: list[int]
        ids, pieces = ([], []) if isinstance(text, str) else (text, [])
        if isinstance(text, str):
            found = self.tokenizer(text, return_offsets_mapping=asked.echo, verbose=False)
            ids = found["input_ids"]
            # special tokens that the tokenizer adds lie at 0
            starts = [*accumulate((first for first, _ in found.get("offset_mapping", ())), max), len(text)]
            pieces = [text[first:behind] for first, behind in pairwise([0, *starts[1:]])]
        elif asked.echo:
            reader = Detokenizer(self._texts, special=True)
            pieces = [reader.add(token) for token in ids]
            pieces[-1:] = [piece + reader.rest() for piece in pieces[-1:]]  # half a character
        request = self._request(asked, ids, (asked.ag and asked.ag.protect) or (), param)
        places = accumulate(map(len, pieces), initial=0)
        echo = tuple(Token(*each) for each in zip(ids, pieces, places, strict=False))
        return Prompt(request, self._policy_text(request), echo if asked.echo else ())

    # ---- chats

    def _chat(self, asked: ChatAsked) -> tuple[Chat, str]:
        """Return a chat and its text by the template."""
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions.", asked.text)
        try:
            messages, variables = [message.for_template() for message in asked.messages], asked.variables
            chat, text = self._rendered(Chat(messages, variables, asked.continue_final_message), asked.opened)
            self._check_rendered(chat, asked.opened)
            effort = asked.reasoning_effort is not None
            if effort and not reads(self.tokenizer, "reasoning_effort", variables.get("tools")):
                message = "the chat template of the model has no reasoning_effort: leave it out."
                raise ApiError(400, message, asked.effort)
            without = "tools" in variables and replace(chat, variables={**variables, "tools": None})
            if without and without.text(self.tokenizer, asked.opened) == text:
                raise ApiError(400, "the chat template of the model leaves tools out: leave them out too.", "tools")
        except UserError as error:
            raise ApiError(400, str(error), asked.text) from None
        return chat, text

    def _of_chat(self, asked: ChatAsked) -> tuple[list[int], Any]:
        """Return the token ids of a chat, and its protected spans."""
        chat, text = self._chat(asked)
        given = None if asked.ag is None else asked.ag.protect
        parts = self.limits.protect if given is None else given
        protect = spans(self.tokenizer, chat, parts, asked.opened) if parts else ()
        # the template writes the special tokens itself
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], protect

    def _rendered(self, chat: Chat, opened: bool) -> tuple[Chat, str]:
        """Return the chat and its text, with empty contents for tool calls where the template needs a content."""
        try:
            return chat, chat.text(self.tokenizer, opened)
        except UserError:
            filled = replace(chat, messages=[{"content": ""} | message for message in chat.messages])
            if filled == chat:
                raise
            return filled, filled.text(self.tokenizer, opened)

    def _check_rendered(self, chat: Chat, opened: bool) -> None:
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
        text = replace(chat, messages=messages).text(self.tokenizer, opened) if words else ""
        for param, word in words.items():
            if word not in text:
                raise ApiError(
                    400,
                    f"{param}: the chat template of the model leaves it out: say it in the content of a message of the "
                    "assistant or the user.",
                    param,
                )


def policy_text(chosen: Policy) -> str:
    """Return the label of a policy, or its text without a path, with its budget; clients see it."""
    name = chosen.spec.label or str(replace(chosen.spec, path=None))
    return name + (f" {chosen.budget}" if chosen.budget else "")
