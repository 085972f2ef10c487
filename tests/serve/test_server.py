"""The server in this process, with OpenAI's client."""

import asyncio
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
import uvicorn  # noqa: E402
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

import ag  # noqa: E402
from ag.commands.serve import ServeConfig  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.serve import Request, Scheduler, answers, app, entrance  # noqa: E402
from ag.serve.metrics import Metrics  # noqa: E402
from ag.serve.scheduler import StoppedError  # noqa: E402
from ag.serve.server import Server, listen  # noqa: E402
from tests.support.asked import KEY, Connection, asked  # noqa: E402
from tests.support.byte_fallback import PIECES, bytes_as_tokens, fallback_tokenizer  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer, said  # noqa: E402
from tests.support.refused import refuses  # noqa: E402
from tests.support.served import alone  # noqa: E402

TOKENIZER = byte_tokenizer()
POLICY = ag.policy("h2o", 0.5)
MEMORY = 200 * 2112  # blocks for four prompts of 100 tokens
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
NEVER = {"logit_bias": {"2": -100}}  # no end before the last token


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return tiny_llama(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def served(tiny):
    with asked(Scheduler(tiny, byte_tokenizer(), POLICY, ag.Pool(tiny, MEMORY)), answer_tokens=90) as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    return served[0]


@pytest.fixture
def scheduler(tiny):
    return Scheduler(tiny, byte_tokenizer(), "full", ag.Pool(tiny, 2**22), queue=2, batch=1)


def answer_of(model, prompt, tokens):
    """Text of the greedy answer of ``model.generate``."""
    return said(alone(model, POLICY, Request(tokens=TOKENIZER(prompt)["input_ids"], max_tokens=tokens)))


def events(answer):
    """The events of a stream, and whether it ended with [DONE]."""
    fields = [x.removeprefix("data: ") for x in answer.text.split("\n\n") if x.startswith("data: ")]
    return [json.loads(x) for x in fields if x != "[DONE]"], fields[-1] == "[DONE]"


def idle(scheduler):
    """Wait until no answer is open and only prefixes take blocks."""
    end = time.monotonic() + 60
    while scheduler.busy or scheduler.pool.free + scheduler.snapshot().prefix_blocks != scheduler.pool.capacity:
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- answers


def test_a_text_is_continued_as_by_the_model_alone(tiny, client):
    for prompt in ("hello there", "What is it? " * 9):
        fields = {"model": "tiny", "max_tokens": 9, "temperature": 0}
        whole = client.completions.create(prompt=prompt, **fields)
        ids, usage = TOKENIZER(prompt)["input_ids"], {"stream_options": {"include_usage": True}}
        *pieces, last = client.completions.create(prompt=ids, stream=True, **usage, **fields)
        assert whole.choices[0].text == "".join(piece.choices[0].text for piece in pieces) == answer_of(tiny, prompt, 9)
        assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "length"
        assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        for found in (whole.usage, last.usage):
            assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (len(ids), 9, len(ids) + 9)


def test_a_conversation_is_put_into_the_template(tiny, client):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Yes?", "refusal": None},
        {"role": "user", "content": "Go on."},
    ]
    expected = answer_of(tiny, "system: Be kind.\nuser: Hello\nthere\nassistant: Yes?\nuser: Go on.\nassistant:", 12)
    fields = {"model": "tiny", "messages": messages, "temperature": 0}
    [choice] = client.chat.completions.create(**fields, max_completion_tokens=12).choices
    assert choice.message.model_dump(exclude_unset=True) == {"role": "assistant", "content": expected, "refusal": None}
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**fields, max_tokens=12, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected
    assert pieces[0].delta.role == "assistant" and pieces[-1].finish_reason == "length"
    assert client.chat.completions.create(**fields).usage.completion_tokens == 90  # answer_tokens


