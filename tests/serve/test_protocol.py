"""Bodies of requests: each is accepted, or refused with the parameter at fault."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

from ag.serve.protocol import NEUTRAL, ApiError, ChatAsked, CompletionAsked, parse  # noqa: E402
from tests.support.reasoning import TOOLS  # noqa: E402

NAMED = {"type": "function", "function": {"name": "snow"}}
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
RIGHT = {
    ChatAsked: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionAsked: {"model": "m", "prompt": "x"},
}


def refusal(kind, body):
    """Parse a body; the refusal, or None."""
    try:
        asked = parse(kind, body if isinstance(body, bytes) else json.dumps(RIGHT[kind] | body).encode())
        asked.biases(100)
    except ApiError as error:
        assert error.status == 400 and error.body["error"]["message"]
        assert len(str(error)) < 600
        return error
    assert isinstance(asked, kind) and asked.n >= 1 and asked.temperature >= 0
    return None


@pytest.mark.parametrize("kind", RIGHT)
@given(body=st.binary(max_size=40))
def test_any_bytes(kind, body):
    assert refusal(kind, body).code == "invalid_json" or isinstance(json.loads(body), dict)


@pytest.mark.parametrize("kind", RIGHT)
@settings(max_examples=40)
@given(data=st.data())
def test_any_values(kind, data):
    names = st.sampled_from([*kind.model_fields, *kind.known]) | st.text(max_size=8)
    changed = data.draw(st.dictionaries(names, VALUES, max_size=4))
    assert refusal(kind, changed) is None or changed


@pytest.mark.parametrize(
    ("kind", "change", "param", "words"),
    [
        (CompletionAsked, {"prompt": [[]]}, "prompt[0]", ["[]", "at least 1 item"]),
        (CompletionAsked, {"prompt": 3}, "prompt", ["3", "a valid string or a valid list"]),
        (CompletionAsked, {"temperature": "hot"}, "temperature", ["hot", "number"]),
        (CompletionAsked, {"echo": True}, "echo", ["not supported"]),
        (CompletionAsked, {"stream_options": {"include_usage": False}}, "stream_options", ["stream=true"]),
        (CompletionAsked, {"repetition_penalty": 1e-300}, "repetition_penalty", ["1e-300", "0.01"]),
        (ChatAsked, {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", ["required"]),
        (
            ChatAsked,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
            ["required"],
        ),
        (
            ChatAsked,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            ["image_url", "text"],
        ),
        (ChatAsked, {"top_logprobs": 3}, "top_logprobs", ["3", "logprobs=true"]),
        (ChatAsked, {"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", ["'auto'"]),
        (ChatAsked, {"tools": [{"type": "function"}]}, "tools[0].function", ["required"]),
        (ChatAsked, {"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name", ["string"]),
        (ChatAsked, {"tool_choice": "required"}, "tool_choice", ["needs tools"]),
        (ChatAsked, {"tools": TOOLS, "tool_choice": NAMED}, "tool_choice", ["snow", "one of the tools, rain"]),
        (
            ChatAsked,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            ["required"],
        ),
        (ChatAsked, {"parallel_tool_calls": "no"}, "parallel_tool_calls", ["boolean"]),
        (ChatAsked, {"response_format": "json"}, "response_format", ["json"]),
        (ChatAsked, {"response_format": {"type": "xml"}}, "response_format.type", ["xml", "json_schema"]),
        (ChatAsked, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["json_schema"]),
        (
            ChatAsked,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
            ["[]", "dictionary"],
        ),
        (
            ChatAsked,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            ["excludes structured_outputs"],
        ),
        (CompletionAsked, {"structured_outputs": {}}, "structured_outputs", ["at least 1"]),
        (CompletionAsked, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", ["at most 1"]),
        (
            CompletionAsked,
            {"structured_outputs": {"json": 3}},
            "structured_outputs.json",
            ["3", "dictionary"],
        ),
        (CompletionAsked, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", ["at least 1"]),
        (CompletionAsked, {"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices", ["not permitted"]),
        (ChatAsked, dict.fromkeys("zyxwvutsrqpfedcbah", 1), "a", ["'a' is an unknown parameter"]),
    ],
)
def test_refusals(kind, change, param, words):
    """The value, and what was expected: any of the possible types, or a value of the right type."""
    error = refusal(kind, change)
    assert error.param == param and all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (CompletionAsked, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
        (ChatAsked, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [], "annotations": []}]}),
        (ChatAsked, {"tools": [], "response_format": {"type": "text"}, "frequency_penalty": 0, "user": "me"}),
        (ChatAsked, {"stop": None, "store": False, "stream_options": None, "prompt_cache_key": "x"}),
    ],
)
def test_neutral_values_are_accepted(kind, change):
    assert refusal(kind, change) is None


@pytest.mark.parametrize(
    "change",
    [
        '"seed": 1' + "0" * 9000,
        '"logit_bias": {"1' + "0" * 9000 + '": 1}',
        '"' + "y" * 2000 + '": 1',
    ],
    ids=["digits", "token", "long name"],
)
def test_values_that_are_too_large(change):
    assert refusal(CompletionAsked, f'{{"model": "m", "prompt": "x", {change}}}'.encode())


def test_parameters_are_those_of_openai():
    """And a few more, of which subclasses declare ``stream``. Each neutral parameter is one of OpenAI's API."""
    own = {"top_k", "min_p", "repetition_penalty", "structured_outputs", "protect", "stream"}
    assert set(ChatAsked.model_fields) - ChatAsked.known == own | {"chat_template_kwargs"}
    assert set(CompletionAsked.model_fields) - CompletionAsked.known == own
    assert set(NEUTRAL) <= ChatAsked.known | CompletionAsked.known
