"""Solutions that are written while tokens are evicted, and own solutions that are read: each against one text alone."""

import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.evaluate.tasks.reasoning import INSTRUCTION, GivenTexts, SampledTokens
from ag.evaluate.tasks.solutions import Decoded
from ag.evaluate.tasks.solutions import decode as real_decode
from tests.support.bounds import hold, of_nats
from tests.support.refused import refuses

GSM8K = [
    {
        "question": f"Tom has {i} {'red ' * i}apples and eats one. How many?",
        "answer": f"{i} - 1 = {i - 1}\n#### {i - 1}",
    }
    for i in (5, 3, 4)
]
MATH500 = [{"problem": r"Simplify $\frac{2}{4}$.", "answer": r"\frac{1}{2}", "solution": r"\boxed{\frac{1}{2}}"}]
POLICIES = [ag.policy("full"), ag.policy("streaming_llm", 24, "every"), ag.policy("h2o", 20, "steps:3")]
LENGTH = 9


@pytest.fixture
def load(write, tiny_tokenizer):
    """`load(name, **options)`: a task and its samples."""

    def load(name="gsm8k", max_tokens=512, **options):
        write("gsm8k/test", GSM8K)
        task = make(name, write("math500/test", MATH500), **{"max_new_tokens": LENGTH} | options)
        return task, task.load(tiny_tokenizer, None, max_tokens)

    return load


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


def alone(model, policy, sample, length=LENGTH):
    """The text that ``model.generate`` writes after one prompt, with its end token, and the cache."""
    cache = ag.EvictionCache(model, policy)
    tokens = model.generate(
        torch.tensor([sample.prompt]), past_key_values=cache, max_new_tokens=length, do_sample=False
    )
    return tokens[0, len(sample.prompt) :].tolist(), cache


def test_problems_are_read_with_their_answers(load, tiny_tokenizer):
    _, gsm8k = load()
    assert [sample.references for sample in gsm8k.samples] == [["4"], ["2"], ["3"]]
    _, math500 = load("math500")
    assert [sample.references for sample in math500.samples] == [[r"\frac{1}{2}"]]
    rows = [*zip(gsm8k.samples, [row["question"] for row in GSM8K], strict=True)]
    for sample, problem in [*rows, (math500.samples[0], MATH500[0]["problem"])]:
        assert tiny_tokenizer.decode(sample.prompt) == f"{INSTRUCTION}\n\n{problem}\n\n"
        assert sample.max_new_tokens == LENGTH
    sizes = [len(sample.prompt) + LENGTH for sample in gsm8k.samples]
    _, left = load(max_tokens=max(sizes) - 1)
    assert ([sample.id for sample in left.samples], left.too_long) == (["1", "2"], 1)


def test_rows_without_an_answer_are_refused(write, tiny_tokenizer):
    root = write("math500/test", [{"problem": "1 + 1"}])
    with refuses(UserError, "math500", "row 1", "answer"):
        make("math500", root).load(tiny_tokenizer, None, 512)
    for options, *parts in (({"dataset": "aime"}, "dataset='aime'"), ({"temperature": -1.0}, "temperature=-1.0")):
        with refuses(UserError, *parts):
            make("gsm8k", **options)


def test_written_solutions_are_what_each_is_alone(load, model, tiny_tokenizer):
    """Two problems in the first batch and one in the second; a text ends at the fourth token of the first problem."""
    task, loaded = load(batch=2)
    model.generation_config.eos_token_id = [2, alone(model, POLICIES[0], loaded.samples[0])[0][3]]
    outcomes = [*task.run(model, tiny_tokenizer, POLICIES, loaded.samples)]
    lengths = set()
    for index, policy in enumerate(POLICIES):
        mine = [outcome for at, outcome in outcomes if at == index]
        assert [outcome.sample for outcome in mine] == ["0", "1", "2"]
        for outcome, sample in zip(mine, loaded.samples, strict=True):
            text, cache = alone(model, policy, sample)
            assert (outcome.tags["generated"], outcome.tokens) == (len(text), cache.seen_tokens)
            assert outcome.kept == pytest.approx(cache.kept_share())
            assert outcome.tags["held"] == pytest.approx(float(cache.held_tokens().mean()))
            assert (outcome.score, outcome.tags["answer"]) == (0.0, "")
            lengths.add(len(text))
    assert len(lengths) > 1
    for index, outcome in outcomes:
        read = outcome.tokens
        assert outcome.tags["most_held"] == [read, 24, min(22, 20 + outcome.tags["generated"] - 1)][index]


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "streaming_llm", "h2o"])
def test_own_solutions_are_read_as_each_is_alone(load, model, tiny_tokenizer, plain, step_by_step, policy):
    task, loaded = load("gsm8k_nats", batch=2)
    model.generation_config.eos_token_id = [2, alone(model, POLICIES[0], loaded.samples[0])[0][3]]
    texts = [alone(model, POLICIES[0], sample)[0] for sample in loaded.samples]
    assert len({*map(len, texts)}) > 1
    outcomes = [outcome for _, outcome in task.run(model, tiny_tokenizer, [policy], loaded.samples)]
    for outcome, sample, text in zip(outcomes, loaded.samples, texts, strict=True):
        cache = ag.EvictionCache(model, policy)
        want = step_by_step(model, cache, sample.prompt, text)
        hold(outcome.score, -float(want.mean()), of_nats(model))
        assert outcome.tags["generated"] == len(text)
        assert outcome.tags["held"] == pytest.approx(float(cache.held_tokens().mean()))
        dense = -float(plain(model, sample.prompt, text).mean())
        if policy.budget is None:
            hold(outcome.score, dense, of_nats(model))
        else:
            assert abs(outcome.score - dense) > of_nats(model)


