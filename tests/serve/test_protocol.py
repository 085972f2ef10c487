"""Bodies of requests: each is accepted, or refused with the parameter at fault."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

from starlette.testclient import TestClient  # noqa: E402

from ag.serve.app import new_app  # noqa: E402
from ag.serve.protocol import (  # noqa: E402
    IGNORED,
    NEUTRAL,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.support.reasoning import TOOLS  # noqa: E402

NAMED = {"type": "function", "function": {"name": "snow"}}
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
RIGHT = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
}
KINDS = RIGHT | {
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [7]},
}


@pytest.fixture(scope="module")
def refusal():
    """`refusal(kind, body)`: the refusal of a body by FastAPI, or None; a dict is changes of a right one."""
    app = new_app()
    for kind in KINDS:

        async def ask(body):
            assert getattr(body, "n", 1) >= 1 and getattr(body, "temperature", 0) >= 0

        ask.__annotations__ = {"body": kind}
        app.post(f"/{kind.__name__}")(ask)
    with TestClient(app, headers={"Content-Type": "application/json"}) as client:

        def refusal(kind, body):
            sent = body if isinstance(body, bytes) else json.dumps(KINDS[kind] | body).encode()
            answer = client.post(f"/{kind.__name__}", content=sent)
            if answer.status_code == 200:
                return None
            error = answer.json()["error"]
            assert answer.status_code == 400 and 0 < len(error["message"]) < 600
            return error

        yield refusal


@pytest.mark.parametrize("kind", RIGHT)
@given(body=st.binary(max_size=40))
def test_any_bytes(refusal, kind, body):
    assert refusal(kind, body)["code"] == "invalid_json" or isinstance(json.loads(body), dict)


@pytest.mark.parametrize("kind", RIGHT)
@settings(max_examples=40)
@given(data=st.data())
def test_any_values(refusal, kind, data):
    names = st.sampled_from([*kind.model_fields, *kind.openai_fields]) | st.text(max_size=8)
    changed = data.draw(st.dictionaries(names, VALUES, max_size=4))
    found, again = (refusal(kind, dict(rows)) for rows in (changed.items(), reversed(changed.items())))
    assert found is None or changed
    if found is None or found["code"] != "invalid_json":  # which says at what column
        assert found == again


@pytest.mark.parametrize(
    ("kind", "change", "param", "words"),
    [
        (CompletionRequest, {"prompt": [[]]}, "prompt[0]", ["[]", "at least 1 item"]),
        (CompletionRequest, {"prompt": 3}, "prompt", ["3", "a valid string or a valid list"]),
        (CompletionRequest, {"temperature": "hot"}, "temperature", ["hot", "number"]),
        (CompletionRequest, {"suffix": "x"}, "suffix", ["not supported"]),
        (CompletionRequest, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ["stream=false"]),
        (CompletionRequest, {"stream_options": "x"}, "stream_options", ["'x': Input should be an object."]),
        (CompletionRequest, {"logit_bias": [1]}, "logit_bias", ["[1]: Input should be an object."]),
        (CompletionRequest, {"stream_options": {"include_usage": False}}, "stream_options", ["stream=true"]),
        (CompletionRequest, {"repetition_penalty": 1e-300}, "repetition_penalty", ["1e-300", "0.01"]),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "assistant", "tool_calls": []}]},
            "messages[0].content",
            ["required"],
        ),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
            ["required"],
        ),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            ["image_url", "text"],
        ),
        (ChatCompletionRequest, {"top_logprobs": 3}, "top_logprobs", ["3", "logprobs=true"]),
        (ChatCompletionRequest, {"max_tokens": 0}, "max_tokens", ["0", "greater than or equal to 1"]),
        (ChatCompletionRequest, {"echo": True}, "echo", ["unknown"]),
        (
            ChatCompletionRequest,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            ["add_generation_prompt=false"],
        ),
        (
            ChatCompletionRequest,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
            ["chat_template_kwargs"],
        ),
        (ChatCompletionRequest, {"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", ["'auto'"]),
        (ChatCompletionRequest, {"tools": [{"type": "function"}]}, "tools[0].function", ["required"]),
        (
            ChatCompletionRequest,
            {"tools": [{"type": "function", "function": {"name": 3}}]},
            "tools[0].function.name",
            ["string"],
        ),
        (ChatCompletionRequest, {"tool_choice": "required"}, "tool_choice", ["needs tools"]),
        (
            ChatCompletionRequest,
            {"tools": TOOLS, "tool_choice": NAMED},
            "tool_choice",
            ["snow", "one of the tools, rain"],
        ),
        (
            ChatCompletionRequest,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            ["required"],
        ),
        (ChatCompletionRequest, {"parallel_tool_calls": "no"}, "parallel_tool_calls", ["boolean"]),
        (ChatCompletionRequest, {"response_format": "json"}, "response_format", ["json"]),
        (ChatCompletionRequest, {"response_format": {"type": "xml"}}, "response_format.type", ["xml", "json_schema"]),
        (
            ChatCompletionRequest,
            {"response_format": {"type": "json_schema"}},
            "response_format",
            ["json_schema"],
        ),
        (
            ChatCompletionRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
            ["[]", "an object"],
        ),
        (
            ChatCompletionRequest,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            ["excludes structured_outputs"],
        ),
        (CompletionRequest, {"structured_outputs": {}}, "structured_outputs", ["at least 1"]),
        (
            CompletionRequest,
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            ["at most 1"],
        ),
        (
            CompletionRequest,
            {"structured_outputs": {"json": 3}},
            "structured_outputs.json",
            ["3", "an object"],
        ),
        (CompletionRequest, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", ["at least 1"]),
        (
            CompletionRequest,
            {"structured_outputs": {"choices": ["a"]}},
            "structured_outputs.choices",
            ["not permitted"],
        ),
        (ChatCompletionRequest, dict.fromkeys("zyxwvutsrqpfedcbah", 1), "a", ["'a' is an unknown parameter"]),
    ],
)
def test_refusals(refusal, kind, change, param, words):
    """The value, and what was expected: any of the possible types, or a value of the right type."""
    error = refusal(kind, change)
    assert error["param"] == param and all(word in error["message"] for word in words), error


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (CompletionRequest, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [], "annotations": []}]},
        ),
        (
            ChatCompletionRequest,
            {"tools": [], "response_format": {"type": "text"}, "frequency_penalty": 0, "user": "me"},
        ),
        (ChatCompletionRequest, {"stop": None, "store": False, "stream_options": None, "prompt_cache_key": "x"}),
    ],
)
def test_neutral_values_are_accepted(refusal, kind, change):
    assert refusal(kind, change) is None


@pytest.mark.parametrize(
    "change",
    [
        '"seed": 1' + "0" * 9000,
        '"logit_bias": {"1' + "0" * 9000 + '": 1}',
        '"logit_bias": {"' + "x" * 9000 + '": 1}',
        '"' + "y" * 2000 + '": 1',
    ],
    ids=["digits", "token", "word", "long name"],
)
def test_values_that_are_too_large(refusal, change):
    assert refusal(CompletionRequest, f'{{"model": "m", "prompt": "x", {change}}}'.encode())


#: Values of each type of JSON, and the types that each parameter takes, by their first letters.
TYPED = {"s": ["", "x"], "b": [True], "i": [7], "f": [7.5], "l": [[], [None]], "o": [{}, {"x": 7}]}
TEXT = "messages:l prompt:sl model:s tokens:l stop:sl tools:l tool_choice:so reasoning_effort:s"
FLAG = "stream:b echo:b ignore_eos:b include_stop_str_in_output:b return_token_ids:b continue_final_message:b"
FLAG += " parallel_tool_calls:b add_generation_prompt:b add_special_tokens:b return_token_strs:b logprobs:bi"
COUNT = "max_tokens:i max_completion_tokens:i min_tokens:i n:i seed:i top_k:i top_logprobs:i"
NUMBER = "temperature:if top_p:if min_p:if repetition_penalty:if frequency_penalty:if presence_penalty:if"
OTHER = "prompt_logprobs:i stop_token_ids:l logit_bias:o stream_options:o chat_template_kwargs:o ag:o"
OTHER += " response_format:o structured_outputs:o"
TYPES = dict(each.split(":") for part in (TEXT, FLAG, COUNT, NUMBER, OTHER) for each in part.split())
#: Values out of range.
OUTSIDE = {
    "best_of": [2, 0],
    "frequency_penalty": [2.1, -2.1],
    "logit_bias": [{"7": 101}, {"7": "x"}, {"-1": 1}, {"x": 1}],
    "logprobs": [-1, 21],
    "max_completion_tokens": [0, -1],
    "max_tokens": [-1],
    "min_p": [-0.1, 1.1],
    "min_tokens": [-1],
    "n": [0, 129],
    "presence_penalty": [2.1, -2.1],
    "prompt": [[], [[]], ["x", 7], [7, "x"], [7.5], [[7], "x"]],
    "prompt_logprobs": [-1, 21],
    "reasoning_effort": ["much"],
    "repetition_penalty": [0, 101],
    "seed": [2**63],
    "stop": [[""], ["x"] * 17, "x" * 1001, [7]],
    "stop_token_ids": [[-1], ["x"]],
    "temperature": [-0.1, 2.1],
    "top_k": [-2],
    "top_logprobs": [-1, 21],
    "top_p": [0, 1.1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_a_wrong_type_or_out_of_range(refusal, kind):
    """Is refused by its own name, whatever else is wrong behind it."""
    names = {*kind.model_fields, *(name for name in NEUTRAL if kind in RIGHT)}
    assert set(kind.model_fields) <= TYPES.keys()
    for name in sorted(names):
        wrong = [value for letter in TYPED if letter not in TYPES.get(name, "sbiflo") for value in TYPED[letter]]
        for value in wrong + OUTSIDE.get(name, []) * (kind in RIGHT):
            if (
                name == "max_tokens"
                and value == 0
                or name == "logprobs"
                and value is True
                and kind is ChatCompletionRequest
            ):
                continue
            error = refusal(kind, {name: value})
            assert error and error["param"].partition("[")[0].split(".")[0] == name
            assert name in error["message"] or name == "stream_options", error


def test_parameters_are_those_of_openai():
    """And a few more. Each neutral parameter is one of OpenAI's API."""
    own = {"top_k", "min_p", "repetition_penalty", "ag", "stream"}  # the last declared by its subclasses
    own |= {"stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "return_token_ids"}
    own |= {"prompt_logprobs", "structured_outputs"}
    of_chats = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
    assert set(ChatCompletionRequest.model_fields) - ChatCompletionRequest.openai_fields == own | of_chats
    assert set(CompletionRequest.model_fields) - CompletionRequest.openai_fields == own
    refused = {"moderation", "prediction", "verbosity", "web_search_options"}  # they change a completion
    known = set(ChatCompletionRequest.model_fields) | set(NEUTRAL) | IGNORED
    assert ChatCompletionRequest.openai_fields - known <= refused
    assert set(NEUTRAL) <= ChatCompletionRequest.openai_fields | CompletionRequest.openai_fields
