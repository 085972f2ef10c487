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
from ag.serve import Scheduler, app, endpoints, worker  # noqa: E402
from ag.serve.protocol import NEUTRAL, ChatAsked, CompletionAsked  # noqa: E402
from ag.serve.start import listen  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer  # noqa: E402
from tests.support.refused import refuses  # noqa: E402

ASKED = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def scheduler(tiny_llama):
    model = tiny_llama(vocab_size=VOCABULARY)
    return Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**22))


@asynccontextmanager
async def client_of(scheduler, api_key=None, **limits):
    """A client, and the service that it asks."""
    service = app.Service(scheduler, "tiny", app.Limits(**limits), api_key)
    made = service.app()
    async with made.router.lifespan_context(made):
        transport = httpx.ASGITransport(made)
        async with httpx.AsyncClient(transport=transport, base_url="http://ag") as client:
            yield client, service


def test_a_scheduler_that_fails_is_told_to_all(scheduler, monkeypatch, caplog):
    """Running answers end by an error, streams too; later requests are refused, and the server is not healthy."""

    def broken():
        time.sleep(0.1)
        raise RuntimeError("text of a prompt")

    async def work():
        async with client_of(scheduler) as (client, _):
            monkeypatch.setattr(scheduler, "step", broken)
            asked = [client.post("/v1/completions", json=ASKED | {"stream": stream}) for stream in (False, True)]
            whole, stream = await asyncio.gather(*asked)
            return whole, stream, await client.post("/v1/completions", json=ASKED), await client.get("/health")

    whole, stream, later, health = asyncio.run(work())
    assert [whole.status_code, later.status_code, health.status_code] == [503] * 3
    assert (
        stream.status_code == 200 and json.loads(stream.text.partition("data: ")[2])["error"]["type"] == "server_error"
    )
    assert "RuntimeError at test_app.py:" in caplog.text and "text of a prompt" not in caplog.text


def test_an_error_of_one_request_is_its_own(scheduler, monkeypatch, caplog):
    """Of the model, told without its text; the next request is answered."""
    right = scheduler.model.forward

    def wrong(*args, **told):
        raise KeyError("text of a prompt")

    async def work():
        async with client_of(scheduler) as (client, _):
            monkeypatch.setattr(scheduler.model, "forward", wrong)
            failed = await client.post("/v1/completions", json=ASKED)
            monkeypatch.setattr(scheduler.model, "forward", right)
            return failed, await client.post("/v1/completions", json=ASKED)

    failed, answered = asyncio.run(work())
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert answered.status_code == 200 and "text of a prompt" not in failed.text + caplog.text
    assert "KeyError at test_app.py:" in caplog.text


def test_times_that_are_over(tiny_llama):
    """A request that waited too long is refused, an answer that took too long is cut."""
    model, now = tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=2**14), [0.0]
    scheduler = Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**24), batch=1, clock=lambda: now[0])
    asked = ASKED | {"max_tokens": 10_000, "logit_bias": {"2": -100}}

    async def work():
        async with client_of(scheduler, answer_tokens=10_000, wait_seconds=5, answer_seconds=50) as (client, _):
            first = asyncio.create_task(client.post("/v1/completions", json=asked))
            while not scheduler.snapshot().running:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(client.post("/v1/completions", json=asked))
            while not scheduler.snapshot().waiting:
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


def test_a_stream_that_waits_is_told_so(scheduler, monkeypatch):
    """By comments, which clients skip; an answer in one piece waits without them."""
    monkeypatch.setattr(worker, "SILENCE_SECONDS", 0.02)
    step = scheduler.step
    monkeypatch.setattr(scheduler, "step", lambda: (time.sleep(0.1), step()))

    async def work():
        async with client_of(scheduler) as (client, _):
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


def test_a_body_that_does_not_come(scheduler, monkeypatch):
    monkeypatch.setattr(endpoints, "BODY_SECONDS", 0.05)

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    async def work():
        async with client_of(scheduler) as (client, _):
            return await client.post("/v1/completions", content=slow(), headers={"Content-Type": "application/json"})

    assert asyncio.run(work()).status_code == 408


def test_requests_that_come_slowly_are_as_many_as_may_be(tiny_llama):
    """Then others are told so, as by a full queue; whoever only looks is answered."""
    model, released = tiny_llama(vocab_size=VOCABULARY), asyncio.Event()
    scheduler = Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**22), queue=2, batch=1)

    async def slow():
        yield json.dumps(ASKED).encode()
        await released.wait()

    async def work():
        async with client_of(scheduler) as (client, service):
            headers = {"Content-Type": "application/json"}
            asked = [
                asyncio.create_task(client.post("/v1/completions", content=slow(), headers=headers)) for _ in range(6)
            ]
            while service._coming < 6:
                await asyncio.sleep(0.01)
            full, health = await client.post("/v1/completions", json=ASKED), await client.get("/health")
            released.set()
            answers = [await one for one in asked]
            return full, health, answers, await client.post("/v1/completions", json=ASKED)

    full, health, answers, later = asyncio.run(work())
    assert (full.status_code, full.json()["error"]["code"], health.status_code) == (429, "queue_full", 200)
    assert int(full.headers["Retry-After"]) > 0
    assert {answer.status_code for answer in answers} <= {200, 429} and answers[0].status_code == 200
    assert later.status_code == 200


