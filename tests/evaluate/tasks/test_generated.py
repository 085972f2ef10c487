"""Generated tasks: their size, RULER's definitions of lists to count, and copying."""

import json
import random
import re
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, make
from ag.evaluate.tasks.frequencies import zeta_counts
from ag.evaluate.tasks.generated import hide, join, largest, noise
from ag.evaluate.tasks.words import ADJECTIVES, NOUNS, VERBS, shuffled_words

TEXT = " ".join(f"Line {i} of the book is here, and so it goes on." for i in range(900))


@pytest.fixture
def root(write):
    """Text, and both sources of questions, as on the hub."""
    write("pg19_style/test", [{"text": TEXT}])
    squad = []
    for article in range(4):
        for paragraph in range(6):
            context = f"Article {article} paragraph {paragraph} says word{article}{paragraph}. " * 3
            answers = {"text": [f"word{article}{paragraph}", f"word{article}{paragraph}", "says"], "answer_start": [1]}
            row = {"title": f"A{article}", "context": context, "question": f"What says {article}{paragraph}?"}
            squad.append(row | {"id": "x", "answers": answers if paragraph else {"text": [], "answer_start": []}})
    write("squad_v2/validation", squad)
    hotpot = []
    for question in range(5):
        context = {
            "title": [f"T{question}{i}" for i in range(3)],
            "sentences": [[f"One {question}{i}.", " Two."] for i in range(3)],
        }
        hotpot.append({"question": f"Which {question}?", "answer": f"One {question}1", "context": context})
    return write("hotpot_qa/validation", hotpot)


# a length in characters, and the longest unit: a line of five sentences is filled sentence by sentence
SIZES = {"niah_multikey_3": 130, "cwe": 3 * 25, "fwe": 40, "qa_1": 140, "qa_2": 40}


@pytest.mark.parametrize("name", [*GROUPS["ruler"], "passkey", "needle_books_8", "repeat_text"])
@pytest.mark.parametrize("length", [2800, pytest.param(7000, marks=pytest.mark.slow)])
def test_length_answers_and_determinism(name, length, root, tiny_tokenizer):
    def load(**options):
        task = make(name, root, lengths=[length], repeats=2, **options)
        return task, task.load(tiny_tokenizer, 2, 20_000).samples

    task, samples = load()
    assert samples == load()[1] and len(samples) == 2
    assert [one.text for one in samples] != [one.text for one in load(seed=1)[1]]
    for sample in samples:
        used = len(sample.prompt) + len(sample.question) + (task.generate or 0)
        assert used <= length
        if name not in ("qa_1", "qa_2"):  # all documents of the small files are in
            assert length - used < max(0.01 * length, SIZES.get(name, 62))
        context = tiny_tokenizer.decode(sample.prompt)
        assert all(reference in context for reference in sample.references)
        assert tiny_tokenizer.decode(sample.prompt + sample.question) == sample.text


