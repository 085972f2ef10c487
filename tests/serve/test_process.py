"""The server as a process, over sockets: connections, signals, its log, and many requests."""

import signal
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Request  # noqa: E402
from tests.support.http_server import byte_tokenizer, said, saved, server  # noqa: E402
from tests.support.served import alone  # noqa: E402

pytestmark = pytest.mark.slow

KEY = "a key of a test"
LONG = 4000  # tokens of an answer that takes seconds
NEVER = {"logit_bias": {"2": -100}}  # no end before the last token


@pytest.fixture
def served(tiny, tmp_path):
    (tmp_path / "secret-folder").mkdir()
    folder = saved(tiny, tmp_path / "secret-folder")
    keys = ("policy=h2o", "budget=0.5", "memory=32MiB", f"answer_tokens={LONG}", "served_name=tiny", "queue=60")
    with server(folder, *keys, AG_API_KEY=f"{KEY}\n") as (address, process):  # as of a file
        yield openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60), address, process, folder


def idle(address):
    """Wait until no answer is open and only prefixes take blocks; returns the figures for Prometheus."""
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


def test_clients_come_and_leave_and_sigterm_lets_answers_end(tiny, served):
    """Clients leave in a stream, before a whole answer, and without a request, more often than requests may be open.

    The log has no prompt, no key and no folder. SIGTERM ends the server after the running answers.
    """
    client, address, process, folder = served
    cancelled = 'ag_answers_ended_total{reason="cancelled"}'
    before = idle(address)[cancelled]
    body = {"model": "tiny", "prompt": "a very secret thing", "max_tokens": LONG} | NEVER
    stream = client.completions.create(**body, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**body)
    host, port = address.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(2 * (60 + 64) + 10):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert httpx.get(f"{address}/health").status_code == 200
        assert client.completions.create(**body | {"max_tokens": 3}).usage.completion_tokens == 3
    assert idle(address)[cancelled] == before + 2
    log = (folder / "stderr").read_text()
    (start,) = [line for line in log.splitlines() if "policy" in line]
    assert "policy h2o 0.5, memory for " in start and " requests of 4,096 tokens" in start
    refused = httpx.post(f"{address}/v1/completions", json={}, headers={"X-Request-Id": "some-id"})
    assert refused.status_code == 401
    assert "some-id: refused with 401 invalid_api_key" in (folder / "stderr").read_text()
    assert "3 written" in log and not [secret for secret in ("secret", KEY, "folder") if secret in log]

    body = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "temperature": 0} | NEVER  # still open at the signal
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as watcher:
        stream = client.completions.create(**body, stream=True)
        begun = next(stream)
        process.send_signal(signal.SIGTERM)
        while watcher.get(f"{address}/health").status_code == 200:
            time.sleep(0.01)
        answer = watcher.post(f"{address}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        pieces = [begun, *stream]
    assert process.wait(30) == 0
    *_, end, last = (folder / "stderr").read_text().splitlines()
    assert "written" in end and last.endswith("stopped, 0 requests cut")
    assert "SIGTERM: 1 open requests have 24 s" in (folder / "stderr").read_text()
    request = Request(tokens=byte_tokenizer()("x")["input_ids"], max_tokens=1000, logit_bias={2: -100.0})
    expected = said(alone(tiny, ag.policy("h2o", 0.5), request))
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "length"