@pytest.mark.parametrize(
    ("given", "status"),
    [
        *[(f"{scheme} a key", 200) for scheme in ("Bearer", "bearer", "BEARER", "bearer ")],
        *[
            (wrong, 401)
            for wrong in ("Bearer", "a key", "Basic a key", "bearer A KEY", "bearer a key too", "Bearera key")
        ],
    ],
)
def test_the_scheme_of_a_key_has_no_case(scheduler, given, status):
    async def work():
        async with client_of(scheduler, api_key="a key") as (client, _):
            return await client.get("/v1/models", headers={"Authorization": given})

    assert asyncio.run(work()).status_code == status


@pytest.mark.parametrize("length", [1, 10, 11, 39, 40, 500])
@pytest.mark.parametrize("name", ["chat max_tokens", "chat max_completion_tokens", "max_tokens"])
def test_the_longest_answer_is_the_one_that_is_named(tiny_llama, name, length):
    """Whatever is asked, a refusal names the most that is taken, and its parameter, or a prompt that is too long."""
    model = tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=40)
    scheduler = Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**20))
    scheduler.tokenizer.chat_template = "{{ messages[0].content }}"
    words, most = "x" * length, min(30, 40 - length)
    text = {"messages": [{"role": "user", "content": words}]} if "chat" in name else {"prompt": words}
    kind, name = "chat/completions" if "chat" in name else "completions", name.rpartition(" ")[2]

    async def work():
        lengths = (10**9, 31, max(most + 1, 1), max(most, 1))
        told = {"model": "tiny", "logit_bias": {"2": -100}} | text  # no end before the last token
        async with client_of(scheduler, answer_tokens=30) as (client, _):
            return [await client.post(f"/v1/{kind}", json=told | {name: much}) for much in lengths]

    *refused, last = asyncio.run(work())
    if most > 0:
        assert (last.status_code, last.json()["usage"]["completion_tokens"]) == (200, most)
    for answer in [*refused, *([] if most > 0 else [last])]:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == (name if most > 0 else [*text][0])
        expected = f"expected at most {most} " if most > 0 else f"has {length} tokens: expected fewer than 40,"
        assert expected in error["message"]
        assert error["code"] == "context_length_exceeded" or most > 0


def test_several_prompts_are_refused_by_their_number(scheduler):
    async def work():
        async with client_of(scheduler) as (client, _):
            several = ["a", "b"], [[3, 4], [5]]
            told = [await client.post("/v1/completions", json=ASKED | {"prompt": prompt}) for prompt in several]
            one = [await client.post("/v1/completions", json=ASKED | {"prompt": x}) for x in ([3, 4], [[3, 4]])]
            return told, one

    told, one = asyncio.run(work())
    for answer in told:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt") and "2 prompts: expected one" in error["message"]
    assert [answer.json()["choices"] for answer in one] == [one[0].json()["choices"]] * 2


def test_an_answer_that_a_stop_text_ended_counts_so(scheduler):
    """Not as one whose client left; the text of a chat has a refusal, which is none."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 90}
    bias = {"logit_bias": {"70": 100}, "stop": [byte_tokenizer().decode([70]) * 3]}

    async def work():
        async with client_of(scheduler) as (client, _):
            answer = await client.post("/v1/chat/completions", json=asked | bias)
            while scheduler.busy or not scheduler.counts.ended:
                await asyncio.sleep(0.01)
            return answer.json()

    [choice] = asyncio.run(work())["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert choice["finish_reason"] == "stop" and scheduler.counts.ended == {"stop": 1}


def test_a_model_without_a_template_takes_texts_alone(scheduler):
    scheduler.tokenizer.chat_template = None

    async def work():
        async with client_of(scheduler) as (client, _):
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
            return await client.post("/v1/chat/completions", json=asked)

    told = asyncio.run(work())
    assert told.status_code == 400 and "/v1/completions" in told.json()["error"]["message"]


def test_what_is_never_evicted(scheduler, monkeypatch):
    """Spans of a text, the parts of a chat that the client names, and else those of the server."""
    asked, submit = [], scheduler.submit
    monkeypatch.setattr(scheduler, "submit", lambda request, hear: asked.append(request) or submit(request, hear))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 2}

    async def work():
        async with client_of(scheduler, protect=("system",)) as (client, _):
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
