"""Builds the scheduler's requests from clients' parameters: chat template, tokens, limits, protected spans."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

from ag.commands.serve import ServeConfig
from ag.config.spec import ENGINE, PolicySpec
from ag.engine.cache_setup import CacheSetup
from ag.engine.policy import Policy, policy
from ag.errors import UserError
from ag.model.chat import Chat, reads, spans
from ag.serve.errors import ApiError
from ag.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from ag.serve.request import EncodedPrompt, Request, SamplingParams, Token
from ag.serve.scheduler import Scheduler
from ag.serve.stream import Detokenizer
from ag.serve.structured import Grammars
from ag.serve.tools import OutputParser, tool_call_format

TEXT_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
POLICIES = 64  # number of requests' policies to remember
RESERVED = 1024  # tokens for which admission keeps blocks if a request sets no limit


class RequestBuilder:
    """Builds the scheduler's requests from clients' parameters.

    Its methods raise an :class:`ApiError` for parameters that this model, its tokenizer or its chat template cannot
    serve, and a :class:`UserError` for a value out of range.
    """

    def __init__(self, scheduler: Scheduler, limits: ServeConfig) -> None:
        self._scheduler, self._tokenizer, self._limits = scheduler, scheduler.tokenizer, limits
        self._policy = lru_cache(POLICIES, typed=True)(self._new_policy)
        self._vocabulary = scheduler.model.config.get_text_config().vocab_size
        self._grammars = Grammars(self._tokenizer, self._vocabulary, scheduler.end_tokens)
        self._calls = tool_call_format(self._tokenizer)
        self._calls_under_grammar = tool_call_format(self._tokenizer, with_grammar=True)

    def requests(self, params: GenerationRequest) -> list[EncodedPrompt]:
        """Return the requests of a chat or of texts, one per prompt."""
        if params.n > self._scheduler.batch:
            raise ApiError(400, f"n={params.n}: expected at most {self._scheduler.batch} here.", "n")
        if isinstance(params, ChatCompletionRequest):
            return [self._encode_chat(params)]
        texts = params.prompts
        if len(texts) > self._scheduler.queue:
            raise ApiError(400, f"{len(texts)} prompts: expected at most {self._scheduler.queue} here.", "prompt")
        name = "prompt" if len(texts) == 1 else "prompt[{}]"
        return [self._encode_text(params, text, name.format(index)) for index, text in enumerate(texts)]

    def tokenize(self, params: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or a chat, in the form of vLLM."""
        if params.prompt is None:
            text, special = self._chat(params)[1], bool(params.add_special_tokens)
        else:
            text, special = params.prompt, params.add_special_tokens is not False
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        names = self._tokenizer.convert_ids_to_tokens(ids) if params.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._scheduler.context_length, "tokens": ids, "token_strs": names}

    def detokenize(self, params: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens, in the form of vLLM."""
        self._check_tokens(params.tokens, "tokens")
        return {"prompt": self._tokenizer.decode(params.tokens)}

    def _request(
        self, params: GenerationRequest, tokens: list[int], protect: Any, param: str, echo: tuple[Token, ...] = ()
    ) -> EncodedPrompt:
        """Return the request of one prompt. ``param`` is the prompt's parameter, for errors."""
        if not tokens:
            raise ApiError(400, "the prompt is empty: expected one token or more.", param)
        self._check_tokens(params.stop_token_ids, "stop_token_ids")
        self._check_tokens([*params.logit_bias], "logit_bias")
        if not all(0 <= first < end <= len(tokens) for first, end in protect):
            message = f"ag.protect: expected pairs such as [0, 40], within the {len(tokens)} tokens of the prompt."
            raise ApiError(400, message, "ag.protect")
        chat = params if isinstance(params, ChatCompletionRequest) else None
        scored = [params.prompt_logprobs, params.num_logprobs if echo else None]
        values: dict[str, Any] = {name: getattr(params, name) for name in SamplingParams.model_fields}
        values |= {
            "tokens": tokens,
            "max_tokens": self._max_tokens(params, len(tokens), param),
            "reserved": None if params.token_limit else RESERVED,
            "logit_bias": params.logit_bias,
            "stop": (params.stop,) if isinstance(params.stop, str) else tuple(params.stop),
            "prompt_text_goes_on": chat is None or chat.continue_final_message,
            "logprobs": params.num_logprobs,
            "prompt_logprobs": max((number for number in scored if number is not None), default=None),
            "policy": self._policy(params.ag.policy, params.ag.budget) if params.ag else None,
            "report_kept_share": params.ag is not None,
            "with_special_tokens": chat is not None and bool(chat.callable_tools) and self._calls is not None,
            "grammar": self._grammar(params, tokens),
            "protect": tuple((first, end) for first, end in protect),
            "wait_seconds": self._limits.wait_seconds,
            "answer_seconds": self._limits.answer_seconds,
        }
        try:
            request = Request(**values)
            self._scheduler.end_tokens_of(request)
        except UserError as error:  # all other values were checked before
            raise ApiError(400, str(error), "min_tokens") from None
        return EncodedPrompt(request, policy_text(request.policy or self._scheduler.policy), echo)

    def _new_policy(self, text: str | None, budget: int | float | None) -> Policy | None:
        """Return the policy of a request. None: the server's policy.

        Defaults come from the server's policy. Gates are the server's gates.
        """
        server_policy, param = self._scheduler.policy, "ag.budget" if text is None else "ag.policy"
        if text is None and budget is None:
            return None
        try:
            spec = server_policy.spec if text is None else PolicySpec.parse(text)
            if text is not None and spec.path is not None:
                raise UserError(f"ag.policy={text!r:.80}: expected no path: requests use the server's gates.")
            evicts = spec.takes_budget
            own_budget = server_policy.budget if evicts and budget is None else budget
            if (own_budget is None and not spec.bare) if evicts else budget is not None:
                param = "ag.budget"  # the error below is about it
            same_scorer = evicts and spec.resolved().scorer == server_policy.spec.resolved().scorer
            options = {name: value for name, value in server_policy.options.items() if same_scorer or name in ENGINE}
            schedule = server_policy.schedule if evicts else "prefill"
            own_policy = policy(replace(spec, path=None), own_budget, schedule, **options)
            if own_policy.by_gates and server_policy.gates is not None:
                spec = replace(spec, path=server_policy.spec.path)
                own_policy = replace(own_policy, gates=server_policy.gates, spec=spec).with_trained_protection(
                    server_policy.gates
                )
            # Raises if the model cannot run the policy. It takes no memory, beside a step that may be recorded now.
            CacheSetup.of(self._scheduler.model, own_policy, self._scheduler.pool)
            return own_policy
        except UserError as error:
            raise ApiError(400, str(error), param) from None

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuse tokens outside the vocabulary."""
        unknown = [token for token in tokens if not 0 <= token < self._vocabulary]
        if unknown:
            raise ApiError(400, f"{param}: {unknown[0]}: expected tokens of 0 to {self._vocabulary - 1}.", param)

    # ---- grammars and calls

    def output_parser(self, params: GenerationRequest, tokens: Sequence[int]) -> Callable[[], OutputParser] | None:
        """Return a factory of parsers for completions to a prompt. None: a completion is content only."""
        if not isinstance(params, ChatCompletionRequest) or not params.callable_tools:
            return None
        calls = self._calls_under_grammar if params.grammar_source or params.must_call_tool else self._calls
        if calls is None:
            return None
        tools = params.template_variables["tools"]
        return partial(OutputParser, calls, self._tokenizer.decode(tokens), tools, params.parallel_tool_calls)

    def _grammar(self, params: GenerationRequest, tokens: Sequence[int]) -> Any:
        """Return a matcher of the grammar that completions to a prompt follow. None: free text."""
        source = params.grammar_source
        matcher = None if source is None else self._compile_grammar(*source)  # raises for a wrong schema
        chat = params if isinstance(params, ChatCompletionRequest) and params.callable_tools else None
        must_call = chat is not None and chat.must_call_tool
        if source is None and not must_call:
            return None
        for name in ("ignore_eos", "min_tokens"):
            if getattr(params, name):
                raise ApiError(400, f"{name}: an answer by a grammar excludes it: leave one of them out.", name)
        if chat is None:
            return matcher
        if self._calls is None or self._calls.call is None:
            param = "tool_choice" if must_call else "response_format"
            message = f"{param}: how the chat template writes calls is unknown here: leave it out, or the tools."
            raise ApiError(400, message, param)
        content_schema = None if must_call or source is None else source[2]
        new_parser = self.output_parser(chat, tokens)
        thinks = new_parser is not None and new_parser().thinks
        special = self._scheduler.vocabulary.special
        grammar = self._calls.grammar(chat.callable_tools, content_schema, special, thinks)
        return self._compile_grammar("tools", "lark", grammar)

    def _compile_grammar(self, param: str, kind: str, text: str) -> Any:
        try:
            return self._grammars(kind, text)
        except UserError as error:
            raise ApiError(400, f"{param}: {error}", param) from None

    def _max_tokens(self, params: GenerationRequest, num_prompt: int, param: str) -> int:
        """Return the largest number of tokens of a completion after ``num_prompt`` prompt tokens."""
        max_completion = self._limits.answer_tokens or sys.maxsize
        context_length = self._scheduler.context_length_of(num_prompt)
        tokens_left = max_completion if context_length is None else context_length - num_prompt
        name, number = params.token_limit or ("", None)
        if tokens_left < (number != 0):
            expected = f"expected fewer than {context_length}, the context of the model; shorten it."
            message = f"the prompt has {num_prompt} tokens: {expected}"
            raise ApiError(400, message, param, "context_length_exceeded")
        limit = min(tokens_left, max_completion)
        if number is None:
            return limit if isinstance(params, ChatCompletionRequest) else min(limit, TEXT_TOKENS)
        if number > limit:
            message = f"{name}={number}: expected at most {limit} here, after a prompt of {num_prompt} tokens."
            raise ApiError(400, message, name, None if number > max_completion else "context_length_exceeded")
        return number

    def _encode_text(self, params: CompletionRequest, text: str | list[int], param: str) -> EncodedPrompt:
        """Return the request of a text or of token ids. ``param`` is its parameter, for errors."""
        if isinstance(text, str):
            encoding = self._tokenizer(text, return_offsets_mapping=params.echo, verbose=False)
            ids: list[int] = encoding["input_ids"]
            # special tokens that the tokenizer adds have offset 0
            starts = [*accumulate((first for first, _ in encoding.get("offset_mapping", ())), max), len(text)]
            token_texts = [text[first:end] for first, end in pairwise([0, *starts[1:]])]
        else:
            self._check_tokens(text, param)
            request = Request(tokens=text, with_special_tokens=True, prompt_text_goes_on=False)
            reader = Detokenizer(self._scheduler.vocabulary, request)
            ids, token_texts = text, [reader.add(token) for token in text] if params.echo else []
            token_texts[-1:] = [token_text + reader.flush() for token_text in token_texts[-1:]]  # half a character
        offsets = accumulate(map(len, token_texts), initial=0)
        echo = tuple(Token(*each) for each in zip(ids, token_texts, offsets, strict=False)) if params.echo else ()
        return self._request(params, ids, (params.ag and params.ag.protect) or (), param, echo)

    # ---- chats

    def _chat(self, params: ChatCompletionRequest) -> tuple[Chat, str]:
        """Return a chat and its text from the chat template."""
        if self._tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions.", "messages")
        tokenizer, variables, opens = self._tokenizer, params.template_variables, params.opens_completion
        chat = Chat([message.for_template() for message in params.messages], variables, params.continue_final_message)
        try:
            try:
                text = chat.text(tokenizer, opens)
            except UserError:  # of a template that needs the content of each message
                filled = replace(chat, messages=[{"content": ""} | message for message in chat.messages])
                if filled == chat:
                    raise
                chat, text = filled, filled.text(tokenizer, opens)
            self._check_rendered(chat, opens)
            tools = variables.get("tools")
            if params.reasoning_effort is not None and not reads(tokenizer, "reasoning_effort", tools):
                message = "the chat template of the model has no reasoning_effort: leave it out."
                raise ApiError(400, message, "reasoning_effort")
            if tools and replace(chat, variables={**variables, "tools": None}).text(tokenizer, opens) == text:
                raise ApiError(400, "the chat template of the model leaves tools out: leave them out too.", "tools")
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        return chat, text

    def _encode_chat(self, params: ChatCompletionRequest) -> EncodedPrompt:
        """Return the request of a chat."""
        chat, text = self._chat(params)
        requested = None if params.ag is None else params.ag.protect
        parts = self._limits.protect if requested is None else requested
        protect = spans(self._tokenizer, chat, parts, params.opens_completion) if parts else ()
        # the template writes the special tokens itself
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self._request(params, ids, protect, "messages")

    def _check_rendered(self, chat: Chat, opens_completion: bool) -> None:
        """Refuse tool calls and results that the template leaves out: a random word in place of each must occur."""
        words: dict[str, str] = {}  # by parameter
        messages = [dict(message) for message in chat.messages]
        for index, message in enumerate(messages):
            if message["role"] == "tool":
                message["content"] = words[f"messages[{index}].content"] = uuid.uuid4().hex
            calls = message.pop("tool_calls", [])
            for call_index, call in enumerate(calls):
                word = words[f"messages[{index}].tool_calls[{call_index}]"] = uuid.uuid4().hex
                marked_call = call | {"function": call["function"] | {"arguments": {"text": word}}}
                message["tool_calls"] = [*message.get("tool_calls", []), marked_call]
        text = replace(chat, messages=messages).text(self._tokenizer, opens_completion) if words else ""
        for param, word in words.items():
            if word not in text:
                fix = "say it in the content of a message of the assistant or the user."
                raise ApiError(400, f"{param}: the chat template of the model leaves it out: {fix}", param)


def policy_text(policy: Policy) -> str:
    """Return the name of a policy for clients: its label, or its text without a path, and its budget."""
    name = policy.spec.label or str(replace(policy.spec, path=None))
    return name + (f" {policy.budget}" if policy.budget else "")
