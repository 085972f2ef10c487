"""The real server in a process of its own, asked by the real client of OpenAI and by raw connections."""

import asyncio
import json
import signal
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
import torch

import ag

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("fastapi", reason="needs the server's libraries: pip install 'ag[serve]'")

from tests.support.http_server import VOCABULARY, byte_tokenizer, saved, server  # noqa: E402

TOKENIZER = byte_tokenizer()
KEY = "a key of a test"
MEMORY = 200 * 2112  # pages: of one answer of 400 tokens, or four prompts of 100


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return tiny_llama(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    folder = saved(tiny, tmp_path_factory.mktemp("secret-folder"))
    keys = ("policy=h2o", "share=0.5", f"memory={MEMORY}", "answer_tokens=400", "served_name=tiny", "queue=60")
    with server(folder, *keys, AG_API_KEY=KEY) as (address, _):
        yield address, folder


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def post(address, body, kind="completions", **headers):
    told = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(f"{address}/v1/{kind}", content=content, headers=told, timeout=60)


def alone(model, prompt, tokens, share=0.5):
    """The greedy answer of ``model.generate``, as ids."""
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"] if isinstance(prompt, str) else prompt])
    cache = ag.EvictionCache(model, "h2o", share)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def said(tokens):
    """Text of an answer: half a character at its end, which is one U+FFFD, is not given."""
    return TOKENIZER.decode(tokens, skip_special_tokens=True).removesuffix("\ufffd")


def metrics(address):
    """What Prometheus reads, by name and labels."""
    text = httpx.get(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def idle(address):
    """Wait until every page is free but for common beginnings, and nobody waits; returns what Prometheus reads then."""
    end = time.monotonic() + 30
    while True:
        now = metrics(address)
        states = [now[f'ag_answers{{state="{state}"}}'] for state in ("waiting", "reading", "running")]
        if sum(states) == 0 and now['ag_blocks{state="taken"}'] == now["ag_prefix_blocks"]:
            return now
        assert time.monotonic() < end
        time.sleep(0.02)


def generated(model, prompt, tokens):
    """The greedy answer of ``model.generate`` with a full cache, as ids."""
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    return model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()


def test_a_text_is_continued_as_by_the_model_alone(tiny, client):
    for number, prompt in enumerate(("hello there", "a", "What is it? " * 9)):
        tokens = alone(tiny, prompt, 9)
        whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        streamed = client.completions.create(
            model="tiny",
            prompt=TOKENIZER(prompt)["input_ids"],
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *pieces, last = streamed
        assert whole.choices[0].text == "".join(piece.choices[0].text for piece in pieces) == said(tokens), number
        assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "length"
        assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        count = (len(TOKENIZER(prompt)["input_ids"]), 9)
        for told in (whole.usage, last.usage):
            assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (*count, sum(count))


def test_a_conversation_is_put_into_the_template(tiny, client):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Yes?", "refusal": None},
        {"role": "user", "content": "Go on."},
    ]
    tokens = alone(tiny, "system: Be kind.\nuser: Hello\nassistant: Yes?\nuser: Go on.\nassistant:", 12)
    asked = {"model": "tiny", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_completion_tokens=12)
    assert whole.choices[0].message.content == said(tokens) and whole.choices[0].message.role == "assistant"
    pieces = list(client.chat.completions.create(**asked, max_tokens=12, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said(tokens)
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices[0].finish_reason == "length"
    assert client.chat.completions.create(**asked).usage.completion_tokens == 400  # answer_tokens


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(tiny, client):
    prompt = "tell me"
    text = said(alone(tiny, prompt, 60))
    stop = text[20:23]
    before = text[: text.index(stop)]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "temperature": 0, "stop": ["nowhere", stop]}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (before, "stop")
    assert whole.usage.completion_tokens < 60
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True, logprobs=0)]
    assert "".join(piece.text for piece in pieces) == before and pieces[-1].finish_reason == "stop"
    offsets = [offset for piece in pieces for offset in piece.logprobs.text_offset]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(before)


def test_answers_that_are_drawn(client):
    asked = {"model": "tiny", "prompt": "once", "max_tokens": 12, "temperature": 1.3, "top_p": 0.9, "n": 2, "seed": 4}
    more = {"top_k": 60, "min_p": 0.001, "repetition_penalty": 1.1}
    first, again = (client.completions.create(**asked, extra_body=more).choices for _ in range(2))
    assert [choice.text for choice in first] == [choice.text for choice in again]
    assert first[0].text != first[1].text and [choice.index for choice in first] == [0, 1]
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True, extra_body=more)]
    for number in (0, 1):
        assert "".join(piece.text for piece in pieces if piece.index == number) == first[number].text
    forced = client.completions.create(model="tiny", prompt="x", max_tokens=3, logit_bias={"70": 100}, temperature=0)
    assert forced.choices[0].text == TOKENIZER.decode([70] * 3)
    penalised = client.completions.create(
        model="tiny", prompt="x", max_tokens=30, temperature=0, logprobs=1, extra_body={"repetition_penalty": 100}
    )
    tokens = penalised.choices[0].logprobs.token_logprobs
    assert len(set(zip(penalised.choices[0].logprobs.tokens, tokens, strict=True))) == len(tokens)


