"""Clients of others against the server."""

from copy import deepcopy

import pytest

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("fastapi", reason="needs the server's libraries: pip install 'ag[serve]'")

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