@pytest.mark.parametrize("length", [1024, pytest.param(8192, marks=pytest.mark.slow)])
def test_lengths_with_a_real_tokenizer(length, root, smollm2):
    """Within 1 % of the length, the answer's tokens counted, and never above it."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for name in ("niah_single_1", "niah_single_3", "niah_multikey_2", "niah_multiquery", "vt", "cwe", "fwe"):
        task = make(name, root, lengths=[length], repeats=1)
        [sample] = task.load(tokenizer, None, 8192).samples
        used = len(sample.prompt) + len(sample.question) + task.generate
        assert length - max(0.01 * length, 24) < used <= length, name
        whole = tokenizer(sample.text)["input_ids"]
        assert sample.prompt + sample.question == whole


def test_ruler_is_complete_and_as_published():
    published = {
        "niah_single_1": ("noise", "word", "number", 1, 1, 1),
        "niah_single_2": ("text", "word", "number", 1, 1, 1),
        "niah_single_3": ("text", "word", "uuid", 1, 1, 1),
        "niah_multikey_1": ("text", "word", "number", 4, 1, 1),
        "niah_multikey_2": ("needles", "word", "number", 1, 1, 1),
        "niah_multikey_3": ("needles", "uuid", "uuid", 1, 1, 1),
        "niah_multivalue": ("text", "word", "number", 1, 4, 1),
        "niah_multiquery": ("text", "word", "number", 4, 1, 4),
    }
    for name, expected in published.items():
        task = make(name)
        assert (task.haystack, task.key, task.value, task.keys, task.values, task.queries) == expected
        assert (task.digits, task.hint, task.depths) == (7, True, None)
    tokens = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32} | dict.fromkeys(published, 128)
    assert {name: make(name).generate for name in GROUPS["ruler"]} == tokens
    assert {(make(name).repeats, make(name).metric) for name in GROUPS["ruler"]} == {(500, "recall")}
    assert (make("vt").chains, make("vt").hops) == (1, 4)


@pytest.mark.parametrize(("length", "often", "seldom", "first"), [(3500, 6, 1, (3, 1, 20)), (9000, 30, 3, (10, 3, 40))])
def test_common_words(length, often, seldom, first, tiny_tokenizer):
    [sample] = make("cwe", lengths=[length], repeats=1).load(tiny_tokenizer, 1, 20_000).samples
    lists = re.findall(r"Remember those that do\.\n(.*?)\nQuestion", sample.text, re.S)
    assert len(lists) == 2
    counts = [Counter(re.findall(r"\d+\. (\w+)", listed)) for listed in lists]
    assert Counter(counts[0].values()) == {first[0]: 10, first[1]: first[2] - 10}
    assert {word for word, count in counts[1].items() if count == often} == set(sample.references)
    assert set(counts[1].values()) == {often, seldom} and len(sample.references) == 10
    solved = re.search(r"often in the list are: (.*)\n\n", sample.text)[1]
    assert {word for word, count in counts[0].items() if count == first[0]} == set(re.findall(r"\d+\. (\w+)", solved))
    numbers = [int(number) for number in re.findall(r"(\d+)\. \w+", lists[1])]
    assert numbers == list(range(1, len(numbers) + 1))


def test_frequent_words(tiny_tokenizer):
    """The published example: 682 words of a vocabulary of 80."""
    assert zeta_counts(682, 80)[:5] == [414, 103, 46, 25, 16]
    assert all(x[3] > x[4] for x in (zeta_counts(size, 5) for size in range(56, 3000)))
    task = make("fwe", lengths=[4050], repeats=1)
    [sample] = task.load(tiny_tokenizer, 1, 20_000).samples
    words = sample.text.split("\n\n")[1].split()
    common = Counter(words).most_common()
    assert common[0][0] == "..." and [word for word, _ in common[1:4]] == sample.references
    counts = sorted((count for _, count in common), reverse=True)
    total = next(total for total in range(56, 3000) if sum(zeta_counts(total, 80)) == len(words))
    assert counts == [count for count in zeta_counts(total, 80) if count]


def test_documents_of_squad(root, tiny_tokenizer):
    """The paragraph of the question, others of its article before those of others; unanswerable ones left out."""
    task = make("qa_1", root, lengths=[1000], repeats=3)
    for number, sample in enumerate(task.load(tiny_tokenizer, 3, 20_000).samples, start=1):
        assert sample.references == [f"word0{number}", "says"]
        assert f"Question: What says 0{number}?\nAnswer:" in sample.text
        documents = re.findall(r"Document (\d+):\nArticle (\d) paragraph (\d)", sample.text)
        assert [int(one) for one, _, _ in documents] == list(range(1, len(documents) + 1))
        assert 3 < len(documents) < 7 and {article for _, article, _ in documents} == {"0"}
        assert str(number) in {paragraph for _, _, paragraph in documents}
        assert len({paragraph for _, _, paragraph in documents}) == len(documents)
    everything = make("qa_1", root, lengths=[9000], repeats=1).load(tiny_tokenizer, 1, 20_000).samples[0]
    assert everything.text.count("Document ") == 24
    assert task.grade(" It WORD01 is", task.load(tiny_tokenizer, 1, 20_000).samples[0]) == 1.0
    assert task.grade(" no", task.load(tiny_tokenizer, 1, 20_000).samples[0]) == 0.0


def test_documents_of_hotpot(root, tiny_tokenizer):
    """A question's own paragraphs are all there."""
    [sample] = make("qa_2", root, lengths=[700], repeats=1).load(tiny_tokenizer, 1, 20_000).samples
    titles = re.findall(r"Document \d+:\n(T\d\d)\nOne \d\d\. Two\.", sample.text)
    assert {"T00", "T01", "T02"} < set(titles) and len(set(titles)) == len(titles) < 15
    assert sample.references == ["One 01"]


