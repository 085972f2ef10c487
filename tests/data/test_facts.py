import hashlib
import re

from transformers import AutoTokenizer

import ag.data
from ag.data import facts

EXAMPLES = [(split, i, facts.generate(0, split, i, 192, 512)) for split in facts.NAMES for i in range(300)]


def words(text):
    return re.findall(r"\w+", text)


def value(example, choice):
    """The word of a choice that the other one does not have."""
    (word,) = set(words(choice)) - set(words(next(other for other in example.choices if other != choice)))
    return word


def test_right_answer_is_a_sentence_of_the_passage_about_the_person_asked_for():
    for split, _, example in EXAMPLES:
        passage, question, _ = example.prompt.rsplit("\n", 2)
        right = example.choices[example.target]
        (name,) = set(words(question)) & set(facts.NAMES[split])
        assert right.startswith(f"{name} the ") and passage.count(right) == 1 == words(passage).count(name)
        assert value(example, right) not in words(question)


def test_wrong_answer_differs_in_a_word_that_the_passage_does_not_have():
    for _, _, example in EXAMPLES:
        right, wrong = example.choices[example.target], example.choices[1 - example.target]
        assert wrong == right.replace(value(example, right), value(example, wrong))
        assert value(example, wrong) not in words(example.prompt)


def test_passage_tells_a_different_thing_about_each_of_four_people():
    for split, _, example in EXAMPLES:
        passage = example.prompt.rsplit("\n", 2)[0]
        told = [sentence for sentence in passage.split(".") if set(words(sentence)) & set(facts.NAMES[split])]
        kinds = {tuple(relation.fact.split()[1:3]) for relation in facts.RELATIONS}
        assert len(told) == 4
        assert len({next(kind for kind in kinds if " ".join(kind) in sentence) for sentence in told}) == 4


def test_right_answers_are_spread_over_positions():
    counts = [sum(example.target == i for _, _, example in EXAMPLES) for i in range(2)]
    assert min(counts) > 600 / 2 * 0.85


def test_people_of_the_splits_differ():
    assert not set(facts.NAMES["train"]) & set(facts.NAMES["validation"])
    for split, _, example in EXAMPLES:
        other = "validation" if split == "train" else "train"
        assert not set(words(example.prompt)) & set(facts.NAMES[other])


def test_generated_again_is_the_same():
    assert [facts.generate(0, split, i, 192, 512) for split, i, _ in EXAMPLES[:5]] == [e for _, _, e in EXAMPLES[:5]]
    assert facts.generate(1, "train", 0, 192, 512) != EXAMPLES[0][2]
    assert len({example.prompt for _, _, example in EXAMPLES}) == len(EXAMPLES)


def test_golden_row():
    """The generator must not change under a recipe that names a seed."""
    example = facts.generate(0, "train", 0, 192, 512)
    digest = hashlib.sha256(example.prompt.encode()).hexdigest()
    assert (example.choices, example.target, digest[:16]) == (
        ["Joan the painter has a ticket to Berlin.", "Joan the painter has a ticket to Rome."],
        0,
        "c27f44a745454d65",
    )


def test_lengths_in_tokens(smollm2):
    """Roughly what was asked for, with the tokenizer of the quickstart."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    lengths = [len(tokenizer(example.prompt)["input_ids"]) for _, _, example in EXAMPLES]
    assert 180 <= min(lengths) <= 215 and 490 <= max(lengths) <= 530


def test_data_module(make_config, tokenizer):
    config = make_config(kind="facts", train_samples=20, val_samples=6, batch_size=4, val_batch_size=2, max_length=2048)
    module = ag.data.build(config, tokenizer, 4096)
    assert len(module.train_rows) == 20 and len(module.val_rows) == 6
    batch = next(iter(module.val_dataloader()))
    assert batch["question"].tolist() == [0] * 2 + [1] * 2
    assert batch["choice"].tolist() == [0, 1] * 2
    row = module.train_rows[3]
    example = facts.generate(config.seed, "train", 3, 192, 512)
    assert tokenizer.decode(row.tokens) == example.prompt + " " + example.choices[example.target]
