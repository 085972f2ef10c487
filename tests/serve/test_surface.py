"""Endpoints beside chats and texts, and what pages and programs send and read."""

import copy
from unittest.mock import Mock

import pytest
import torch

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.commands.serve import ServeConfig  # noqa: E402
from ag.config.command_line import parse  # noqa: E402
from ag.config.recipes import resolve  # noqa: E402
from ag.gates import export as exports  # noqa: E402
from ag.serve import Request, Scheduler  # noqa: E402
from ag.serve.server import load_service, run  # noqa: E402
from tests.support.asked import asked  # noqa: E402
from tests.support.gates_for import gates_for  # noqa: E402
from tests.support.http_server import TEMPLATE, VOCABULARY, byte_tokenizer, said, saved  # noqa: E402
from tests.support.served import alone  # noqa: E402

TOKENIZER = byte_tokenizer()
ORIGIN = {"Origin": "https://chat.example"}
EFFORT = "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, I"}]


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return tiny_llama(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def served(tiny):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = EFFORT + TEMPLATE
    with asked(Scheduler(tiny, tokenizer, "full", ag.Pool(tiny, 2**22)), origins=[ORIGIN["Origin"]]) as found:
        yield found


def answer_of(model, text, tokens):
    return said(alone(model, "full", Request(tokens=TOKENIZER(text)["input_ids"], max_tokens=tokens)))


# ---- tokens


def test_tokens_of_texts_and_chats(served):
    _, http, service = served
    ids, chat = TOKENIZER("Hi é")["input_ids"], {"messages": CHAT[:1], "add_generation_prompt": False}
    found = http.post("/tokenize", json={"model": "tiny", "prompt": "Hi é", "return_token_strs": True}).json()
    assert found == {
        "count": len(ids),
        "max_model_len": service.scheduler.model.config.max_position_embeddings,
        "tokens": ids,
        "token_strs": TOKENIZER.convert_ids_to_tokens(ids),
    }
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hi é"}
    for more, text in (({}, "user: Hi\n"), ({"add_generation_prompt": True}, "user: Hi\nassistant:")):
        assert TOKENIZER.decode(http.post("/tokenize", json=chat | more).json()["tokens"]) == text
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", chat | {"prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": [3, 999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_models_and_version(served):
    client, http, service = served
    [model] = client.models.list()
    assert model.max_model_len == service.scheduler.model.config.max_position_embeddings
    assert http.get("/version").json().keys() == {"version"}


# ---- chats


def test_the_last_message_is_continued(tiny, served):
    fields = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 8}
    more = {"continue_final_message": True, "ag": {"protect": ["template"]}}
    [choice] = served[0].chat.completions.create(**fields, extra_body=more).choices
    assert choice.message.content == answer_of(tiny, "user: Hi\nassistant: Well, I", 8)


def test_reasoning_effort_is_for_templates_that_have_it(tiny, served):
    fields = {"model": "tiny", "messages": CHAT[:1], "temperature": 0, "max_tokens": 8, "reasoning_effort": "low"}
    [choice] = served[0].chat.completions.create(**fields).choices
    assert choice.message.content == answer_of(tiny, "lowuser: Hi\nassistant:", 8)
    unknown = asked(Scheduler(tiny, byte_tokenizer(), "full", ag.Pool(tiny, 2**20)))
    with unknown as (client, *_), pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**fields)
    assert refused.value.param == "reasoning_effort"


# ---- headers


