"""vLLM's own server with gates, asked by OpenAI's client: `--additional-config`, and no other flag."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.vllm.conftest import prompts_of

pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")
openai = pytest.importorskip("openai", reason="needs vLLM: bash scripts/vllm_env.sh test")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextlib.contextmanager
def serving(model, folder, **settings):
    """A client of a server, which is another process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "smollm2"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
    words += ["--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    words += ["--additional-config", json.dumps({"ag": {"gates": "smollm2", "budget": 0.3} | settings})]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, env=environment)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def client(smollm2, tmp_path_factory):
    with serving(smollm2, tmp_path_factory.mktemp("server")) as client:
        yield client


def token_ids(client, prompt):
    out = client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "min_tokens": 24, "return_token_ids": True},
    )
    return out.choices[0].token_ids


def test_text_of_long_prompts(client, reference):
    """Blocks have 32 tokens here, and the engine runs in another process."""
    for prompt in prompts_of([500, 700], seed=2):
        assert token_ids(client, prompt) == reference(prompt, count=24)


def test_steps(smollm2, reference, tmp_path):
    with serving(smollm2, tmp_path, schedule="steps:8") as client:
        for prompt in prompts_of([100, 500], seed=2):
            assert token_ids(client, prompt) == reference(prompt, count=24, schedule="steps:8")


def test_protected_prompt_and_a_wrong_number(client, reference):
    (prompt,) = prompts_of([500], seed=2)
    ask = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    body = {"ignore_eos": True, "min_tokens": 24, "return_token_ids": True}
    out = client.completions.create(**ask, extra_body=body | {"vllm_xargs": {"ag_protect": 120}})
    assert out.choices[0].token_ids == reference(prompt, count=24, protected=120)
    with pytest.raises(openai.BadRequestError, match="ag_protect"):
        client.completions.create(**ask, extra_body=body | {"vllm_xargs": {"ag_protect": -3}})


def test_schema_and_stream(client):
    text = "The weather was " + "fine and then bad, " * 120
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    out = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert json.loads(out.choices[0].message.content)["a"] in ("x", "y")
    stream = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": text}], max_tokens=12, temperature=0, stream=True
    )
    assert "".join(x.choices[0].delta.content or "" for x in stream if x.choices)


def test_tools(client):
    """vLLM's parser asks small models for JSON, and not for the schema of the arguments; so it is without gates."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    out = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "How is the weather? " * 100}],
        tools=[tool],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
    )
    (call,) = out.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)
