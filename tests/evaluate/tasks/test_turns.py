"""Several turns over one context: facts and questions, and scores turn by turn."""

import re

import pytest
import torch

import ag
from ag.evaluate.tasks import make
from tests.support.bounds import hold, of_nats

FACT = re.compile(r"(?:The|the) secret number of the (\w+) is (?:now )?(\d+)\.|VAR (\w+) = (?:VAR (\w+)|(\d+))\.")
ASKED = re.compile(r"What is (?:the value of VAR (\w+)|the secret number of the (\w+?)(?: now)?)\?")


def load(name, root, tokenizer, **options):
    task = make(name, root, **{"lengths": [1500], "repeats": 3} | options)
    return task, task.load(tokenizer, None, 2000).samples


def learn(known, text):
    """Read the facts of a text in their order; a later one takes the place of an earlier one."""
    for key, number, variable, other, value in FACT.findall(text):
        known[key or variable] = number or value or known[other]


@pytest.mark.parametrize("options", [{}, {"haystack": "noise", "hops": 2, "digits": 4}])
def test_every_answer_follows_from_the_text_before(options, root, tiny_tokenizer):
    """In turn and apart, which have the same questions and contexts."""
    found = {name: load(name, root, tiny_tokenizer, **options)[1] for name in ("turns", "turns_apart")}
    for name, sample in [(name, sample) for name, samples in found.items() for sample in samples]:
        known, told, apart = {}, [], name == "turns_apart"
        learn(known, tiny_tokenizer.decode(sample.prompt))
        before = dict(known)
        for place, turn in enumerate(sample.parts):
            known = dict(before) if apart else known
            text = tiny_tokenizer.decode(turn.question)
            told += [place] if "From now on" in text else []
            learn(known, text)
            [(variable, key)] = ASKED.findall(text)
            assert known[variable or key] == tiny_tokenizer.decode(turn.answer).strip()
            assert len(known[variable or key]) == options.get("digits", 5) and turn.first == 1
            if turn.kind == "updated":
                assert known[key] != before[key]
                assert told == [place] if apart else told[0] < place
            elif turn.kind == "latest":
                assert tiny_tokenizer.decode(sample.prompt).count(f"number of the {key} is") == 3
        kinds = sorted(turn.kind for turn in sample.parts)
        assert kinds == ["key", "key", "latest", "updated", "variable", "variable"] and len(told) == 1
        assert 1500 - 62 < len(sample.prompt) + len(sample.question) <= 1500 or apart
    for one, two in zip(*found.values(), strict=True):
        assert (one.id, one.prompt) == (two.id, two.prompt)
        assert [(x.kind, x.answer) for x in one.parts] == [(x.kind, x.answer) for x in two.parts]


@pytest.mark.parametrize("name", ["turns", "turns_apart"])
@pytest.mark.parametrize("spec", ["full", "h2o"])
def test_nats_by_hand(name, spec, root, tiny_llama, tiny_tokenizer):
    """A pass of its own for each turn, with the model's own forward; with a full cache no cache at all."""
    model = tiny_llama()
    task, [sample] = load(name, root, tiny_tokenizer, repeats=1)
    policy = ag.policy(spec) if spec == "full" else ag.policy(spec, 0.3)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [sample])
    nats, so_far = [], sample.prompt
    cache = ag.EvictionCache(model, policy)
    with torch.no_grad():
        model(torch.tensor([sample.prompt]), past_key_values=cache)
        held = cache.kept_share()
        for turn in sample.parts:
            if name == "turns_apart":
                cache, so_far = ag.EvictionCache(model, policy), sample.prompt
                model(torch.tensor([sample.prompt]), past_key_values=cache)
            rest = turn.question + turn.answer
            if spec == "full":
                logits = model(torch.tensor([so_far + rest]), use_cache=False).logits[0, len(so_far) :]
            else:
                logits = model(torch.tensor([rest]), past_key_values=cache).logits[0]
            said = logits[len(turn.question) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(turn.answer)[:, None])
            nats.append(-float(said[turn.first :].mean()))
            so_far = so_far + rest
    for place, expected in enumerate(nats, 1):
        hold(outcome.tags[f"nats@turn {place}"], expected, of_nats(model))
    keys = [x for x, turn in zip(nats, sample.parts, strict=True) if turn.kind == "key"]
    hold(outcome.tags["nats@kind key"], sum(keys) / 2, of_nats(model))
    hold(outcome.tags["nats"], sum(nats) / 6, of_nats(model))
    assert (outcome.kept, outcome.tokens) == (held, len(sample.prompt))
    assert (outcome.tags["kl"] == 0.0) == (spec == "full")


def test_an_answer_is_exact_where_each_token_is_the_likeliest(root, tiny_llama, tiny_tokenizer):
    """Of six answers two are what the model says itself."""
    model = tiny_llama()
    task, [sample] = load("turns_apart", root, tiny_tokenizer, repeats=1)
    for turn in sample.parts[1:3]:
        whole = torch.tensor([sample.prompt + turn.question + turn.answer[:1]])
        turn.answer[1:] = model.generate(whole, max_new_tokens=5, do_sample=False)[0, whole.shape[1] :].tolist()
    [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], [sample])
    assert [outcome.tags[f"score@turn {i}"] for i in range(1, 7)] == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert outcome.score == pytest.approx(1 / 3) and outcome.tags["same_top1"] == 1.0


def test_a_policy_that_goes_on_evicting_is_fed_in_its_steps(root, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    task, [sample] = load("turns", root, tiny_tokenizer, repeats=1)
    policy = ag.policy("h2o", 200, "steps:50")
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [sample])
    cache, asked = ag.EvictionCache(model, policy), torch.tensor(sample.question)
    with torch.no_grad():
        model(torch.tensor([sample.prompt]), past_key_values=cache)
        logits = torch.cat([model(part[None], past_key_values=cache).logits[0] for part in asked.split(50)])
    said = logits[:-1].log_softmax(-1).gather(1, asked[1:, None])
    end = len(sample.parts[0].question + sample.parts[0].answer) - 1
    hold(outcome.tags["nats@turn 1"], -float(said[end - 5 : end].mean()), of_nats(model))
    hold(outcome.tags["nats@turn 6"], -float(said[-5:].mean()), of_nats(model))