def test_log_probabilities_are_those_of_the_model(tiny, client):
    """With little text nothing is evicted yet that the budget's half could show: here all is kept."""
    prompt, bias = "abc", {"70": 100}
    ids = torch.tensor([[*TOKENIZER("user: abc\nassistant:")["input_ids"], 70]])
    cache = ag.EvictionCache(tiny, "h2o", 0.5)
    with torch.no_grad():
        known = [
            tiny(ids[:, :-1], past_key_values=cache).logits[0, -1],
            tiny(ids[:, -1:], past_key_values=cache).logits[0, -1],
        ]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=2,
        logit_bias=bias,
        logprobs=True,
        top_logprobs=3,
    )
    for logits, told in zip(known, answer.choices[0].logprobs.content, strict=True):
        logprobs = logits.float().log_softmax(-1)
        assert told.token == TOKENIZER.decode([70]) and bytes(told.bytes).decode() == told.token
        assert told.logprob == pytest.approx(float(logprobs[70]), rel=1e-4)
        best = logprobs.topk(3)
        assert [other.logprob for other in told.top_logprobs] == pytest.approx(best.values.tolist(), rel=1e-4)
        assert [other.token for other in told.top_logprobs] == [TOKENIZER.decode([x]) for x in best.indices.tolist()]


@pytest.mark.slow
def test_fifty_at_once_with_room_for_four(tiny, served):
    """Each answer is that of the request alone; others wait."""
    address, _ = served
    prompts = [f"{number:2} {'ask ' * 25}"[: 100 - number % 3] for number in range(50)]

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
            asked = [
                client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
                for prompt in prompts
            ]
            return await asyncio.gather(*asked)

    for prompt, answer in zip(prompts, asyncio.run(ask()), strict=True):
        assert answer.choices[0].text == said(alone(tiny, prompt, 12))
    idle(address)


def test_a_client_that_leaves_ends_its_answer(served, client):
    """In the middle of a stream, before a whole answer, and while it waits; others are answered meanwhile."""
    address, _ = served
    cancelled = 'ag_answers_ended_total{reason="cancelled"}'
    before = idle(address)[cancelled]
    asked = {"model": "tiny", "prompt": "x" * 40, "max_tokens": 400, "temperature": 0}
    stream = client.completions.create(**asked, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    for seconds in (0.05, 0.2):
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=seconds).completions.create(**asked)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens == 3
    assert idle(address)[cancelled] == before + 3


@pytest.mark.slow
def test_a_slow_reader_keeps_nobody_waiting(served, client):
    """One that reads nothing has its answer written and its pages given back; then it reads all of it."""
    address, _ = served
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True, "logprobs": 20, "logit_bias": {"2": -100}}
    )
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
        slow.sendall("\r\n".join(head).encode())
        for _ in range(5):
            short = client.completions.create(model="tiny", prompt="y", max_tokens=20, logit_bias={"2": -100})
            assert short.usage.completion_tokens == 20
        received = b""
        while part := slow.recv(65536):
            received += part
            time.sleep(0.001)
    assert b"data: [DONE]" in received and b'"finish_reason":"length"' in received
    idle(address)


@pytest.mark.parametrize(
    ("kind", "change", "param", "words"),
    [
        ("completions", {"max_tokens": 0}, "max_tokens", ["0", "1"]),
        ("completions", {"max_tokens": 401}, "max_tokens", ["401", "400"]),
        ("completions", {"temperature": "hot"}, "temperature", ["hot", "number"]),
        ("completions", {"temprature": 1}, "temprature", ["temperature"]),
        ("completions", {"prompt": []}, "prompt", ["[]"]),
        ("completions", {"prompt": [1, 2, 400]}, "prompt", ["259"]),
        ("completions", {"prompt": ["a", "b"]}, "prompt", ["2 prompts"]),
        ("completions", {"prompt": ""}, "prompt", ["empty"]),
        ("completions", {"stop": [""]}, "stop[0]", ["1 character"]),
        ("completions", {"echo": True}, "echo", ["not supported"]),
        ("completions", {"logit_bias": {"-1": 1}}, "logit_bias", ["-1", "259"]),
        ("completions", {"n": 65}, "n", ["65", "64"]),
        ("completions", {"seed": 2**63}, "seed", [str(2**63)]),
        ("chat/completions", {"messages": []}, "messages", ["at least 1"]),
        (
            "chat/completions",
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            ["robot", "assistant"],
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            ["image_url", "text"],
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]},
            "messages",
            ["system comes first"],
        ),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools", ["chat template", "leave them out"]),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format", ["not supported"]),
    ],
)
def test_what_is_wrong_with_a_request(served, kind, change, param, words):
    content = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat/completions" else {"prompt": "x"}
    answer = post(served[0], {"model": "tiny", "stream": True} | content | change, kind)
    told = answer.json()["error"]
    assert (answer.status_code, told["type"], told["param"]) == (400, "invalid_request_error", param)
    assert all(word in told["message"] for word in words), told["message"]


