"""Answers that follow a grammar: in a batch as alone, whatever happens to them, and what is refused."""

import json
import random
import re
import sys

import pytest
import torch
from tokenizers import normalizers

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ag[structured]'")

import ag  # noqa: E402
from ag.engine.block_pool import PoolFullError  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.serve import Request, Scheduler  # noqa: E402
from ag.serve.structured import Grammars  # noqa: E402
from tests.support.asked import asked  # noqa: E402
from tests.support.byte_fallback import fallback_tokenizer  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer, said  # noqa: E402
from tests.support.refused import refuses  # noqa: E402
from tests.support.served import alone, finish, read, text  # noqa: E402

TOKENIZER = byte_tokenizer()
#: Without blanks, which a random model would write.
BARE = {"type": "object", "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
SCHEMA = BARE | {
    "properties": {"town": {"enum": ["Oslo", "Łódź"]}, "mm": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["town", "mm"],
}
#: Grammars by kind, and what says whether a whole answer follows them.
KINDS = {
    "json": (json.dumps(SCHEMA), lambda text: {*json.loads(text)} == {"town", "mm"}),
    "regex": ("(ab|cd){3,20}x?", lambda text: re.fullmatch("(ab|cd){3,20}x?", text)),
    "choice": ('["Ja 😀", "Jawohl", "nein"]', lambda text: text in ("Ja 😀", "Jawohl", "nein")),
    "grammar": ('root ::= "(" root ")" | "o"', lambda text: re.fullmatch(r"(\(*)o(\)*)", text)),
}


def composing():
    """A tokenizer that composes accents, as that of Qwen."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.fixture
def model(tiny_llama):
    return tiny_llama(num_hidden_layers=2, vocab_size=VOCABULARY, eos_token_id=2, pad_token_id=0)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER, VOCABULARY, {2})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafts"), [("full", 9), ("every", 0)])
def test_answers_are_those_of_each_request_alone(model, grammars, name, drafts):
    """Free and ruled, greedy and sampled; some wait, some are preempted, and some share prefixes."""
    policy, draw = ag.policy(*{"full": ["full"], "every": ["h2o", 12, "every"]}[name]), random.Random(4)
    pool = ag.Pool(model, 130 * ag.Pool(model, 2**14).block_nbytes())
    scheduler = Scheduler(model, TOKENIZER, policy, pool, prefill_tokens=24, prompt_lookup=drafts)
    system, requests, streams = text(draw, 66), [], []
    for number in range(10):
        kind = [None, *KINDS][number % 5]
        requests.append(
            Request(
                tokens=draw.choice([system, []]) + text(draw, draw.randrange(1, 9)) * 3,
                max_tokens=draw.choice([9, 32, 32]),
                temperature=draw.choice([0.0, 0.0, 1.0]),
                seed=number,
                grammar=kind and grammars(kind, KINDS[kind][0]),
            )
        )
        streams += [(kind, requests[-1], stream) for stream in scheduler.submit(requests[-1])]
        for _ in range(draw.randrange(5)):
            scheduler.step()
        if number % 3 == 2 and len(scheduler._running) > 1:
            scheduler._preempt(scheduler._default_batch, PoolFullError("full"))
    finish(scheduler)
    for kind, request, stream in streams:
        found = read(stream)
        if not request.temperature:
            assert found == alone(model, policy, request), kind
        if kind and stream.reason == "stop":
            assert KINDS[kind][1](said(found)), (kind, said(found))
    counts = scheduler.counts
    assert counts.preempted and counts.cached and bool(drafts) == bool(counts.accepted)
    assert {kind for kind, _, stream in streams if stream.reason == "stop"} >= {*KINDS}


def test_an_answer_that_leaves_its_grammar_ends_by_an_error(model, grammars, monkeypatch):
    """Other answers go on."""
    scheduler = Scheduler(model, TOKENIZER, "full", ag.Pool(model, 2**22))
    (wrong,) = scheduler.submit(Request(tokens=[7, 8], grammar=grammars("regex", "a+")))
    (right,) = scheduler.submit(Request(tokens=[7, 8], grammar=grammars("regex", "ab")))
    monkeypatch.setattr(scheduler._waiting[0][0].sampler, "_processors", lambda text, scores: torch.zeros_like(scores))
    finish(scheduler)
    with refuses(UserError, "grammar"):
        read(wrong)
    assert said(read(right)) == "ab" and right.reason == "stop"


#: Texts that tokenizers write with tokens of another text: special tokens, and a letter with its accent apart.
OTHERWISE = ["b</s>b", "<pad>", "<s", "</s></s>.", "cafe\u0301"]


@pytest.mark.parametrize("text", OTHERWISE)
@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), fallback_tokenizer(), composing()])
def test_a_text_is_spelled_by_tokens_of_text(tiny_llama, tokenizer, text):
    """As the only text, and in a longer one; no special token is in the answer."""
    model = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=2)
    scheduler = Scheduler(model, tokenizer, "full", ag.Pool(model, 2**22))
    made, said = Grammars(tokenizer, len(tokenizer), {2}), json.dumps(text, ensure_ascii=False)
    for kind, grammar, expected in (
        ("choice", f"[{said}]", text),
        ("json", f'{{"enum": [{said}]}}', said),
        ("json", json.dumps(BARE | {"properties": {text: {"const": 1}}, "required": [text]}), f"{{{said}:1}}"),
        ("regex", f"x{re.escape(text)}x", f"x{text}x"),
        ("grammar", f'root ::= "y" {said} | {said}', text),
    ):
        for temperature in (0.0, 1.0):
            [stream] = scheduler.submit(Request(tokens=[7], grammar=made(kind, grammar), temperature=temperature))
            finish(scheduler)
            tokens = [*stream]
            written = "".join(token.text for token in tokens) + stream.detokenizer.flush()
            assert (written.removeprefix("y"), stream.reason) == (expected, "stop")
            assert not {token.id for token in tokens} & {*scheduler.vocabulary.special.values()}


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        ("json", '{"type": "strin"}', "strin"),
        ("json", "[", "Expecting"),
        ("json", "[" * 10**5, "recursion"),
        ("json", '{}}, {"lark_grammar": "start: /a/"', "Extra"),
        ("json", '{"not": {}}', "not"),
        ("regex", "(a", "unclosed"),
        ("grammar", "start: x", "x"),
        ("grammar", "?", "name"),
    ],
)
def test_what_is_no_grammar_is_refused(grammars, kind, text, word):
    with refuses(UserError, f"valid {kind}", word):
        grammars(kind, text)


TOOL = {"type": "function", "function": {"name": "rain"}}
WRONG = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
#: Parameters, the one at fault, and words of the refusal.
REFUSED = [
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "valid json"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "valid grammar"),
    ({"response_format": WRONG}, "response_format.json_schema.schema", "strin"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "leave one of them out"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "leave one of them out"),
    ({"structured_outputs": {"regex": "a"}, "tools": [TOOL]}, "structured_outputs", "excludes calls"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format", "the chat template"),
]


def test_rules_of_requests(model, monkeypatch):
    """They hold, or are refused by name; without llguidance with the line that installs it."""
    scheduler = Scheduler(model, byte_tokenizer(), "full", ag.Pool(model, 2**20))
    scheduler.tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    with asked(scheduler) as (client, http, _):
        for kind, rule, expected in (("choice", ["yes"], "yes"), ("regex", "a{3}", "aaa"), ("json", {"const": 1}, "1")):
            rules = {"structured_outputs": {kind: rule}}
            [choice] = client.completions.create(model="tiny", prompt="x", extra_body=rules).choices
            assert (choice.text, choice.finish_reason) == (expected, "stop")
            [choice] = client.chat.completions.create(**chat, extra_body=rules).choices
            assert (choice.message.content, choice.finish_reason) == (expected, "stop")
        for change, param, word in REFUSED:
            error = http.post("/v1/chat/completions", json=chat | change).json()["error"]
            assert error["param"] == param and word in error["message"], error
        monkeypatch.setitem(sys.modules, "llguidance", None)
        answer = http.post("/v1/chat/completions", json=chat | {"response_format": {"type": "json_object"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "pip install 'ag[structured]'" in answer.json()["error"]["message"]