def test_the_full_cache_writes_once_for_all_policies(load, model, tiny_tokenizer, monkeypatch):
    calls = []
    decode = "ag.evaluate.tasks.solutions.decode"
    monkeypatch.setattr(decode, lambda *given: calls.append(given[-1]) or real_decode(*given))
    task, loaded = load("gsm8k_nats", batch=3)
    outcomes = [*task.run(model, tiny_tokenizer, POLICIES, loaded.samples)]
    assert len({(outcome.sample, outcome.tags["solution"]) for _, outcome in outcomes}) == 3
    assert len(outcomes) == 9 and [isinstance(call, GivenTexts) for call in calls] == [False, True, True, True]


def test_answers_are_graded(load, model, tiny_tokenizer, monkeypatch):
    said = [r"So \boxed{4.0}", r"\boxed{2} or \boxed{3}", "3"]
    texts = [Decoded(tiny_tokenizer(text)["input_ids"], [1.0], (1, 1.0, 1), False) for text in said]
    monkeypatch.setattr("ag.evaluate.tasks.solutions.decode", lambda *_: texts)
    task, loaded = load()
    outcomes = [outcome for _, outcome in task.run(model, tiny_tokenizer, POLICIES[:1], loaded.samples)]
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 0.0]
    assert [outcome.tags["answer"] for outcome in outcomes] == ["4.0", "3", ""]


def test_draws_of_a_problem_depend_on_the_seed_alone(load, model, tiny_tokenizer, monkeypatch):
    written = []

    def decode(*given):
        texts = real_decode(*given)
        written.extend(text.tokens for text in texts)
        return texts

    def texts(**options):
        written.clear()
        task, loaded = load(**options)
        [*task.run(model, tiny_tokenizer, POLICIES[:1], loaded.samples)]
        return [*written]

    monkeypatch.setattr("ag.evaluate.tasks.solutions.decode", decode)
    first = texts(temperature=1.0)
    assert first == texts(temperature=1.0, batch=1) != texts(temperature=1.0, seed=1)
    assert texts(temperature=1e-6) == texts(temperature=1e-300) == texts() != first


def test_tokens_are_drawn_by_their_probabilities():
    """The counts of 4,000 draws of each of two texts are within five standard deviations of what is expected."""
    logits, temperature, draws = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -torch.inf]]), 2.0, 4000
    sampled = SampledTokens(temperature, [0, 1])
    drawn = torch.tensor([sampled(logits, [0, 1]) for _ in range(draws)])
    for text, probabilities in enumerate((logits / temperature).softmax(-1)):
        counts = torch.bincount(drawn[:, text], minlength=3)
        hold(counts.double(), draws * probabilities, 5 * (draws * probabilities * (1 - probabilities)).sqrt() + 1e-9)


def test_given_tokens_have_their_nats():
    """The second text has ended when the first goes on."""
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    given = GivenTexts([[1, 0], [0]])
    assert (given(logits, [0, 1]), given(logits[:1], [0])) == ([1, 0], [0])
    losses = -logits.double().log_softmax(-1)
    for nats, right in zip(given.nats, ([losses[0, 1], losses[0, 0]], [losses[1, 0]]), strict=True):
        assert nats == pytest.approx([float(x) for x in right], rel=1e-6)
