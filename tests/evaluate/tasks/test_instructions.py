"""Instructions before a long text: what is demanded, what is protected, and when an instruction is followed."""

import copy
import itertools

import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.evaluate.tasks.instructions import KINDS, Choice
from tests.support.bounds import hold, of_nats
from tests.support.refused import refuses

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<answer>"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


def load(name, root, tokenizer, **options):
    task = make(name, root, **{"lengths": [900, 1100], "repeats": 3} | options)
    return task, task.load(tokenizer, None, 2000).samples


@pytest.mark.parametrize("template", [None, CHAT, NO_SYSTEM])
@pytest.mark.parametrize("options", [{}, {"haystack": "noise", "rules": 8}])
def test_what_is_demanded_stands_in_the_system_prompt(template, options, root, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    rules = {"lengths": [1200], **options}
    _, samples = load("instructions_4", root, tiny_tokenizer, **rules)
    assert samples == load("instructions_4", root, tiny_tokenizer, **rules)[1]
    assert samples != load("instructions_4", root, tiny_tokenizer, seed=1, **rules)[1]
    for sample in samples:
        text, question = (tiny_tokenizer.decode(x) for x in (sample.prompt, sample.question))
        assert question.startswith("\n\nWhat is the text above about?")
        assert template is None or (
            question.endswith("</><answer>") and text.startswith(f"<{'system' if template == CHAT else 'user'}>You")
        )
        numbered = [line.partition(". ")[2] for line in text.split("</>")[0].split("\n\n")[0].splitlines()[1:]]
        assert len(numbered) == len(sample.demands) == options.get("rules", 4)
        assert len({one.kind for one in sample.demands}) == len(numbered)
        for line, one, lead, pair in zip(numbered, sample.demands, sample.leads, sample.answers, strict=True):
            said, instead = (tiny_tokenizer.decode(tokens) for tokens in pair)
            assert KINDS[one.kind].text.format(one.said.said) == line and one.said != one.instead
            assert said[:lead] == instead[:lead] == KINDS[one.kind].lead
            assert (said[lead:], instead[lead:]) == (one.said.written, one.instead.written)
        assert 1200 - 62 < len(sample.prompt) + len(sample.question) <= 1200
        assert sample.protect == []


@pytest.mark.parametrize("template", [None, CHAT])
def test_the_system_prompt_is_protected_from_the_same_samples(template, root, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    (_, bare), (_, exempt) = (
        load(name, root, tiny_tokenizer) for name in ("instructions_4", "instructions_4_protected")
    )
    for one, two in zip(bare, exempt, strict=True):
        assert (one.prompt, one.answers) == (two.prompt, two.answers)
        [(start, end)] = two.protect
        last = KINDS[two.demands[-1].kind].text.format(two.demands[-1].said.said)
        assert start == 0 and tiny_tokenizer.decode(two.prompt[:end]).endswith(last)


def test_protected_tokens_stay(root, tiny_llama, tiny_tokenizer):
    """In the caches that are asked; the budget counts them."""
    model, kept = tiny_llama(), []
    for name in ("instructions_4", "instructions_4_protected"):
        task, [sample] = load(name, root, tiny_tokenizer, lengths=[1100], repeats=1)
        [(cache, _)] = ag.engine.read_prompt(
            model, [ag.policy("knorm", 0.5)], torch.tensor([sample.prompt]), protect=sample.protect
        )
        end = load("instructions_4_protected", root, tiny_tokenizer, lengths=[1100], repeats=1)[1][0].protect[0][1]
        kept.append(
            [len({*range(end)} - {*head.tolist()}) for layer in (0, 1) for head in cache.kept_positions(layer)[0]]
        )
        [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("knorm", 0.5)], [sample])
        assert outcome.kept == pytest.approx(0.5, abs=1 / len(sample.prompt))
    assert min(kept[0]) > 0 and max(kept[1]) == 0


@pytest.mark.parametrize("budget", [None, 0.7])
def test_followed_and_nats_by_hand(budget, root, tiny_llama, tiny_tokenizer, plain):
    """Each answer by itself behind prompt and question; without a budget without a cache."""
    model = tiny_llama()
    task, [sample] = load("instructions_4_protected", root, tiny_tokenizer, lengths=[900], repeats=1)
    policy = ag.policy("full") if budget is None else ag.policy("h2o", budget)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [sample])
    scores, nats, read = [], [], ag.EvictionCache(model, policy)
    read.protect(sample.protect)
    with torch.no_grad():
        model(torch.tensor([sample.prompt]), past_key_values=read)
    for lead, pair in zip(sample.leads, sample.answers, strict=True):
        means = []
        for answer in pair:
            if budget is None:
                said = plain(model, sample.prompt + sample.question, answer)
            else:
                with torch.no_grad():
                    rest = torch.tensor([sample.question + answer])
                    logits = model(rest, past_key_values=copy.deepcopy(read)).logits[0, len(sample.question) - 1 : -1]
                said = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            means.append(float(said[lead:].mean()))
        scores.append(float(means[0] > means[1]))
        nats.append(-means[0])
    for place, (score, mean, one) in enumerate(zip(scores, nats, sample.demands, strict=True), 1):
        assert outcome.tags[f"score@place {place}"] == outcome.tags[f"score@rule {one.kind}"] == score
        hold(outcome.tags[f"nats@place {place}"], mean, of_nats(model))
    assert outcome.score == sum(scores) / 4
    hold(outcome.tags["nats"], sum(nats) / 4, of_nats(model))
    assert (outcome.tags["kl"] == 0.0) == (budget is None)


