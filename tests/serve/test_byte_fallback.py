"""Answers of a model whose tokenizer falls back to bytes, as those of Llama 2, Mistral and Gemma do."""

import asyncio
import json

import pytest

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("fastapi", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Request, Scheduler  # noqa: E402
from tests.serve.test_app import client_of  # noqa: E402
from tests.support.byte_fallback import PIECES, bytes_as_tokens, fallback_tokenizer  # noqa: E402

SIZE = len(fallback_tokenizer())
#: Tokens that are spelled alike, or like half a character, and such as differ by the space in front.
ALIKE = [*bytes_as_tokens(b"A\xe4"), *(SIZE - len(PIECES) + PIECES.index(piece) for piece in ("A", "the", "▁the"))]


@pytest.fixture
def scheduler(tiny_llama):
    model = tiny_llama(vocab_size=SIZE, num_hidden_layers=1, eos_token_id=2)
    return Scheduler(model, fallback_tokenizer(), "full", ag.Pool(model, 2**22))


def asked_all(scheduler, bodies):
    """The answers to texts, all at once."""

    async def work():
        async with client_of(scheduler) as (client, _):
            asked = [client.post("/v1/completions", json={"model": "tiny"} | body) for body in bodies]
            return await asyncio.gather(*asked)

    return asyncio.run(work())


def test_every_drawn_answer_comes(scheduler):
    """Of a random model, behind whole characters and half of one: whole and streamed they are one text."""
    prompts = ["語" * 9, "the word", bytes_as_tokens("語語".encode())[:-1], [1, *bytes_as_tokens(b"\xff")]]
    bodies = [
        {"prompt": prompt, "seed": seed, "temperature": 2, "max_tokens": 12, "stream": stream}
        for prompt in prompts
        for seed in range(3)
        for stream in (False, True)
    ]
    answers = asked_all(scheduler, bodies)
    assert [answer.status_code for answer in answers] == [200] * len(bodies)
    texts = set()
    for whole, stream in zip(answers[::2], answers[1::2], strict=True):
        events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        pieces = [json.loads(event)["choices"][0]["text"] for event in events]
        assert "".join(pieces) == whole.json()["choices"][0]["text"]
        texts.add("".join(pieces))
    assert len(texts) > 6 and not any("語" in text or "word" in text for text in texts)


@pytest.mark.parametrize("best", [0, 1, 5, 20])
def test_each_of_the_most_probable_tokens_has_its_name(scheduler, best):
    """Tokens that are spelled alike too, and the one that was chosen, which is named as it is among the tokens."""
    told = {"prompt": bytes_as_tokens(b"xyz"), "max_tokens": 3, "temperature": 0, "logprobs": best}
    answers = asked_all(scheduler, [told | {"logit_bias": {str(chosen): 100}} for chosen in ALIKE])
    requests = [Request(tokens=told["prompt"], max_tokens=3, logprobs=best, logit_bias={x: 100.0}) for x in ALIKE]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    while scheduler.busy:
        scheduler.step()
    for answer, stream in zip(answers, streams, strict=True):
        [choice] = answer.json()["choices"]
        names, chosen, named = (choice["logprobs"][x] for x in ("tokens", "token_logprobs", "top_logprobs"))
        for place, token in enumerate(stream):
            values = dict(token.best) | {token.id: token.logprob}
            # as near as two batches of other sizes are
            assert [*named[place].values()] == pytest.approx([*values.values()], rel=1e-4)
            assert named[place][names[place]] == chosen[place] == pytest.approx(token.logprob, rel=1e-4)
        assert place == 2
