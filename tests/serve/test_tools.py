"""Chats with tools and thoughts: what reaches the template, what is refused, and prefix sharing across turns."""

import json

import pytest

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Scheduler  # noqa: E402
from ag.serve.stream import Detokenizer  # noqa: E402
from tests.support.asked import asked  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer  # noqa: E402
from tests.support.reasoning import CHAT, TEMPLATE, TOOLS, call  # noqa: E402
from tests.support.served import alone  # noqa: E402

POLICY = ag.policy("snapkv", 40, window=8)


@pytest.fixture
def ask(tiny_llama):
    """`ask(*bodies, template)`: the answers in order, the requests, and the scheduler."""

    def ask(*bodies, template=TEMPLATE):
        model = tiny_llama(vocab_size=VOCABULARY, eos_token_id=2, pad_token_id=0)
        scheduler, requests = Scheduler(model, byte_tokenizer(), POLICY, ag.Pool(model, 2**22)), []
        scheduler.tokenizer.chat_template = template
        submit = scheduler.submit
        scheduler.submit = lambda request, hear: requests.append(request) or submit(request, hear)
        with asked(scheduler) as (_, http, _):
            fields = {"model": "tiny", "temperature": 0, "max_tokens": 8}
            answers = [http.post("/v1/chat/completions", json=fields | body) for body in bodies]
        return answers, requests, scheduler

    return ask


def said(request):
    return byte_tokenizer().decode(request.tokens)


def as_openai(messages):
    """Messages as OpenAI's clients send them: arguments are JSON, and missing fields are null."""
    fields = [{"content": None, "refusal": None, "annotations": []} | message for message in messages]
    for message in fields:
        if "tool_calls" in message:
            message["tool_calls"] = call(json.dumps(message["tool_calls"][0]["function"]["arguments"]))
    return fields


def test_the_template_is_told_of_tools_calls_and_thoughts(ask):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    body = {"messages": as_openai(CHAT[:4]), "tools": TOOLS}
    changes = [{}, {"tool_choice": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
    answers, requests, _ = ask(*(body | change for change in changes))
    assert [answer.status_code for answer in answers] == [200] * 3
    variables = [{"tools": TOOLS}, {}, {"tools": TOOLS, "enable_thinking": False}]
    expected = [
        tokenizer.apply_chat_template(CHAT[:4], tokenize=False, add_generation_prompt=True, **each)
        for each in variables
    ]
    assert [said(request) for request in requests] == expected
    assert [text.count("tool: rain") for text in expected] == [1, 0, 1] and expected[2].endswith("<think></think>")
    assert all('<think>I have to look.</think><call>rain {"town": "Oslo"}</call>' in text for text in expected)


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": [{"role": "system", "content": "x"}] * 2}, "messages", "one system"),
        ({"messages": [CHAT[1]] * 2 + [{"role": "tool", "content": "x"}]}, "messages", "no such call"),
    ],
)
def test_what_the_template_refuses(ask, change, param, message):
    template = TEMPLATE + (
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no such call') }}{% endif %}"
        "{% if messages[1].role == 'system' %}{{ raise_exception('one system') }}{% endif %}"
    )
    [answer], requests, _ = ask({"messages": CHAT[:2]} | change, template=template)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"] and requests == []


def test_tools_that_the_template_does_not_know_are_refused(ask):
    template = TEMPLATE.replace("tools or []", "[]")
    (wrong, right), *_ = ask(*({"messages": CHAT[:2], "tools": tools} for tools in (TOOLS, [])), template=template)
    assert [wrong.status_code, right.status_code, wrong.json()["error"]["param"]] == [400, 200, "tools"]


#: Changes of the template that leave something out, and the parameter that they leave out.
SILENT = {
    "calls": (("m.tool_calls or []", "[]"), "messages[2].tool_calls[0]"),
    "arguments": (("c.function.arguments | tojson", "'...'"), "messages[2].tool_calls[0]"),
    "later calls": (("m.tool_calls or []", "(m.tool_calls or [])[:1]"), "messages[2].tool_calls[1]"),
    "results": (
        ("{%- if m.role != 'assistant' -%}", "{%- if m.role == 'tool' %}{% elif m.role != 'assistant' -%}"),
        "messages[3].content",
    ),
}


@pytest.mark.parametrize(("name", "content"), zip(SILENT, [None, "I look."] * 2, strict=True))
def test_what_tools_were_asked_and_said_is_told_or_refused(ask, name, content):
    """Under a template that accepts a null content, and under one that does not."""
    chat = as_openai(CHAT[:4])
    chat[2] |= {"content": content, "tool_calls": chat[2]["tool_calls"] * 2}
    (old, new), param = SILENT[name]
    assert old in TEMPLATE
    for template in (TEMPLATE, TEMPLATE.replace("{{ m.content or '' }}", "{{ m.content + '' }}")):
        [answer], [request], _ = ask({"messages": chat}, template=template)
        assert answer.status_code == 200 and said(request).count('<call>rain {"town": "Oslo"}</call>') == 2
        [silent], requests, _ = ask({"messages": chat}, template=template.replace(old, new))
        error = silent.json()["error"]
        assert (silent.status_code, error["param"], requests) == (400, param, [])
        assert "chat template" in error["message"] and "content" in error["message"]


def test_turns_whose_thoughts_are_dropped_share_what_is_the_same(ask):
    """Each answer equals that of its request alone; reuse ends where the template changes the text."""
    system = {"role": "system", "content": "Be brief, and kind to all who ask about the weather by the river. " * 2}
    chat = [system, *CHAT[1:], {"role": "user", "content": "Is it windy?"}]
    # a call, its result, the next question, which drops the thoughts, and the one after it
    bodies = [{"messages": chat[:end], "tools": TOOLS} for end in (2, 4, 6, 8)]
    answers, requests, scheduler = ask(*bodies * 2)
    texts = [said(request) for request in requests]
    assert "<think>I have to look." in texts[1] and "<think>I have to look." not in texts[2]
    for answer, request in zip(answers, requests, strict=True):
        reader = Detokenizer(scheduler.vocabulary, request)  # which gives out whole characters
        expected = "".join(map(reader.add, alone(scheduler.model, scheduler.policy, request))) + reader.flush()
        assert answer.json()["choices"][0]["message"]["content"] == expected
        assert answer.json()["usage"]["prompt_tokens"] == len(request.tokens)
    shared = len("tool: rain\nsystem: ") + len(system["content"])
    assert shared > 64 and scheduler.counts.cached >= 6 * (shared // 16 * 16)
    assert scheduler.counts.prompts + scheduler.counts.cached == sum(len(request.tokens) for request in requests)