def test_request_ids_and_pages_of_other_addresses(served):
    """Every answer has them, also a stream and a refusal."""
    http = served[1]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for change in ({}, {"stream": True}, {"stream": True}, {"n": 0}):
        answer = http.post("/v1/completions", json=body | change, headers=ORIGIN | {"X-Request-Id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN["Origin"]]
    one, other = (http.get("/health", headers={"Origin": "https://other.example"}) for _ in range(2))
    assert one.headers["x-request-id"] != other.headers["x-request-id"]
    assert "access-control-allow-origin" not in one.headers
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = http.options("/v1/chat/completions", headers=ORIGIN | asks | {"Authorization": ""})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN["Origin"]


# ---- extensions


def test_a_request_has_a_policy_of_its_own(tiny, served):
    """Beside others under the server's; the answer says what stays of the prompt."""
    fields = {"model": "tiny", "prompt": ["What is it, and why? " * 3] * 2, "temperature": 0, "max_tokens": 8}
    ids = TOKENIZER(fields["prompt"][0])["input_ids"]
    for own, policy, kept in (
        ({"policy": "h2o", "budget": 0.25}, ag.policy("h2o", 0.25), 15 / 63),
        ({"policy": "snapkv", "budget": 40}, ag.policy("snapkv", 40), 40 / 63),
        ({"policy": "h2o", "budget": 1.0}, ag.policy("h2o", 1.0), 1),
        ({"policy": "h2o", "budget": 1}, ag.policy("h2o", 1), 1 / 63),
        ({}, ag.policy("full"), 1),
    ):
        expected = said(alone(tiny, policy, Request(tokens=ids, max_tokens=8)))
        for choice in served[0].completions.create(**fields, extra_body={"ag": own}).choices:
            assert choice.text == expected
            assert choice.ag == {"policy": " ".join(map(str, own.values())) or "full", "kept": pytest.approx(kept)}
    chat = {"model": "tiny", "messages": CHAT[:1], "max_tokens": 2, "ag": {"policy": "knorm", "budget": 4}}
    answer = served[1].post("/v1/chat/completions", json=chat).json()
    assert answer["ag"]["policy"] == "knorm 4" and 0 < answer["ag"]["kept"] < 1
    assert "ag" not in served[1].post("/v1/chat/completions", json={**chat, "ag": None}).json()


def test_a_policy_of_a_request_is_checked_without_memory(served, monkeypatch):
    """A pool beside the server's would take memory of the device, while the scheduler may record a step."""
    monkeypatch.setattr("ag.engine.cache_setup.BlockPool", Mock(side_effect=AssertionError("a pool is made")))
    body = {"model": "tiny", "prompt": "abc " * 9, "max_tokens": 2, "ag": {"policy": "tova", "budget": 7}}
    answer = served[1].post("/v1/completions", json=body).json()
    assert answer["choices"][0]["ag"]["policy"] == "tova 7"


def test_a_policy_of_a_request_has_the_positions_of_the_server(tiny):
    """Hyper-parameters only if it has the scorer of the server."""
    fields = {"model": "tiny", "prompt": "abc def " * 20, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    request = Request(tokens=TOKENIZER(fields["prompt"])["input_ids"], max_tokens=24)
    rest = {"schedule": "every", "positions": "slot"}
    scheduler = Scheduler(tiny, TOKENIZER, ag.policy("h2o", 0.5, recent=2, **rest), ag.Pool(tiny, 2**22))
    with asked(scheduler) as (_, http, _):
        for own, policy in (
            ({"policy": "snapkv", "budget": 0.25}, ag.policy("snapkv", 0.25, **rest)),
            ({"policy": "h2o", "budget": 0.25}, ag.policy("h2o", 0.25, recent=2, **rest)),
            ({"policy": "full"}, ag.policy("full", positions="slot")),
        ):
            answer = http.post("/v1/completions", json=fields | {"ag": own}).json()
            assert answer["choices"][0]["token_ids"] == alone(tiny, policy, request)


@pytest.fixture(scope="module")
def export(tiny, tmp_path_factory):
    """A folder with a model and exported gates, whose path nobody but the server may know."""
    folder = saved(tiny, tmp_path_factory.mktemp("secret") / "run")
    gates_for(tiny).save_pretrained(folder / "export")
    return folder


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        ({"policy": "gates:{0}/export", "budget": "0.5"}, "gates 0.5"),
        ({"policy": "mine=gates:{0}/export+caote", "budget": "0.5"}, "mine 0.5"),
        ({"gates": "{0}/export"}, "gates"),
        ({"policy": "flags", "gates": "{0}/export"}, "flags"),
    ],
)
def test_clients_read_no_path(export, keys, label):
    """In no answer and in no error, on no route; a path of a request is refused, right or wrong."""
    keys = {name: value.format(export) for name, value in keys.items()}
    scheduler = load_service(resolve(ServeConfig, {"model": str(export), "memory": "4MiB"} | keys)).scheduler
    body, told = {"model": "tiny", "prompt": "abc def " * 9, "max_tokens": 2, "temperature": 0}, []
    with asked(scheduler) as (_, http, _):
        for path in ("/live", "/metrics", "/v1/models", "/v1/models/tiny", "/version", "/health", "/", "/none"):
            told.append(http.get(path))
        assert told[0].json()["policy"] == label
        whole = http.post("/v1/completions", json=body | {"ag": {}})
        assert whole.json()["choices"][0]["ag"]["policy"] == label
        told.append(whole)
        for own in ({"budget": 0.25}, {"budget": 7}, {"policy": "gates", "budget": 0.25}, {"policy": "flags"}):
            told.append(http.post("/v1/completions", json=body | {"ag": own, "stream": True}))
            assert '"ag":{"policy":' in told[-1].text or told[-1].status_code == 400
        for own in ({"policy": "gates+vatp@heads"}, {"policy": "flags+vatp"}, {"budget": 0}, {"policy": "g"}):
            told.append(http.post("/v1/completions", json=body | {"ag": own}))
        chat = {"model": "tiny", "messages": CHAT[:1], "max_tokens": 2}
        told += [http.post("/v1/chat/completions", json=chat | {"ag": own}) for own in ({}, {"policy": "flags+x"})]
        told.append(http.post("/tokenize", json={"prompt": "x"}))
        refused = [
            http.post("/v1/completions", json=body | {"ag": {"policy": f"gates:{path}"}}).json()["error"]["message"]
            for path in (export / "export", "/etc")
        ]
        with torch.no_grad():  # probabilities become NaN, which the engine refuses with the text of the policy
            for parameter in scheduler.policy.gates.parameters():
                parameter.fill_(torch.nan)
        told.append(http.post("/v1/completions", json=body))
    assert refused[0].replace(str(export / "export"), "/etc") == refused[1] and "no path" in refused[0]
    assert not [answer.text for answer in told if "secret" in answer.text or str(export.parent) in answer.text]


@pytest.mark.parametrize(
    ("own", "param", "word"),
    [
        ({"policy": "h3o", "budget": 4}, "ag.policy", "h2o"),
        ({"policy": "h2o"}, "ag.budget", "needs a budget"),
        ({"policy": "full", "budget": 4}, "ag.budget", "nothing is evicted"),
        ({"budget": 4}, "ag.budget", "nothing is evicted"),
        ({"policy": "h2o", "budget": 0}, "ag.budget", "0"),
        ({"policy": "gates", "budget": 4}, "ag.policy", "no gates"),
        ({"policy": "gates:/etc", "budget": 4}, "ag.policy", "no path"),
        ({"share": 0.3}, "ag.share", "Extra"),
        ("h2o", "ag", "h2o"),
    ],
)
def test_policies_that_are_refused(served, own, param, word):
    answer = served[1].post("/v1/completions", json={"model": "tiny", "prompt": "x", "ag": own})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and word in error["message"]


def test_the_name_for_clients_is_the_base_models(tiny, export, monkeypatch):
    """Not the folder that it was read from, which in the hub's cache is named after a commit."""
    model = copy.copy(tiny)
    model.config = copy.deepcopy(tiny.config)
    model.config.name_or_path = "/home/user/.cache/hub/snapshots/12fd25f"
    monkeypatch.setattr("ag.serve.server.load_model", lambda *given, **more: (model, byte_tokenizer()))
    for name, wanted in (("smollm2", "smollm2"), ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"), (str(export), "run")):
        assert load_service(ServeConfig(model=name, policy="full", memory="4MiB")).name == wanted
    exports.save(export / "named", gates_for(tiny), base_model="ORG/base")
    assert load_service(ServeConfig(gates=str(export / "named"), memory="4MiB")).name == "base"


def test_a_server_whose_scheduler_fails_ends_with_an_error(export, monkeypatch, caplog):
    """So that a supervisor starts it again."""
    monkeypatch.setattr("ag.serve.server._set_up_log", lambda: None)
    monkeypatch.setattr(Scheduler, "run", lambda scheduler: scheduler.__dict__.update(failed=True) or 1 / 0)
    config = parse([f"model={export}", "policy=full", "memory=4MiB", "port=0"], ServeConfig, "ag.serve")
    assert run(config) == 1
    assert "the scheduler failed: ZeroDivisionError" in caplog.text
