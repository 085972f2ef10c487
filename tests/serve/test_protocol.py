"""Bodies of requests: whatever comes, a client is told what is wrong with it, or it is taken."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

from ag.serve.protocol import ApiError, ChatAsked, CompletionAsked, parse  # noqa: E402

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
RIGHT = {
    ChatAsked: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionAsked: {"model": "m", "prompt": "x"},
}


def told(kind, body):
    """Parse a body; the refusal, or None."""
    try:
        asked = parse(kind, body)
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
    assert told(kind, body).code == "invalid_json" or isinstance(json.loads(body), dict)


@pytest.mark.parametrize("kind", RIGHT)
@given(data=st.data())
def test_any_values(kind, data):
    names = st.sampled_from([*kind.model_fields, *kind.known]) | st.text(max_size=8)
    changed = data.draw(st.dictionaries(names, VALUES, max_size=4))
    refused = told(kind, json.dumps(RIGHT[kind] | changed).encode())
    assert refused is None or changed


@pytest.mark.parametrize(
    ("kind", "change", "param", "words"),
    [
        (CompletionAsked, {"prompt": []}, "prompt", ["[]", "at least 1 item"]),
        (CompletionAsked, {"prompt": [[]]}, "prompt[0]", ["[]", "at least 1 item"]),
        (CompletionAsked, {"prompt": 3}, "prompt", ["3", "a valid string or a valid list"]),
        (CompletionAsked, {"stop": ""}, "stop", ["at least 1 character"]),
        (CompletionAsked, {"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
        (CompletionAsked, {"stream_options": {"include_usage": False}}, "stream_options", ["stream=true"]),
        (
            CompletionAsked,
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            ["True", "False"],
        ),
        (CompletionAsked, {"repetition_penalty": 1e-300}, "repetition_penalty", ["1e-300", "0.01"]),
        (ChatAsked, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", ["[]", "at least 1 item"]),
        (ChatAsked, {"top_logprobs": 3}, "top_logprobs", ["3", "logprobs=true"]),
        (ChatAsked, {"logprobs": False, "top_logprobs": 1}, "top_logprobs", ["1", "logprobs=true"]),
        (ChatAsked, dict.fromkeys("zyxwvutsrqpfedcbah", 1), "a", ["'a' is no parameter"]),
    ],
)
def test_what_a_client_is_told(kind, change, param, words):
    """The value, and what was expected in its place: of every kind that it may be, or of the kind that it is."""
    error = told(kind, json.dumps(RIGHT[kind] | change).encode())
    assert error.param == param and all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (CompletionAsked, {"stream_options": {}}),
        (CompletionAsked, {"stream_options": None}),
        (CompletionAsked, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
        (CompletionAsked, {"prompt": [[1, 2]]}),
        (ChatAsked, {"top_logprobs": 0}),
        (ChatAsked, {"logprobs": True, "top_logprobs": 3}),
        (ChatAsked, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [], "annotations": []}]}),
    ],
)
def test_what_asks_for_nothing_more_is_taken(kind, change):
    assert told(kind, json.dumps(RIGHT[kind] | change).encode()) is None


@pytest.mark.parametrize(
    "change",
    [
        '"seed": 1' + "0" * 9000,
        '"logit_bias": {"1' + "0" * 9000 + '": 1}',
        '"temperature": 1e999',
        '"stop": "' + "x" * 2000 + '"',
        '"' + "y" * 2000 + '": 1',
    ],
    ids=["digits", "token", "infinite", "long stop", "long name"],
)
def test_values_that_are_too_large(change):
    assert told(CompletionAsked, f'{{"model": "m", "prompt": "x", {change}}}'.encode())