def test_with_generate_what_the_model_writes_is_checked(root, tiny_llama, tiny_tokenizer, monkeypatch):
    model = tiny_llama()
    task, [sample] = load("instructions_4", root, tiny_tokenizer, lengths=[900], repeats=1, generate=6)
    whole = torch.tensor([sample.prompt + sample.question])
    said = model.generate(whole, max_new_tokens=6, do_sample=False)[0, whole.shape[1] :].tolist()
    seen = []
    for kind, right in zip([one.kind for one in sample.demands], (True, False, True, True), strict=True):
        check = lambda text, choice, right=right: seen.append((text, choice)) or right  # noqa: E731
        monkeypatch.setitem(KINDS, kind, KINDS[kind]._replace(check=check))
    [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], [sample])
    text = tiny_tokenizer.decode(said, skip_special_tokens=True)
    assert seen == [(text, one.said) for one in sample.demands] and outcome.tags["answer"] == text
    assert [outcome.tags[f"score@place {i}"] for i in range(1, 5)] == [1.0, 0.0, 1.0, 1.0]
    assert outcome.score == 0.75
    assert (task.floor([]), make("instructions_4").floor([])) == (None, 0.5)


FOLLOWED = {
    "signature": ("It is about boats.\n\nCaptain Walnut.", "Captain Walnut tells of boats."),
    "place": ("Place: Oslo\nIt is about boats.", "It is about Oslo."),
    "date": ("It is about boats.\nDate: Monday", "Date: Tuesday, and not Monday"),
    "grade": ("Grade: B", "Grade: Bad"),
    "closing": ('It is about boats. "Good luck!"', "Good luck. It is about boats."),
    "address": ("Well, Madam, it is about boats.", "Well, Madame, it is about boats."),
    "language": ("Le texte parle des bateaux et de la mer.", "El texto habla de los barcos y del mar."),
    "format": ("- one\n\n- two\n", "- one\ntwo"),
}
SAID = ("Captain Walnut", "Oslo", "Monday", "B", "Good luck", "Madam", "French", "-")


@pytest.mark.parametrize(("kind", "said"), list(zip(FOLLOWED, SAID, strict=True)), ids=FOLLOWED)
def test_checkers(kind, said, root):
    follows, ignores = FOLLOWED[kind]
    [choice] = [one for one in KINDS[kind].choices if one.said == said]
    assert KINDS[kind].check(follows, choice)
    assert not any(KINDS[kind].check(text, choice) for text in (ignores, ""))
    others = [one for one in KINDS[kind].choices if one != choice]
    assert not any(KINDS[kind].check(follows, one) for one in others)


def test_of_every_kind_the_demanded_answer_passes_its_own_checker_alone():
    assert FOLLOWED.keys() == KINDS.keys()
    for name in ("place", "date", "grade", "closing", "signature", "address"):
        kind = KINDS[name]
        for one, other in itertools.product(kind.choices, repeat=2):
            assert kind.check(kind.lead + one.written, other) == (one == other)
    assert not KINDS["language"].check("Nothing of the kind", Choice("German", ""))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"question": "before"}, ("question='before'", "after")),
        ({"rules": 9}, ("rules=9", "1 to 8")),
        ({"protect": "system"}, ("protect='system'", "true or false")),
        ({"haystack": "needles"}, ("haystack='needles'", "text, noise")),
        ({"lengths": [100]}, ("lengths=100",)),
    ],
)
def test_bad_options(options, parts, root, tiny_tokenizer):
    with refuses(UserError, *parts):
        load("instructions_4", root, tiny_tokenizer, **options)
