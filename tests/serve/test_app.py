"""The app in this process: what no client can bring about from outside."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import httpx
import pytest

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("fastapi", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.serve import Batcher, app, endpoints, worker  # noqa: E402
from ag.serve.protocol import NEUTRAL, ChatAsked, CompletionAsked  # noqa: E402
from ag.serve.start import listen  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer  # noqa: E402
from tests.support.refused import refuses  # noqa: E402

ASKED = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def batcher(tiny_llama):
    model = tiny_llama(vocab_size=VOCABULARY)
    return Batcher(model, byte_tokenizer(), "full", ag.Pool(model, 2**22))


@asynccontextmanager
async def client_of(batcher, **limits):
    """A client, and the service that it asks."""
    service = app.Service(batcher, "tiny", app.Limits(**limits))
    made = service.app()
    async with made.router.lifespan_context(made):
        transport = httpx.ASGITransport(made)
        async with httpx.AsyncClient(transport=transport, base_url="http://ag") as client:
            yield client, service


def test_a_batcher_that_fails_is_told_to_all(batcher, monkeypatch, caplog):
    """Running answers end by an error, streams too; later requests are refused, and the server is not healthy."""

    def broken():
        time.sleep(0.1)
        raise RuntimeError("text of a prompt")

    async def work():
        async with client_of(batcher) as (client, _):
            monkeypatch.setattr(batcher, "step", broken)
            asked = [client.post("/v1/completions", json=ASKED | {"stream": stream}) for stream in (False, True)]
            whole, stream = await asyncio.gather(*asked)
            return whole, stream, await client.post("/v1/completions", json=ASKED), await client.get("/health")

    whole, stream, later, health = asyncio.run(work())
    assert [whole.status_code, later.status_code, health.status_code] == [503] * 3
    assert (
        stream.status_code == 200 and json.loads(stream.text.partition("data: ")[2])["error"]["type"] == "server_error"
    )
    assert "RuntimeError at test_app.py:" in caplog.text and "text of a prompt" not in caplog.text


def test_an_error_of_one_request_is_its_own(batcher, monkeypatch, caplog):
    """Of the model, told without its text; the next request is answered."""
    right = batcher.model.forward

    def wrong(*args, **told):
        raise KeyError("text of a prompt")

    async def work():
        async with client_of(batcher) as (client, _):
            monkeypatch.setattr(batcher.model, "forward", wrong)
            failed = await client.post("/v1/completions", json=ASKED)
            monkeypatch.setattr(batcher.model, "forward", right)
            return failed, await client.post("/v1/completions", json=ASKED)

    failed, answered = asyncio.run(work())
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert answered.status_code == 200 and "text of a prompt" not in failed.text + caplog.text
    assert "KeyError at test_app.py:" in caplog.text


def test_times_that_are_over(tiny_llama):
    """A request that waited too long is refused, an answer that took too long is cut."""
    model, now = tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=2**14), [0.0]
    batcher = Batcher(model, byte_tokenizer(), "full", ag.Pool(model, 2**24), batch=1, clock=lambda: now[0])
    asked = ASKED | {"max_tokens": 10_000, "logit_bias": {"2": -100}}

    async def work():
        async with client_of(batcher, answer_tokens=10_000, wait_seconds=5, answer_seconds=50) as (client, _):
            first = asyncio.create_task(client.post("/v1/completions", json=asked))
            while not batcher.snapshot().running:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(client.post("/v1/completions", json=asked))
            while not batcher.snapshot().waiting:
                await asyncio.sleep(0.01)
            now[0] = 6.0
            waited = await second
            assert not first.done()
            now[0] = 51.0
            return waited, (await first).json()

    waited, cut = asyncio.run(work())
    assert (waited.status_code, "5" in waited.json()["error"]["message"]) == (503, True)
    assert waited.headers["Retry-After"]
    assert cut["choices"][0]["finish_reason"] == "length" and 0 < cut["usage"]["completion_tokens"] < 10_000


def test_a_stream_that_waits_is_told_so(batcher, monkeypatch):
    """By comments, which clients skip; an answer in one piece waits without them."""
    monkeypatch.setattr(worker, "SILENCE_SECONDS", 0.02)
    step = batcher.step
    monkeypatch.setattr(batcher, "step", lambda: (time.sleep(0.1), step()))

    async def work():
        async with client_of(batcher) as (client, _):
            asked = [client.post("/v1/completions", json=ASKED | {"stream": stream}) for stream in (False, True)]
            return await asyncio.gather(*asked)

    whole, stream = asyncio.run(work())
    events = stream.text.split("\n\n")
    assert ": waiting" in events and all(x == ": waiting" or x.startswith("data: ") for x in events[:-1])
    said = [json.loads(x.removeprefix("data: ")) for x in events[:-1] if x.startswith("data: {")]
    assert "".join(x["choices"][0]["text"] for x in said) == whole.json()["choices"][0]["text"]


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with refuses(UserError, f"port={port}", "port=0"):
            listen("127.0.0.1", port)
    with refuses(UserError, "host=192.0.2.1", "port=0"):  # of no machine
        listen("192.0.2.1", 0)


def test_a_body_that_does_not_come(batcher, monkeypatch):
    monkeypatch.setattr(endpoints, "BODY_SECONDS", 0.05)

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    async def work():
        async with client_of(batcher) as (client, _):
            return await client.post("/v1/completions", content=slow(), headers={"Content-Type": "application/json"})

    assert asyncio.run(work()).status_code == 408


def test_a_model_without_a_template_takes_texts_alone(batcher):
    batcher.tokenizer.chat_template = None

    async def work():
        async with client_of(batcher) as (client, _):
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
            return await client.post("/v1/chat/completions", json=asked)

    told = asyncio.run(work())
    assert told.status_code == 400 and "/v1/completions" in told.json()["error"]["message"]


def test_what_is_never_evicted(batcher, monkeypatch):
    """Spans of a text, the parts of a chat that the client names, and else those of the server."""
    asked, submit = [], batcher.submit
    monkeypatch.setattr(batcher, "submit", lambda request, hear: asked.append(request) or submit(request, hear))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 2}

    async def work():
        async with client_of(batcher, protect=("system",)) as (client, _):
            texts = [{"protect": [[0, 2], [4, 5]]}, {"protect": [[0, 9]]}, {"protect": [[1]]}]
            told = [await client.post("/v1/completions", json=ASKED | more) for more in texts]
            chats = [{}, {"protect": ["template"]}, {"protect": []}, {"protect": ["user"]}]
            return told + [await client.post("/v1/chat/completions", json=chat | more) for more in chats]

    assert [answer.status_code for answer in asyncio.run(work())] == [200, 400, 400, 200, 200, 200, 400]
    # system: Be kind.\nuser: Hi\nassistant:
    assert [request.protect for request in asked] == [
        ((0, 2), (4, 5)),
        ((8, 16),),
        ((0, 8), (16, 23), (25, 36)),
        (),
    ]


def test_parameters_are_those_of_openai():
    """And a few more; a parameter that is refused unless it asks for nothing is known to OpenAI's API."""
    own = {"top_k", "min_p", "repetition_penalty", "protect"}
    of_chats = own | {"chat_template_kwargs"}
    assert set(ChatAsked.model_fields) - ChatAsked.known == of_chats | {"stream"}  # declared by its subclasses
    assert set(CompletionAsked.model_fields) - CompletionAsked.known == own | {"stream"}
    assert set(NEUTRAL) <= ChatAsked.known | CompletionAsked.known
