"""Several prompts in a request, and the likelihood of prompts."""

import pytest
import torch

pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")

import ag  # noqa: E402
from ag.serve import Request, Scheduler  # noqa: E402
from tests.support.asked import asked  # noqa: E402
from tests.support.bounds import hold, of_nats  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer, said  # noqa: E402
from tests.support.served import alone  # noqa: E402

TOKENIZER = byte_tokenizer()
POLICY = ag.policy("h2o", 0.3)
PROMPTS = ["hello there", "What is é? " * 6, "What is é? " * 5 + "So"]  # two of them share their beginning
FIELDS = {"model": "tiny", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return tiny_llama(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def served(tiny):
    scheduler = Scheduler(tiny, byte_tokenizer(), POLICY, ag.Pool(tiny, 2**22), prefill_tokens=24)
    with asked(scheduler) as found:
        yield found


@pytest.fixture(scope="module")
def answers(tiny):
    """The answer to each prompt alone."""
    return [said(alone(tiny, POLICY, Request(tokens=ids_of(prompt), max_tokens=6))) for prompt in PROMPTS]


def ids_of(prompt):
    return TOKENIZER(prompt)["input_ids"]


def known(model, ids):
    """Log-probabilities ``[T - 1, V]`` of what follows each token but the last."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize(("as_ids", "stream"), [(False, True), (True, False)])
def test_each_prompt_is_answered_as_alone(served, answers, as_ids, stream):
    """The answers to a prompt follow those to the one before it."""
    prompts = [ids_of(prompt) for prompt in PROMPTS] if as_ids else PROMPTS
    answer = served[0].completions.create(**FIELDS, prompt=prompts, n=2, stream=stream)
    texts = [""] * 6
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [text for text in answers for _ in range(2)]
    if not stream:
        used = answer.usage
        assert (used.prompt_tokens, used.completion_tokens) == (sum(len(ids_of(x)) for x in PROMPTS), 36)


@pytest.mark.parametrize(("as_ids", "stream"), [(False, True), (True, False)])
def test_echo(tiny, served, answers, as_ids, stream):
    """The prompt stands before the answer, with the log-probabilities of the model before anything is evicted."""
    prompts = [ids_of(prompt) for prompt in PROMPTS] if as_ids else PROMPTS
    answer = served[0].completions.create(**FIELDS, prompt=prompts, echo=True, logprobs=2, stream=stream)
    choices = [{"text": "", "logprobs": {}} for _ in PROMPTS]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            choices[choice.index]["text"] += choice.text
            for name, values in choice.logprobs.model_dump().items():
                choices[choice.index]["logprobs"].setdefault(name, []).extend(values)
    for prompt, whole, choice in zip(PROMPTS, answers, choices, strict=True):
        ids, found = ids_of(prompt), choice["logprobs"]
        assert choice["text"] == prompt + whole
        assert [len(values) for values in found.values()] == [len(ids) + 6] * 4
        wanted = known(tiny, ids)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        own, best = found["token_logprobs"][1 : len(ids)], found["top_logprobs"][1 : len(ids)]
        hold(torch.tensor(own), wanted.gather(1, torch.tensor(ids)[1:, None])[:, 0], of_nats(tiny))
        hold(torch.tensor([max(values.values()) for values in best]), wanted.amax(1), of_nats(tiny))
        for token, values in zip(found["tokens"][1:], best, strict=False):
            assert token in values and len(values) <= 3
        offsets = found["text_offset"]
        assert offsets == sorted(offsets) and offsets[len(ids)] == len(prompt)
        assert [prompt[place] for place, byte in zip(offsets, ids, strict=False) if TOKENIZER.decode(byte).isascii()]


def test_a_prompt_is_scored_without_an_answer(tiny, served):
    """``prompt_logprobs`` has the form of vLLM; a cached prefix is not used, and its blocks are free afterwards."""
    client, http, service = served
    ids = ids_of(PROMPTS[1])
    wanted = known(tiny, ids)
    fields = FIELDS | {"max_tokens": 0, "extra_body": {"prompt_logprobs": 1}}
    for _ in range(3):  # the second one caches a prefix, which the third one could take
        answer = client.completions.create(**fields, prompt=ids, echo=True)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == (PROMPTS[1], "length", 0)
        first, *rows = choice.prompt_logprobs
        assert first is None
        for token, row, found in zip(ids[1:], wanted, rows, strict=True):
            best = int(row.argmax())
            assert set(found) == {str(token), str(best)}
            one = found[str(token)]
            assert (
                one["logprob"] == pytest.approx(float(row[token]), rel=1e-4)
                and one["rank"] == 1 + int((row > row[token]).sum())
                and found[str(best)]["rank"] == 1
            )
            assert one["decoded_token"] == service.scheduler.vocabulary.text(token)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0}
    found = http.post("/v1/chat/completions", json=chat).json()
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    assert all(len(row) == 1 for row in found["prompt_logprobs"][1:])


def test_usage_counts_what_a_cached_prefix_gave(served):
    for _ in range(3):
        answer = served[0].completions.create(**FIELDS, prompt="A beginning that many share. " * 4 + "x")
    assert answer.usage.prompt_tokens_details.cached_tokens == 112