def test_missing_and_damaged_documents(root, tiny_tokenizer, tmp_path, write):
    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    for name, folder, hub in (
        ("qa_1", "squad_v2", "'rajpurkar/squad_v2'"),
        ("qa_2", "hotpot_qa", "'hotpotqa/hotpot_qa', 'distractor'"),
    ):
        hint = rf"Task {name}: .*Give root=FOLDER with {folder}/validation.jsonl.*load_dataset\({hub}\)"
        with pytest.raises(UserError, match=hint):
            make(name, str(elsewhere)).load(tiny_tokenizer, 1, 5000)
        with pytest.raises(UserError, match=hint):  # the tests have no hub
            make(name).load(tiny_tokenizer, 1, 5000)
    with pytest.raises(UserError, match="row 1: context has no titles with sentences"):
        row = {"question": "q", "answer": "a", "context": {"title": ["t"]}}
        make("qa_2", write("hotpot_qa/validation", [row])).load(tiny_tokenizer, 1, 5000)
    with pytest.raises(UserError, match="row 1 has no field title"):
        make("qa_1", write("squad_v2/validation", [{"question": "q"}])).load(tiny_tokenizer, 1, 5000)
    with pytest.raises(UserError, match="has no question with an answer"):
        row = {"title": "t", "context": "c", "question": "q", "answers": {"text": []}}
        make("qa_1", write("squad_v2/validation", [row])).load(tiny_tokenizer, 1, 5000)


def test_key_values(tiny_tokenizer):
    task = make("key_values", pairs=[8, 64], repeats=2)
    loaded = task.load(tiny_tokenizer, None, 9000)
    assert [(s.tags["pairs"], s.tags["repeat"]) for s in loaded.samples] == [(8, 0), (64, 0), (8, 1), (64, 1)]
    for sample in loaded.samples:
        context, question = (tiny_tokenizer.decode(ids) for ids in (sample.prompt, sample.question))
        pairs = json.loads(context.removeprefix("JSON data:\n"))
        key = re.search(r'key "(.*)" in', question)[1]
        assert len(pairs) == sample.tags["pairs"] and sample.references == [pairs[key]]
        assert task.grade(f' {pairs[key]}"', sample) == 1.0
        assert task.grade(f"no {pairs[key]}", sample) == 0.0
    assert task.load(tiny_tokenizer, None, 1000).too_long == 2
    with pytest.raises(UserError, match=r"pairs=\[0\]: expected numbers"):
        make("key_values", pairs=[0])


def test_repeating_a_text(root, tiny_tokenizer):
    task = make("repeat_text", root, lengths=[500], repeats=1)
    [sample] = task.load(tiny_tokenizer, None, 2000).samples
    assert tiny_tokenizer.decode(sample.right[0]) == tiny_tokenizer.decode(sample.prompt)
    assert task.load(tiny_tokenizer, None, 900).too_long == 1  # the text, and the text again
    assert task.tally(torch.tensor([True, False, True, True])) == 0.75


@pytest.mark.parametrize("per_unit", [1, 3, 40])
@pytest.mark.parametrize("room", [100, 101, 999])
def test_the_largest_size_that_fits(per_unit, room):
    calls = []

    def tokens(size):
        calls.append(size)
        return 7 + per_unit * size + (size % 3)  # not quite even

    found = largest(tokens, room, 1)
    fits = [size for size in range(1, 2000) if 7 + per_unit * size + (size % 3) <= room]
    if per_unit > 2:
        assert found == max(fits)
    assert tokens(found) <= room < tokens(found + 1)
    assert len(calls) < 20
    assert largest(tokens, room, 1, 2) == 2
    assert largest(tokens, 7, 1) is None


def test_pieces():
    assert hide("abcd", ["X", "Y"], [0.5, 0.0]) == ["Y", "a", "b", "X", "c", "d"]
    assert hide("ab", ["X", "Y"], [1.0, 0.9]) == ["a", "b", "Y", "X"]
    assert join(["One.", "Two.\n", "Three."]) == "One. Two.\nThree."
    assert [line.count(".") for line in join(noise(12)).split("\n")] == [5, 5, 2]


def test_words():
    assert len(set(NOUNS)) == len(NOUNS) and len(set(ADJECTIVES)) == len(ADJECTIVES) and len(set(VERBS)) == len(VERBS)
    few, many = (shuffled_words(random.Random(0), size) for size in (50, 5000))
    assert few == many[:50] and len(set(many)) == 5000 and all(word.isalpha() for word in many)
