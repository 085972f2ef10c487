"""Instructions before a long text: demands, the protected span, and when an instruction is followed."""

import copy

import pytest
import torch

import ag
from ag.evaluate.tasks import make
from ag.evaluate.tasks.instructions import RULE_KINDS
from tests.support.bounds import hold, of_nats

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<answer>"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


def load(name, root, tokenizer, **options):
    task = make(name, root, **{"lengths": [1100], "repeats": 2} | options)
    return task, task.load(tokenizer, None, 2000).samples


@pytest.mark.parametrize(("template", "rules"), [(None, 8), (CHAT, 4), (NO_SYSTEM, 4)])
def test_what_is_demanded_stands_in_the_system_prompt(template, rules, root, tiny_tokenizer, monkeypatch):
    """Which is protected; the samples are the same without protection."""
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    options = {"rules": rules, "haystack": "noise" if template is None else "text", "lengths": [1200]}
    _, samples = load("instructions_4", root, tiny_tokenizer, **options)
    exempt = load("instructions_4_protected", root, tiny_tokenizer, **options)[1]
    for sample, protected in zip(samples, exempt, strict=True):
        text, question = (tiny_tokenizer.decode(x) for x in (sample.prompt, sample.question))
        assert question.startswith("\n\nWhat is the text above about?")
        role = {None: "", CHAT: "<system>", NO_SYSTEM: "<user>"}[template]
        assert text.startswith(f"{role}You answer") and (template is None or question.endswith("</><answer>"))
        lines = [line.partition(". ")[2] for line in text.split("</>")[0].split("\n\n")[0].splitlines()[1:]]
        assert len(lines) == len({one.kind for one in sample.parts}) == rules
        for number, (line, one) in enumerate(zip(lines, sample.parts, strict=True)):
            said, instead = (tiny_tokenizer.decode(x) for x in sample.answers[2 * number : 2 * number + 2])
            assert RULE_KINDS[one.kind].text.format(one.chosen.rule_text) == line and one.chosen != one.alternative
            assert said[: one.lead] == instead[: one.lead] == RULE_KINDS[one.kind].lead
            assert (said[one.lead :], instead[one.lead :]) == (one.chosen.answer_text, one.alternative.answer_text)
        assert 1200 - 62 < len(sample.prompt) + len(sample.question) <= 1200
        assert (sample.protect, sample.prompt, sample.answers) == ([], protected.prompt, protected.answers)
        [(start, end)] = protected.protect
        assert start == 0 and tiny_tokenizer.decode(protected.prompt[:end]).endswith(lines[-1])


@pytest.mark.parametrize("budget", [None, 0.7])
def test_followed_and_nats_by_hand(budget, root, tiny_llama, tiny_tokenizer, plain):
    """Each answer by itself behind prompt and question; without a budget without a cache."""
    model = tiny_llama()
    task, [sample] = load("instructions_4_protected", root, tiny_tokenizer, lengths=[900], repeats=1)
    policy = ag.policy("full") if budget is None else ag.policy("h2o", budget)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [sample])
    read, means = ag.EvictionCache(model, policy), []
    read.protect(sample.protect)
    with torch.no_grad():
        model(torch.tensor([sample.prompt]), past_key_values=read)
    held = {token for head in read.kept_positions(0)[0] for token in head.tolist()}
    assert held >= set(range(sample.protect[0][1])) and outcome.kept == pytest.approx(read.kept_share())
    for number, answer in enumerate(sample.answers):
        if budget is None:
            said = plain(model, sample.prompt + sample.question, answer)
        else:
            with torch.no_grad():
                rest = torch.tensor([sample.question + answer])
                logits = model(rest, past_key_values=copy.deepcopy(read)).logits[0, len(sample.question) - 1 : -1]
            said = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        means.append(float(said[sample.parts[number // 2].lead :].mean()))
    scores = [float(said > instead) for said, instead in zip(means[::2], means[1::2], strict=True)]
    for place, (score, mean, one) in enumerate(zip(scores, means[::2], sample.parts, strict=True), 1):
        assert outcome.tags[f"score@place {place}"] == outcome.tags[f"score@rule {one.kind}"] == score
        hold(outcome.tags[f"nats@place {place}"], -mean, of_nats(model))
    assert outcome.score == sum(scores) / 4
    hold(outcome.tags["nats"], -sum(means[::2]) / 4, of_nats(model))
    assert not outcome.tags.keys() & {"kl", "same_top1"}  # which would be of the first instruction alone
