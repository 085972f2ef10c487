"""The real server in a process of its own, asked over sockets: connections, signals, its log, and long use."""

import asyncio
import signal
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("fastapi", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Request  # noqa: E402
from tests.support.http_server import byte_tokenizer, said, saved, server  # noqa: E402
from tests.support.served import alone  # noqa: E402

pytestmark = pytest.mark.slow

KEY = "a key of a test"
LONG = 4000  # tokens of an answer that takes seconds
NEVER = {"logit_bias": {"2": -100}}  # no end before the last token


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    folder = saved(tiny, tmp_path_factory.mktemp("secret-folder"))
    keys = ("policy=h2o", "share=0.5", "memory=32MiB", f"answer_tokens={LONG}", "served_name=tiny", "queue=60")
    with server(folder, *keys, AG_API_KEY=KEY) as (address, process):
        yield address, process, folder


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def idle(address):
    """Wait until every block is free but for those of prefixes, and nobody waits; returns what Prometheus reads."""
    end = time.monotonic() + 30
    while True:
        text = httpx.get(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        now = {name: float(value) for name, _, value in lines}
        states = [now[f'ag_answers{{state="{state}"}}'] for state in ("waiting", "reading", "running")]
        if sum(states) == 0 and now['ag_blocks{state="taken"}'] == now["ag_prefix_blocks"]:
            return now
        assert time.monotonic() < end
        time.sleep(0.02)


def test_clients_come_and_leave(served, client):
    """In the middle of a stream, before a whole answer, or without a request: more of those than requests may be.

    The log tells of requests, and names no prompt, no key and no folder.
    """
    address, _, folder = served
    cancelled = 'ag_answers_ended_total{reason="cancelled"}'
    before = idle(address)[cancelled]
    told = {"model": "tiny", "prompt": "a very secret thing", "max_tokens": LONG} | NEVER
    stream = client.completions.create(**told, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**told)
    host, port = address.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(2 * (60 + 64) + 10):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert httpx.get(f"{address}/health").status_code == 200
        assert client.completions.create(**told | {"max_tokens": 3}).usage.completion_tokens == 3
    assert idle(address)[cancelled] == before + 2
    log = (folder / "stderr").read_text()
    assert "3 written" in log and not [secret for secret in ("secret", KEY, "folder") if secret in log]


@pytest.mark.nightly
def test_a_thousand_requests_leave_nothing_behind(served):
    """Whole answers and streams, some of which are left: blocks, files and memory are as after the first hundreds."""
    address = served[0]

    async def ask(requests):
        turns = asyncio.Semaphore(16)

        async def one(client, number):
            told = {"model": "tiny", "prompt": f"{number} {'ask ' * (number % 20)}", "max_tokens": 6, "stop": ["?!"]}
            async with turns:
                if number % 3 == 0:
                    return await client.completions.create(**told, n=2)
                stream = await client.completions.create(**told, stream=True)
                async for _ in stream:
                    if number % 3 == 1:
                        break
                await stream.close()

        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            await asyncio.gather(*(one(client, number) for number in range(requests)))

    def settled():
        """The figures when the connections are closed too."""
        found = []
        for _ in range(20):
            time.sleep(0.1)
            found.append(idle(address))
        return min(found, key=lambda now: now["process_open_fds"])

    asyncio.run(ask(200))
    before = settled()
    asyncio.run(ask(1000))
    after = settled()
    assert after["process_open_fds"] == before["process_open_fds"]
    # 8 KiB a request, less than the state that one answer has while it is read
    assert after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"] < 1000 * 8 * 2**10


def test_sigterm_lets_answers_end_and_takes_no_more(tiny, served, client):
    """The last test: it ends the server. The answer takes seconds, so that others ask while it is written."""
    address, process, _ = served
    told = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "temperature": 0}
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as watcher:  # made before, which takes a while
        stream = client.completions.create(**told, stream=True)
        begun = next(stream)
        process.send_signal(signal.SIGTERM)
        while watcher.get(f"{address}/health").status_code == 200:
            time.sleep(0.01)
        answer = watcher.post(f"{address}/v1/completions", json=told)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        pieces = [begun, *stream]
    assert process.wait(30) == 0
    request = Request(tokens=byte_tokenizer()("x")["input_ids"], max_tokens=2000)
    expected = said(alone(tiny, ag.policy("h2o", 0.5), request))
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