def test_answers_have_the_types_of_openai(served):
    """Strictly, unlike its client."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True}
    for body, kind, whole, piece in (
        (BODY | {"logprobs": 2}, "completions", Completion, None),
        (chat | {"top_logprobs": 2, "n": 2}, "chat/completions", ChatCompletion, ChatCompletionChunk),
    ):
        whole.model_validate(served[1].post(f"/v1/{kind}", json=body).json(), strict=True)
        pieces, ended = events(served[1].post(f"/v1/{kind}", json=body | {"stream": True}))
        assert ended and {found["object"] for found in pieces} <= {"text_completion", "chat.completion.chunk"}
        for found in pieces if piece else ():
            piece.model_validate(found, strict=True)


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(tiny, served):
    client, _, service = served
    text = answer_of(tiny, "tell me", 60)
    before = text[: text.index(text[20:23])]
    ended = service.scheduler.counts.num_ended["stop"]
    fields = {
        "model": "tiny",
        "prompt": "tell me",
        "max_tokens": 60,
        "temperature": 0,
        "stop": ["nowhere", text[20:23]],
    }
    whole = client.completions.create(**fields)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (before, "stop")
    assert whole.usage.completion_tokens < 60
    pieces = [piece.choices[0] for piece in client.completions.create(**fields, stream=True, logprobs=0)]
    assert "".join(piece.text for piece in pieces) == before and pieces[-1].finish_reason == "stop"
    offsets = [offset for piece in pieces for offset in piece.logprobs.text_offset]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(before)
    assert service.scheduler.counts.num_ended["stop"] == ended + 2  # not as cancelled answers


def test_what_else_ends_an_answer(tiny, client):
    """Tokens by their ids, and texts that become part of the answer; neither before ``min_tokens``."""
    ids = alone(tiny, POLICY, Request(tokens=TOKENIZER("tell me")["input_ids"], max_tokens=30))
    place = next(place for place in range(6, 30) if ids[place] not in ids[:place])
    fields = {"model": "tiny", "prompt": "tell me", "max_tokens": 30, "temperature": 0}
    more = {"return_token_ids": True, "stop_token_ids": [ids[place]]}
    [whole] = client.completions.create(**fields, extra_body=more).choices
    assert (whole.text, whole.finish_reason) == (said(ids[:place]), "stop")
    assert (whole.token_ids, whole.prompt_token_ids) == (ids[: place + 1], TOKENIZER("tell me")["input_ids"])
    [later] = client.completions.create(**fields, extra_body=more | {"min_tokens": place + 2}).choices
    assert later.token_ids[:place] == ids[:place] and ids[place] not in later.token_ids[place : place + 2]
    text = said(ids)
    stop, end = text[5:7], text.index(text[5:7]) + 2
    fields |= {"stop": stop}
    whole = client.completions.create(**fields, logprobs=0, extra_body={"return_token_ids": True})
    [choice], count = whole.choices, whole.usage.completion_tokens
    assert choice.token_ids == ids[:count] and (choice.text, said(choice.token_ids)[:end]) == (
        text[: end - 2],
        text[:end],
    )
    assert choice.logprobs.text_offset[-1] < len(choice.text)  # those of the stop text have none
    pieces = client.completions.create(**fields, stream=True, extra_body={"return_token_ids": True})
    assert [token for piece in pieces for token in piece.choices[0].token_ids] == choice.token_ids
    more = {"include_stop_str_in_output": True}
    pieces = client.completions.create(**fields, stream=True, extra_body=more)
    assert "".join(piece.choices[0].text for piece in pieces) == text[:end]
    [later] = client.completions.create(**fields, extra_body=more | {"min_tokens": 25}).choices
    assert later.text.startswith(said(ids[:25]))


def test_sampled_answers(client):
    fields = {"model": "tiny", "prompt": "once", "max_tokens": 12, "temperature": 1.3, "top_p": 0.9, "n": 2, "seed": 4}
    more = {"top_k": 60, "min_p": 0.001, "repetition_penalty": 1.1}
    first, again = (client.completions.create(**fields, extra_body=more).choices for _ in range(2))
    assert [choice.text for choice in first] == [choice.text for choice in again]
    assert first[0].text != first[1].text and [choice.index for choice in first] == [0, 1]
    pieces = [piece.choices[0] for piece in client.completions.create(**fields, stream=True, extra_body=more)]
    for number in (0, 1):
        assert "".join(piece.text for piece in pieces if piece.index == number) == first[number].text


def test_log_probabilities_are_those_of_the_model(tiny, client):
    """Of the model under the policy."""
    ids = torch.tensor([[*TOKENIZER("user: abc\nassistant:")["input_ids"], 70]])
    cache = ag.EvictionCache(tiny, POLICY)
    with torch.no_grad():
        known = [tiny(part, past_key_values=cache).logits[0, -1] for part in (ids[:, :-1], ids[:, -1:])]
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    fields |= {"logit_bias": {"70": 100}, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**fields)
    for logits, found in zip(known, answer.choices[0].logprobs.content, strict=True):
        logprobs = logits.float().log_softmax(-1)
        assert found.token == TOKENIZER.decode([70]) and bytes(found.bytes).decode() == found.token
        assert found.logprob == pytest.approx(float(logprobs[70]), rel=1e-4)
        best = logprobs.topk(3)
        assert [other.logprob for other in found.top_logprobs] == pytest.approx(best.values.tolist(), rel=1e-4)
        assert [other.token for other in found.top_logprobs] == [TOKENIZER.decode([x]) for x in best.indices.tolist()]


# ---- tokenizers with byte fallback, as of Llama 2, Mistral and Gemma

SIZE = len(fallback_tokenizer())
#: Tokens with the same text, with a part of a character, and with a space in front.
ALIKE = [*bytes_as_tokens(b"A\xe4"), *(SIZE - len(PIECES) + PIECES.index(piece) for piece in ("A", "the", "▁the"))]


@pytest.fixture(scope="module")
def fallback(tiny_llama):
    model = tiny_llama(vocab_size=SIZE, num_hidden_layers=1, eos_token_id=2)
    with asked(Scheduler(model, fallback_tokenizer(), "full", ag.Pool(model, 2**22))) as found:
        yield found


@pytest.mark.parametrize("best", [0, 20])
def test_each_of_the_most_probable_tokens_has_its_name(fallback, best):
    """Also tokens with the same text, and the chosen one, under its text."""
    client, _, service = fallback
    fields = {"prompt": bytes_as_tokens(b"xyz"), "max_tokens": 3, "temperature": 0, "logprobs": best}
    for chosen in ALIKE:
        [choice] = client.completions.create(model="tiny", logit_bias={str(chosen): 100}, **fields).choices
        request = Request(tokens=fields["prompt"], max_tokens=3, logprobs=best, logit_bias={chosen: 100.0})
        [stream] = service.scheduler.submit(request)
        names, logprobs, named = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        for place, token in enumerate(stream):
            values = dict(token.top_logprobs) | {token.id: token.logprob}
            # as near as two batches of other sizes are
            assert [*named[place].values()] == pytest.approx([*values.values()], rel=1e-4)
            assert named[place][names[place]] == logprobs[place] == pytest.approx(token.logprob, rel=1e-4)
        assert place == 2


@pytest.mark.parametrize("end", [{"max_tokens": 2}, {"max_tokens": 3, "stop_token_ids": [2]}, {"stop": "</s>"}])
def test_half_a_character_at_the_end_of_an_answer(fallback, end):
    """It is U+FFFD, whole and in a stream, in each of several answers; with log-probabilities it has its bytes."""
    client, http, service = fallback
    service.scheduler.tokenizer.chat_template = "{{ messages[0].content }}"
    first, half = bytes_as_tokens(b"a\xe4")
    tokens = [first, half, 2]
    grammar = {"grammar": "start: " + " ".join(f"<[{token}]>" for token in tokens)}
    common = {"model": "tiny", "temperature": 0, "n": 2, "max_tokens": 3, "structured_outputs": grammar} | end
    chat = common | {"messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 20}
    for path, body in (("completions", common | {"prompt": "A", "logprobs": 2}), ("chat/completions", chat)):
        whole = http.post(f"/v1/{path}", json=body).json()["choices"]
        pieces, _ = events(http.post(f"/v1/{path}", json=body | {"stream": True}))
        for choice in whole:
            streamed = [x for piece in pieces for x in piece["choices"] if x["index"] == choice["index"]]
            if path == "completions":
                assert choice["text"] == "".join(x["text"] for x in streamed) == "a\ufffd"
                continue
            assert choice["message"]["content"] == "a\ufffd"
            assert "".join(x["delta"].get("content", "") for x in streamed) == "a\ufffd"
            content = choice["logprobs"]["content"]
            assert content == [one for x in streamed if x.get("logprobs") for one in x["logprobs"]["content"]]
            assert bytes(byte for one in content[:2] for byte in one["bytes"]) == b"a\xe4"
            assert all(other["bytes"] for one in content for other in one["top_logprobs"])


def test_half_a_character_at_the_end_of_a_prompt(fallback):
    prompt = bytes_as_tokens(b"xy\xe4\xb8")
    answer = fallback[0].completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "xy\ufffd"


# ---- refusals


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": [1, 2, 400]}, "prompt", ["259"]),
        ({"prompt": [1, -1], "echo": True}, "prompt", ["-1", "259"]),
        ({"logit_bias": {"7": 1, "260": 1}}, "logit_bias", ["260", "259"]),
        ({"prompt": ["a"] * 257}, "prompt", ["257 prompts: expected at most 256"]),
        ({"prompt": ["a", ""]}, "prompt[1]", ["empty"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"n": 65}, "n", ["65", "64"]),
        ({"ag": {"protect": [[0, 9]]}}, "ag.protect", ["[0, 40]", "5 tokens"]),
        ({"prompt": "x" * 400, "max_tokens": 90, "n": 4}, "max_tokens", ["pool", "shorten"]),
        ({"min_tokens": 5}, "min_tokens", ["5", "at most max_tokens=4"]),
    ],
)
def test_refused_parameters(client, change, param, words):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**BODY | {"extra_body": change, "stream": True})
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
    assert all(word in refused.value.message for word in words), refused.value.message


ALL = [*range(VOCABULARY)]


@pytest.mark.parametrize("change", [{"temperature": 0}, {"temperature": 1, "top_p": 0.5}, {"n": 2, "stream": True}])
@pytest.mark.parametrize(
    "ends",
    [{"stop_token_ids": ALL}, {"stop_token_ids": [*ALL[:2], *ALL[3:]]}, {"stop_token_ids": ALL[1:], "stop": "<pad>"}],
)
def test_no_token_may_come_where_all_end_the_answer(served, ends, change):
    """By their ids, as the end token of the model, or as a stop text; the only other token comes where there is one."""
    client, http, service = served
    body = BODY | change | ends
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**BODY, extra_body=body | {"min_tokens": 1})
    assert refused.value.param == "min_tokens" and "stop_token_ids" in refused.value.message
    with refuses(UserError, "min_tokens=1", "stop_token_ids"):
        more = {"stop_token_ids": ends["stop_token_ids"], "stop": (ends["stop"],) if "stop" in ends else ()}
        service.scheduler.submit(Request(tokens=[7], min_tokens=1, **more))
    first = client.completions.create(**BODY, extra_body=ends)
    assert (first.usage.completion_tokens, first.choices[0].finish_reason) == (1, "stop")
    rest = {"min_tokens": 2, "stop_token_ids": ALL[:70] + ALL[71:], "stream": False}
    for choice in http.post("/v1/completions", json=body | rest | {"return_token_ids": True}).json()["choices"]:
        assert choice["token_ids"][:2] == [70, 70] and choice["finish_reason"] in ("stop", "length")


def test_invalid_bodies(served):
    http = served[1]
    for body, status, word in [
        (b"{", 400, "JSON"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, "UTF-8"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "JSON"),
        (b'{"\\ud800": 1}', 400, "JSON"),
        (b"", 400, "object"),
        (b"[]", 400, "object"),
        (b"[" * 100_000, 400, "JSON"),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, str(2**20)),
    ]:
        answer = http.post("/v1/completions", content=body)
        assert answer.status_code == status and word in answer.json()["error"]["message"]
    assert http.post("/v1/completions", json=BODY, headers={"Content-Type": "text/plain"}).status_code == 415
    for path in ("/nothing", "/docs", "/redoc", "/openapi.json"):
        assert http.get(path).json()["error"]["message"] == "Not Found."


def test_models_and_keys(served):
    client, http, _ = served
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "ag"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(**BODY | {"model": "gpt-4"})
    assert refused.value.code == "model_not_found"
    for right in ("Bearer", "bearer", "BEARER", "bearer "):
        assert http.get("/v1/models", headers={"Authorization": f"{right} {KEY}"}).status_code == 200
    for wrong in ("", "Bearer", KEY, f"Basic {KEY}", f"Bearer {KEY.upper()}", f"Bearer{KEY}", b"Bearer \xe4"):
        answer = http.get("/v1/models", headers={"Authorization": wrong})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for path, status in {"/metrics": 401, "/live": 401, "/health": 200, "/": 200}.items():
        for method in ("GET", "HEAD"):
            assert http.request(method, path, headers={"Authorization": ""}).status_code == status


@pytest.mark.parametrize(("length", "most"), [(1, 30), (11, 29), (40, 0)])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_longest_answer_is_the_one_that_is_named(tiny_llama, name, length, most):
    """A refusal names the parameter with the largest accepted value, or a prompt that is too long."""
    model = tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=40)
    scheduler = Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**20))
    scheduler.tokenizer.chat_template = "{{ messages[0].content }}"
    chat, words = name == "max_completion_tokens", "x" * length
    body = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with asked(scheduler, answer_tokens=30) as (_, http, _):
        limits = (10**9, most + 1, max(most, 1))
        *refused, last = (http.post(path, json=body | NEVER | {"model": "tiny", name: limit}) for limit in limits)
    if most:
        assert (last.status_code, last.json()["usage"]["completion_tokens"]) == (200, most)
    expected = f"expected at most {most} " if most else f"has {length} tokens: expected fewer than 40,"
    for answer in [*refused, *([] if most else [last])]:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name if most else [*body][0])
        assert expected in error["message"] and (most or error["code"] == "context_length_exceeded")


def test_a_model_without_a_template_takes_texts_alone(scheduler):
    scheduler.tokenizer.chat_template = None
    with asked(scheduler) as (client, _, _), pytest.raises(openai.BadRequestError, match="/v1/completions"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def test_protected_tokens(scheduler, monkeypatch):
    """Spans of a text; parts of a chat by the client, else by the server."""
    requests, submit = [], scheduler.submit
    monkeypatch.setattr(scheduler, "submit", lambda request, hear: requests.append(request) or submit(request, hear))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 2}
    with asked(scheduler, protect=["system"]) as (client, _, _):
        client.completions.create(**BODY, extra_body={"ag": {"protect": [[0, 2], [4, 5]]}})
        for more in ({}, {"protect": ["template"]}, {"protect": []}):
            client.chat.completions.create(**chat, extra_body={"ag": more})
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**chat, extra_body={"ag": {"protect": ["user"]}})
    assert refused.value.param == "ag.protect[0]"
    # system: Be kind.\nuser: Hi\nassistant:
    spans = [((0, 2), (4, 5)), ((8, 16),), ((0, 8), (16, 23), (25, 36)), ()]
    assert [request.protect for request in requests] == spans


# ---- what goes wrong


def test_a_failed_scheduler_ends_every_answer(scheduler, monkeypatch, caplog):
    """Whole answers and streams end with an error, later requests are refused, and health is 503."""

    def broken():
        while len(scheduler._waiting) < 2:
            time.sleep(0.01)
        raise RuntimeError("text of a prompt")

    monkeypatch.setattr(scheduler, "step", broken)
    with asked(scheduler) as (_, http, _), ThreadPoolExecutor(2) as pool:
        post = lambda stream: http.post("/v1/completions", json=BODY | {"stream": stream})  # noqa: E731
        whole, stream = pool.map(post, (False, True))
        later, health = post(False), http.get("/health")
    assert [whole.status_code, later.status_code, health.status_code] == [503] * 3
    assert stream.status_code == 200 and events(stream)[0][-1]["error"]["type"] == "server_error"
    assert "RuntimeError at test_server.py:" in caplog.text and "text of a prompt" not in caplog.text


def test_an_error_ends_one_request_only(scheduler, monkeypatch, caplog):
    """The client and the log do not see its text; the next request is answered."""

    def wrong(*args, **fields):
        raise KeyError("text of a prompt")

    with asked(scheduler) as (client, http, _):
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.model, "forward", wrong)
            failed = http.post("/v1/completions", json=BODY)
        assert client.completions.create(**BODY).usage.completion_tokens == 4
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert "text of a prompt" not in failed.text + caplog.text and "KeyError at test_server.py:" in caplog.text


def test_time_limits(tiny_llama):
    """A request that waits too long is refused, an answer that takes too long is cut."""
    model, now = tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=2**14), [0.0]
    scheduler = Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**24), batch=1, clock=lambda: now[0])
    fields = BODY | NEVER | {"max_tokens": 10_000}
    limits = {"answer_tokens": 10_000, "wait_seconds": 5, "answer_seconds": 50}
    with asked(scheduler, **limits) as (_, http, _), ThreadPoolExecutor(2) as pool:
        first = pool.submit(http.post, "/v1/completions", json=fields)
        while not scheduler.snapshot().running:
            time.sleep(0.01)
        second = pool.submit(http.post, "/v1/completions", json=fields)
        while not scheduler.snapshot().num_waiting:
            time.sleep(0.01)
        now[0] = 6.0
        waited = second.result()
        assert not first.done()
        now[0] = 51.0
        cut = first.result().json()
    with asked(Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**20)), answer_seconds=0) as (_, http, _):
        empty = http.post("/v1/completions", json=BODY).json()["choices"][0]
    assert (empty["text"], empty["finish_reason"]) == ("", "length")  # cut before its first token
    assert (waited.status_code, "5" in waited.json()["error"]["message"]) == (503, True)
    assert waited.headers["Retry-After"]
    assert cut["choices"][0]["finish_reason"] == "length" and 0 < cut["usage"]["completion_tokens"] < 10_000


def test_a_stream_that_waits_is_told_so(scheduler, monkeypatch):
    """By comments, which clients skip; a whole answer has none."""
    monkeypatch.setattr(answers, "SILENCE_SECONDS", 0.02)
    step = scheduler.step
    monkeypatch.setattr(scheduler, "step", lambda: (time.sleep(0.1), step()))
    with asked(scheduler) as (client, http, _):
        stream = http.post("/v1/completions", json=BODY | {"stream": True})
        whole = client.completions.create(**BODY)
    assert ": waiting" in stream.text.split("\n\n")
    assert all(x == ": waiting" or x.startswith("data: ") for x in stream.text.split("\n\n")[:-1])
    assert "".join(x["choices"][0]["text"] for x in events(stream)[0]) == whole.choices[0].text


def in_loop(scheduler, work):
    """Run ``work(service, app)`` in an event loop, while the service runs."""

    async def run():
        service = app.Service(scheduler, "tiny", ServeConfig(api_key=KEY))
        made = service.app()
        async with made.router.lifespan_context(made):
            return await asyncio.wait_for(work(service, made), 60)

    return asyncio.run(run())


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


def test_a_slow_reader_does_not_block_the_scheduler(scheduler):
    """Its answer is generated and its blocks are freed before it reads; then it reads everything."""

    async def work(service, made):
        slow = Connection(made, BODY | NEVER | {"max_tokens": 60, "stream": True}, reads=False)
        pool = scheduler.pool
        await until(lambda: scheduler.counts.num_ended["length"] == 1 and pool.free == pool.capacity)
        assert len(slow.sent) == 1
        slow.reads.set()
        await slow.answer
        return b"".join(message.get("body", b"") for message in slow.sent)

    body = in_loop(scheduler, work)
    assert body.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in body


def test_a_client_that_leaves_ends_its_answer(tiny):
    """While its answer is generated, while it is queued, and before its body has arrived."""
    scheduler = Scheduler(tiny, byte_tokenizer(), "full", ag.Pool(tiny, 2**22), batch=1)
    fields = BODY | NEVER | {"max_tokens": 400}

    async def work(service, made):
        running, waiting = Connection(made, fields | {"stream": True}), Connection(made, fields)
        coming = Connection(made, b"{", whole=False)
        await until(
            lambda: scheduler.counts.tokens > 3 and scheduler.snapshot().num_waiting and service.entrance.open == 3
        )
        for left in (coming, waiting, running):
            left.leave()
            await left.answer
        last = Connection(made, BODY)
        await last.answer
        await until(lambda: scheduler.counts.num_ended.total() == 3)
        return last.status, service.entrance.open

    assert in_loop(scheduler, work) == (200, 0)
    assert scheduler.counts.num_ended == {"cancelled": 2, "length": 1} and scheduler.counts.tokens < 400
    idle(scheduler)


def test_requests_that_come_slowly_are_as_many_as_may_be(scheduler, monkeypatch):
    """Then further ones are refused, as by a full queue. A body that takes too long is refused."""

    async def work(service, made):
        slow = [Connection(made, json.dumps(BODY).encode(), whole=False) for _ in range(6)]  # twice queue and batch
        await until(lambda: service.entrance.open == 6)
        more = Connection(made, BODY)
        await more.answer
        slow[0].come(b" ", whole=True)
        for each in slow[1:]:
            each.leave()
        for each in slow:
            await each.answer
        monkeypatch.setattr(entrance, "BODY_SECONDS", 0.05)
        late = Connection(made, b"{", whole=False)
        await late.answer
        return [each.status for each in (*slow, more, late)], dict(more.sent[0]["headers"]), more.sent[1]["body"]

    statuses, headers, body = in_loop(scheduler, work)
    assert statuses == [200, *[499] * 5, 429, 408] and int(headers[b"retry-after"]) > 0
    assert json.loads(body)["error"]["code"] == "queue_full"


def test_what_signals_do(scheduler):
    """The first one lets answers end, within a time limit; the second one ends the server at once."""
    service = app.Service(scheduler, "tiny", ServeConfig())
    made, service.entrance.open = Server(service, uvicorn.Config(service.app())), 1
    assert not asyncio.run(made.on_tick(1))
    made.handle_exit(signal.SIGTERM, None)
    assert service.entrance.draining and not asyncio.run(made.on_tick(1))
    made._end = 0.0  # the time limit is over
    assert asyncio.run(made.on_tick(1)) and not made.force_exit
    with refuses(StoppedError, "stopping"):
        scheduler.submit(Request(tokens=[7]))
    made.handle_exit(signal.SIGTERM, None)
    assert made.force_exit


def test_the_end_of_the_server_cuts_answers_to_what_was_written(scheduler, caplog):
    """Whole and in a stream, also of several answers; a request without a token yet is refused."""
    caplog.set_level("INFO", "ag.serve")

    async def work(service, made):
        body = BODY | NEVER | {"max_tokens": 450}
        whole, stream = Connection(made, body | {"n": 1}), Connection(made, body | {"stream": True})
        await until(lambda: scheduler.counts.tokens > 3 and scheduler.snapshot().num_waiting)
        scheduler.batch = 9  # the stream runs too
        await until(lambda: len(scheduler._running) == 2 and min(x.num_generated for x in scheduler._running) > 3)
        scheduler.batch = 2
        several = Connection(made, body | {"prompt": ["a", "b"], "n": 1})
        await until(lambda: scheduler.snapshot().num_waiting)
        signalled = Server(service, uvicorn.Config(made))
        signalled.handle_exit(signal.SIGTERM, None)
        assert not await signalled.on_tick(1)
        signalled._end = 0.0
        assert await signalled.on_tick(1) and signalled.cut == 3
        for each in (whole, stream, several):
            await each.answer
        return [
            (each.status, b"".join(message.get("body", b"") for message in each.sent))
            for each in (whole, stream, several)
        ]

    (whole, text), (stream, pieces), (several, error) = in_loop(scheduler, work)
    assert (whole, stream, several) == (200, 200, 503)
    answer = json.loads(text)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["text"]
    assert 3 < answer["usage"]["completion_tokens"] < 450
    *_, last = [json.loads(x) for x in pieces.decode().replace("data: ", "").split("\n\n") if x and x != "[DONE]"]
    assert last["choices"][0]["finish_reason"] == "length" and pieces.endswith(b"data: [DONE]\n\n")
    assert json.loads(error)["error"]["type"] == "server_error"
    assert scheduler.counts.num_ended == {"timeout": 2, "error": 2}
    assert "SIGTERM: 3 open requests have 24 s" in caplog.text


def test_several_answers_of_which_one_has_no_token_at_the_end(tiny, caplog):
    scheduler = Scheduler(tiny, byte_tokenizer(), "full", ag.Pool(tiny, 2**22), batch=1)
    caplog.set_level("INFO", "ag.serve")

    async def work(service, made):
        asking = Connection(made, BODY | NEVER | {"prompt": ["a", "b"], "max_tokens": 450})
        await until(lambda: scheduler.counts.tokens > 3)
        scheduler.stop("the end")
        await asking.answer
        return asking.status, json.loads(asking.sent[1]["body"])

    status, answer = in_loop(scheduler, work)
    first, second = answer["choices"]
    assert status == 200 and first["text"] and (second["text"], second["finish_reason"]) == ("", "length")
    assert "1 timeout, 1 error" in caplog.text


def test_the_log_has_a_line_for_each_request(tiny, caplog):
    """With its id: what was answered and how it ended, or the status of a refusal, and nothing of the request."""
    scheduler = Scheduler(tiny, byte_tokenizer(), "full", ag.Pool(tiny, 2**22), batch=4)
    caplog.set_level("INFO", "ag.serve")

    def line(ask, name="id"):
        caplog.clear()
        ask({"X-Request-Id": name})
        (record,) = [record.getMessage() for record in caplog.records if record.name == "ag.serve"]
        assert "secret" not in record
        return record

    with asked(scheduler) as (_, http, _):

        def post(change, **more):
            return lambda named: http.post("/v1/completions", json=BODY | change, headers=named | more)

        answered = line(post({}))
        several = line(post(NEVER | {"n": 3, "stream": True}))
        refused = {
            "400 invalid_value": post({"temperature": "secret"}),
            "400 unknown_parameter": post({"secret": 1}),
            "400 invalid_request_error": post({"prompt": [1, 400]}),
            "401 invalid_api_key": post({}, Authorization="Bearer secret"),
            "404 model_not_found": post({"model": "secret"}),
            "404 invalid_request_error": lambda named: http.get("/secret", headers=named),
            "415 invalid_request_error": post({}, **{"Content-Type": "text/secret"}),
        }
        for expected, ask in refused.items():
            assert line(ask) == f"id: refused with {expected}"
        assert line(post({"n": 0}), "a b\tsecre") == "a?b?secre: refused with 400 invalid_value"
    assert answered.startswith("id: 5 tokens read, 4 written, ") and answered.endswith(" s, length")
    assert several.startswith("id: 5 tokens read, 12 written, ") and several.endswith(" s, 3 length")


def test_the_log_says_how_answers_ended_that_were_not_complete(tiny, monkeypatch, caplog):
    """They were cancelled, as their client left, or an error ended them."""
    scheduler = Scheduler(tiny, byte_tokenizer(), "full", ag.Pool(tiny, 2**22))
    caplog.set_level("INFO", "ag.serve")
    body = BODY | NEVER | {"max_tokens": 450, "n": 3, "stream": True}

    async def work(service, made):
        left = Connection(made, body)
        await until(lambda: scheduler.counts.tokens > 9)
        left.leave()
        await left.answer
        await until(lambda: not scheduler.busy)
        failing = Connection(made, body)
        await until(lambda: scheduler._running)
        monkeypatch.setattr(scheduler._default_batch, "step_runner", None)
        await failing.answer

    in_loop(scheduler, work)
    lines = [record.getMessage() for record in caplog.records if record.name == "ag.serve"]
    assert [line.rpartition(" s, ")[2] for line in lines if "written" in line] == ["3 cancelled", "3 error"]
    assert lines[-1].endswith(": broken off with 500 server_error") and not [line for line in lines if "open" in line]


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with refuses(UserError, f"port={port}", "port=0"):
            listen("127.0.0.1", port)
    with refuses(UserError, "host=192.0.2.1", "port=0"):  # of no machine
        listen("192.0.2.1", 0)


def figures(http):
    lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("stream", [False, True])
def test_figures_grow_by_what_was_asked(served, stream):
    """Each prompt by its tokens, its answers and their limit; each answer by its reason and its tokens."""
    _, http, _ = served
    before, ids = figures(http), TOKENIZER("hello")["input_ids"]
    for change in ({"prompt": ["hello", "Hi"], "n": 3}, {"n": 2, "stop_token_ids": ALL}, {"max_tokens": 0}):
        assert http.post("/v1/completions", json=BODY | NEVER | change | {"stream": stream}).status_code == 200
    for change, status in (({"n": 0}, 400), ({"model": "other"}, 404), ({"prompt": "x" * 400, "n": 9}, 400)):
        assert http.post("/v1/completions", json=BODY | change).status_code == status
    grown = {name: value - before[name] for name, value in figures(http).items() if name.startswith("ag_request")}
    sums = {
        "params_n": (4, 3 + 3 + 2 + 1),
        "params_max_tokens": (4, 4 + 4 + 4 + 0),
        "prompt_tokens": (4, 3 * len(ids) + len(TOKENIZER("Hi")["input_ids"])),
        "generation_tokens": (9, 6 * 4 + 2 * 1),
    }
    for name, (count, total) in sums.items():
        assert (grown[f"ag_request_{name}_count"], grown[f"ag_request_{name}_sum"]) == (count, total), name
    assert grown['ag_request_params_n_bucket{le="1.0"}'] == 1 and grown['ag_request_params_n_bucket{le="5.0"}'] == 4
    assert [grown[f'ag_request_success_total{{finished_reason="{name}"}}'] for name in ("stop", "length")] == [2, 7]


def test_what_an_answer_saved(served):
    """In ``usage`` of each kind of answer, and in the figures while it is written; of several answers the sum."""
    client, http, service = served
    saved = [
        http.post("/v1/completions", json=BODY | NEVER | {"prompt": "x" * 80, "n": n}).json()["usage"]["ag"]
        for n in (1, 2)
    ]
    assert saved[0]["kept_share"] == saved[1]["kept_share"] == round((40 + 3) / 83, 4)
    assert 0 < 2 * saved[0]["saved_bytes"] == saved[1]["saved_bytes"]
    fields = {"model": "tiny", "prompt": "x" * 80, "max_tokens": 4, "temperature": 0, "extra_body": NEVER}
    *_, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert last.usage.ag == saved[0]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 80}], "max_tokens": 4}
    whole = client.chat.completions.create(**chat).usage
    assert whole.ag["saved_bytes"] > 0 and 0.5 <= whole.ag["kept_share"] < 0.6

    scheduler = Scheduler(service.scheduler.model, TOKENIZER, POLICY, ag.Pool(service.scheduler.model, MEMORY))
    metrics = Metrics(scheduler.snapshot)
    read = lambda name: next(x for x in metrics.collect() if x.name == name).samples[0].value  # noqa: E731
    assert (read("ag_kept_share"), read("ag_saved_bytes")) == (1, 0)
    [stream] = scheduler.submit(Request(tokens=TOKENIZER("x" * 80)["input_ids"], max_tokens=5, logit_bias={2: -100.0}))
    for _ in range(3):
        scheduler.step()
    assert read("ag_kept_share") == (40 + 3) / 83 and read("ag_saved_bytes") == saved[0]["saved_bytes"]
    assert scheduler.snapshot().memory == stream.memory


def test_what_prometheus_and_the_page_read(served):
    client, http, service = served
    before = http.get("/live").json()
    client.completions.create(**BODY)
    idle(service.scheduler)
    now, text = http.get("/live").json(), http.get("/metrics").text
    assert (now["model"], now["policy"], now["status"], now["running"]) == ("tiny", "h2o 0.5", "ok", [])
    assert now["memory"] == {"num_tokens": 0, "num_held": 0.0, "saved_bytes": 0}
    assert now["tokens"] == before["tokens"] + 4 and now["num_ended"] == before["num_ended"] + 1
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["ag_answer_tokens_total"]) == now["tokens"]
    assert float(figures['ag_blocks{state="free"}']) == now["free"] and 'ag_answers{state="waiting"}' in figures
    assert float(figures["ag_time_to_first_token_seconds_count"]) == now["num_started"]
    assert float(figures['ag_answers_ended_total{reason="length"}']) > 0 and "process_open_fds" in figures