def test_parameters_that_ask_for_nothing_are_taken(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        tools=[],
        response_format={"type": "text"},
        frequency_penalty=0,
        user="me",
        stop=None,
        store=False,
    )
    assert answer.usage.completion_tokens == 2


def test_bodies_that_are_none(served):
    address, _ = served
    right = {"model": "tiny", "prompt": "x"}
    for body, status, word in [
        (b"{", 400, "JSON"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, "UTF-8"),
        (b"[]", 400, "object"),
        (b"[" * 100_000, 400, "JSON"),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, str(2**20)),
    ]:
        answer = post(address, body)
        assert answer.status_code == status and word in answer.json()["error"]["message"]
    assert post(address, right, **{"Content-Type": "text/plain"}).status_code == 415
    assert post(address, right | {"model": "gpt-4"}).json()["error"]["code"] == "model_not_found"
    for key in ("", "Bearer", "Bearer another", f"Basic {KEY}", "Bearer \xe4".encode("latin-1")):
        answer = post(address, right, Authorization=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert httpx.get(f"{address}/nothing").json()["error"]["message"] == "Not Found."


def test_a_prompt_that_no_context_and_no_pool_holds(served, client):
    with pytest.raises(openai.BadRequestError, match="512") as refused:
        client.completions.create(model="tiny", prompt="x" * 505, max_tokens=16)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="pool"):
        client.completions.create(model="tiny", prompt="x" * 300, max_tokens=100, n=4)


def test_idle_connections_take_nobodys_place(served, client):
    """More of them than requests are taken at once."""
    host, port = served[0].removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(2 * (60 + 64) + 10):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert httpx.get(f"{served[0]}/health").status_code == 200
        assert client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens == 3


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "ag"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_logs_name_no_prompt_no_key_and_no_folder(served, client):
    _, folder = served
    client.completions.create(model="tiny", prompt="a very secret thing", max_tokens=3)
    log = (folder / "stderr").read_text()
    assert "3 written" in log
    for secret in ("secret", KEY, "folder"):
        assert secret not in log


@pytest.mark.slow
def test_a_full_queue_is_told(tiny, tmp_path):
    folder = saved(tiny, tmp_path)
    with server(folder, "memory=4MiB", "queue=1", "batch=1", "served_name=tiny") as (address, _):
        asked = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 400, "temperature": 0}
        threads = [threading.Thread(target=post, args=(address, asked)) for _ in range(2)]
        for thread, state in zip(threads, ("running", "waiting"), strict=True):
            thread.start()
            while metrics(address)[f'ag_answers{{state="{state}"}}'] == 0:
                assert thread.is_alive()
        answer = post(address, asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["Retry-After"]) > 0
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_takes_no_more(tiny_llama, tmp_path):
    """The answer takes seconds, so that it is still written when somebody else asks."""
    tiny, length = tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=8192), 4000
    keys = ("memory=32MiB", "served_name=tiny", f"answer_tokens={length}")
    with server(saved(tiny, tmp_path), *keys) as (address, process):
        openai_client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with openai_client as client, httpx.Client() as watcher:  # made before, which takes a while
            stream = client.completions.create(model="tiny", prompt="x", max_tokens=length, stream=True, temperature=0)
            begun = next(stream)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            while watcher.get(f"{address}/health").status_code == 200:
                time.sleep(0.01)
            answer = post(address, {"model": "tiny", "prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            pieces = [begun, *stream]
        assert process.wait(30) == 0
        assert time.monotonic() - began < 30
    assert "".join(piece.choices[0].text for piece in pieces) == said(generated(tiny, "x", length))
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.slow
def test_a_thousand_requests_leave_nothing_behind(served):
    """Whole answers and streams, some of which are left: pages, files and memory are as after the first two hundred."""
    address, _ = served

    async def ask(requests):
        turns = asyncio.Semaphore(16)

        async def one(client, number):
            asked = {"model": "tiny", "prompt": f"{number} {'ask ' * (number % 20)}", "max_tokens": 6, "stop": ["?!"]}
            async with turns:
                if number % 3 == 0:
                    return await client.completions.create(**asked, n=2)
                stream = await client.completions.create(**asked, stream=True)
                async for _ in stream:
                    if number % 3 == 1:
                        break
                await stream.close()

        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            await asyncio.gather(*(one(client, number) for number in range(requests)))

    def settled():
        """The figures when the connections are closed too."""
        lowest = idle(address)
        for _ in range(20):
            time.sleep(0.1)
            now = idle(address)
            lowest = now if now["process_open_fds"] < lowest["process_open_fds"] else lowest
        return lowest

    asyncio.run(ask(200))
    before = settled()
    asyncio.run(ask(1000))
    after = settled()
    assert after["process_open_fds"] == before["process_open_fds"]
    # 8 KiB a request, less than the state that one answer has while it is read
    assert after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"] < 1000 * 8 * 2**10
