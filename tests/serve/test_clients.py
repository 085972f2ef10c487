"""Clients of others against the server: the harness, litellm, and the requests of chat pages and of agents."""

import json
from copy import deepcopy

import httpx
import pytest

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Scheduler  # noqa: E402
from tests.support.http_server import TEMPLATE  # noqa: E402
from tests.support.reached import reached  # noqa: E402

NEEDED = "needs the clients: pip install 'ag[clients]'"


@pytest.fixture(scope="module")
def address(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """Of a server, and the folder of its model."""
    folder, tokenizer, model = tmp_path_factory.mktemp("clients"), deepcopy(tiny_tokenizer), tiny_llama()
    tokenizer.chat_template = TEMPLATE
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    with reached(Scheduler(model, tokenizer, "full", ag.Pool(model, 2**24))) as found:
        yield found, folder


# ---- lm-evaluation-harness, whose scores are those of its own model ``hf``

CONTEXTS = ["the cat sat on the mat and then it", "one two three four five six", "a red door and a blue"]
CONTINUATIONS = [" slept", " ran away", " seven", ", and nine"]


@pytest.fixture(scope="module")
def harness(address):
    """`harness(model, method, arguments)`: the answers of a model of the harness."""
    pytest.importorskip("tenacity", reason=NEEDED)
    registry = pytest.importorskip("lm_eval.api.registry", reason=NEEDED)
    from lm_eval.api.instance import Instance

    server, folder = address
    told = {"model": "tiny", "tokenizer": str(folder), "batch_size": 3, "max_retries": 1}
    models = {
        "hf": registry.get_model("hf")(pretrained=str(folder), device="cpu"),
        "local-completions": registry.get_model("local-completions")(base_url=f"{server}/v1/completions", **told),
        "local-chat-completions": registry.get_model("local-chat-completions")(
            base_url=f"{server}/v1/chat/completions", **told
        ),
    }

    def harness(name, method, arguments):
        rows = [Instance(method, {}, each(models[name]) if callable(each) else each, 0) for each in arguments]
        return getattr(models[name], method)(rows, disable_tqdm=True)

    return harness


@pytest.mark.slow
@pytest.mark.parametrize("method", ["loglikelihood", "loglikelihood_rolling"])
def test_the_harness_scores_as_with_its_own_model(harness, method):
    pairs = [(context, said) for context in CONTEXTS for said in CONTINUATIONS]
    rows = pairs if method == "loglikelihood" else [(context,) for context in CONTEXTS]
    found, wanted = (harness(name, method, rows) for name in ("local-completions", "hf"))
    assert found == [pytest.approx(each, rel=1e-4) for each in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
def test_the_harness_generates_as_with_its_own_model(harness, name):
    told, chat = {"until": ["\n", "q"], "max_gen_toks": 20, "temperature": 0.0}, "chat" in name
    rows = [(context, told) for context in CONTEXTS]
    if chat:  # the harness renders chats for its own model, and sends them as messages to the server
        messages = [[{"role": "user", "content": context}] for context in CONTEXTS]
        rows = [lambda model, one=one: (model.apply_chat_template(one), told) for one in messages]
    found, wanted = harness(name, "generate_until", rows), harness("hf", "generate_until", rows)
    assert found == wanted and len(set(found)) == len(CONTEXTS)


# ---- litellm


@pytest.mark.slow
@pytest.mark.nightly
def test_litellm(address, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a file at import
    litellm = pytest.importorskip("litellm", reason=NEEDED)
    told = {"api_base": f"{address[0]}/v1", "api_key": "none", "temperature": 0, "max_tokens": 6, "num_retries": 0}
    messages = [{"role": "user", "content": CONTEXTS[0]}]
    whole = litellm.completion("openai/tiny", messages, **told)
    pieces = list(litellm.completion("openai/tiny", messages, stream=True, **told))
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == 6 and text
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    answer = litellm.text_completion(CONTEXTS[:2], "text-completion-openai/tiny", **told)
    assert len(answer.choices) == 2 and all(choice.text for choice in answer.choices)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion("openai/tiny", messages, **told | {"temperature": 3})


# ---- requests as others send them

TITLE = "### Task: Generate a concise, 3-5 word title.\n<chat_history>\nUSER: Hi\n</chat_history>"
SHAPES = {
    "Open WebUI, a chat": {
        "stream": True,
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "seed": 1,
        "stop": ["###"],
        "max_tokens": 5,
    },
    "Open WebUI, a title": {
        "model": "tiny",
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "max_completion_tokens": 5,
    },
    "llama-index, a chat": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes?", "tool_calls": None},
            {"role": "user", "content": "Go on."},
        ],
        "model": "tiny",
        "temperature": 0.1,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "llama-index, a text": {"prompt": "Hi", "model": "tiny", "temperature": 0.1, "max_tokens": 5, "stream": False},
    "benchmark_serving of vLLM": {
        "model": "tiny",
        "prompt": "Hi",
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "max_tokens": 5,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_pages_and_programs(address, name):
    body = SHAPES[name]
    path = "completions" if "prompt" in body else "chat/completions"
    answer = httpx.post(f"{address[0]}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        *events, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        answered = json.loads(events[-1].removeprefix("data: "))
    else:
        answered = answer.json()
    assert 0 < answered["usage"]["completion_tokens"] <= 5
