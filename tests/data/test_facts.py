import hashlib
import re

from ag.data import facts, relations

EXAMPLES = [(split, facts.generate(0, split, i, 192, 512)) for split in relations.NAMES for i in range(200)]


def words(text):
    return re.findall(r"\w+", text)


def test_the_right_answer_is_in_the_passage_and_the_wrong_one_is_not():
    """It is a sentence about the person asked for, one of four; the wrong one differs in a word."""
    for split, example in EXAMPLES:
        passage, question, _ = example.prompt.rsplit("\n", 2)
        right, wrong = example.choices[example.target], example.choices[1 - example.target]
        (name,) = set(words(question)) & set(relations.NAMES[split])
        assert right.startswith(f"{name} the ") and passage.count(right) == 1 == words(passage).count(name)
        [value], [other] = set(words(right)) - set(words(wrong)), set(words(wrong)) - set(words(right))
        assert wrong == right.replace(value, other)
        assert value not in words(question) and other not in words(example.prompt)
        told = [sentence for sentence in passage.split(".") if set(words(sentence)) & set(relations.NAMES[split])]
        kinds = {tuple(relation.fact.split()[1:3]) for relation in relations.RELATIONS}
        assert len({next(kind for kind in kinds if " ".join(kind) in one) for one in told}) == len(told) == 4
        assert example.context == passage


def test_splits_and_positions():
    """People of one split are not in the other; no passage comes twice; answers lie first as often as last."""
    assert not set(relations.NAMES["train"]) & set(relations.NAMES["validation"])
    for split, example in EXAMPLES:
        other = "validation" if split == "train" else "train"
        assert not set(words(example.prompt)) & set(relations.NAMES[other])
    assert len({example.prompt for _, example in EXAMPLES}) == len(EXAMPLES)
    assert 0.42 < sum(example.target for _, example in EXAMPLES) / len(EXAMPLES) < 0.58


def test_golden_row():
    """The generator must not change under a recipe that names a seed."""
    example = facts.generate(0, "train", 0, 192, 512)
    digest = hashlib.sha256(example.prompt.encode()).hexdigest()
    assert (example.choices, example.target, digest[:16]) == (
        ["Joan the painter has a ticket to Berlin.", "Joan the painter has a ticket to Rome."],
        0,
        "c27f44a745454d65",
    )
    assert facts.generate(1, "train", 0, 192, 512) != example
