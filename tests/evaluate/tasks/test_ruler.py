"""Generated tasks: lengths, answers in the text, RULER's definitions, and grades."""

import hashlib
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, TASKS, make
from ag.evaluate.tasks.ruler import ADJECTIVES, NOUNS, VERBS, largest, zeta_counts
from tests.support.refused import refuses

MODULES = [f"ag.evaluate.tasks.{name}" for name in ("ruler", "turns", "instructions")]
GENERATED = [name for name, (kind, _) in TASKS.items() if kind.__module__ in MODULES]
HAYSTACKS = [*GROUPS["needle"], *GROUPS["needle_books"]]


@pytest.fixture
def sources(root, write):
    """Books, and both sources of questions, as on the hub."""
    squad = []
    for article, paragraph in itertools.product(range(4), range(6)):
        said = f"word{article}{paragraph}"
        row = {"title": f"A{article}", "context": f"Article {article} paragraph {paragraph} says {said}. " * 3}
        texts = [said, said, "says"] if paragraph else []
        squad.append(row | {"question": f"What says {article}{paragraph}?", "answers": {"text": texts}})
    write("squad_v2/validation", squad)
    hotpot = []
    for question in range(5):
        titles, said = [f"T{question}{i}" for i in range(3)], [[f"One {question}{i}.", " Two."] for i in range(3)]
        row = {"question": f"Which {question}?", "answer": f"One {question}1"}
        hotpot.append(row | {"context": {"title": titles, "sentences": said}})
    return write("hotpot_qa/validation", hotpot)


def load(name, root, tokenizer, limit=None, max_tokens=20_000, **options):
    task = make(name, root, **{"lengths": [900], "repeats": 2} | options)
    return task, task.load(tokenizer, limit, max_tokens)


# the longest units in characters, where they exceed a sentence of the filler
UNITS = {"niah_multikey_3": 130, "cwe": 3 * 25, "fwe": 40}


@pytest.mark.parametrize("name", [*HAYSTACKS, *GROUPS["ruler"]])
def test_lengths_and_answers(name, sources, tiny_tokenizer):
    length = 2800 if name in GROUPS["ruler"] else 900
    task, loaded = load(name, sources, tiny_tokenizer, lengths=[length])
    assert len({sample.id for sample in loaded.samples}) == len(loaded.samples) > 1
    for sample in loaded.samples:
        context, question = (tiny_tokenizer.decode(ids) for ids in (sample.prompt, sample.question))
        used = len(sample.prompt) + len(sample.question) + (task.generate or 0)
        assert used <= length
        if name not in ("qa_1", "qa_2"):  # all documents of the small files are in
            assert length - used < max(0.01 * length, UNITS.get(name, 62))
            assert tiny_tokenizer.decode(sample.target_tokens).replace(",", "").split()[-1] == sample.references[-1]
            assert name == "cwe" or all(reference not in question[12:] for reference in sample.references)
        assert "Question: " in question and all(reference in context for reference in sample.references)
        assert sample.max_new_tokens == (task.generate or len(sample.target_tokens) + 8)


def test_samples_are_those_that_results_were_measured_on(sources, tiny_tokenizer):
    """Checksums of texts, answers and tags of each generated task: a change of one letter is another sample."""
    golden, found = json.loads(Path(__file__).with_name("samples.json").read_text()), {}
    for name in GENERATED:
        lengths, texts = [2800 if name in GROUPS["ruler"] else 1500], []
        for sample in make(name, sources, repeats=2, lengths=lengths).load(tiny_tokenizer, None, 20_000).samples:
            prompt, question, *answers = map(tiny_tokenizer.decode, (sample.prompt, sample.question, *sample.answers))
            texts.append([sample.id, prompt, question, answers, sample.references, dict(sample.tags)])
        found[name] = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]
    assert found == golden


def test_no_word_is_a_letter_that_any_answer_contains():
    assert all(len(word) > 2 for words in (ADJECTIVES, NOUNS, VERBS) for word in words)


def test_the_key_that_is_asked_has_the_answer(root, tiny_tokenizer):
    for name, options, number in (
        ("needle_multikey", {}, 1),
        ("needle_multivalue", {"values": 3}, 3),
        ("niah_multiquery", {}, 4),
        ("niah_multikey_3", {}, 1),
    ):
        for sample in load(name, root, tiny_tokenizer, **options)[1].samples:
            context, question = (tiny_tokenizer.decode(ids) for ids in (sample.prompt, sample.question))
            keys = re.findall(r"the ([\w-]+)(?=,| and|\?)", question.split("?")[0] + "?")
            facts = re.findall(r"secret (?:number|code)s? of the (\S+) is ([\w-]+)\.", context)
            found = [value for key in keys for one, value in facts if one == key]
            assert sorted(found) == sorted(sample.references) and len(found) == number
            if name == "niah_multiquery":
                assert found == sample.references


def test_variables_hold_what_is_asked(tiny_tokenizer):
    for name, options, number in (("needle_variables", {"chains": 3, "hops": 2}, 9), ("vt", {"lengths": [2600]}, 5)):
        for sample in load(name, None, tiny_tokenizer, **options)[1].samples:
            example, _, text = tiny_tokenizer.decode(sample.prompt).rpartition("Keep track of them.")
            values = {}
            for variable, value, other in re.findall(r"VAR (\w{5}) = (?:(\d+)|VAR (\w+))\.", text):
                values[variable] = value or values[other]  # a variable is set before it is handed on
            [asked] = re.findall(r"have the value (\d+)\?", tiny_tokenizer.decode(sample.question))
            assert sorted(sample.references) == sorted(name for name, value in values.items() if value == asked)
            assert len(values) == number
            if name == "vt":  # a solved example, a quarter of the length long, comes first
                example = example.split("\n\nThe following text sets")[0]
                chain = re.findall(r"VAR (\w{3}) = \d{5}\.", example) + re.findall(r"VAR (\w{3}) = VAR", example)
                assert example.endswith("they are: " + ", ".join(chain)) and len(chain) == 5
                assert 0.7 * 650 < len(example) <= 650


@pytest.mark.parametrize(("length", "often", "seldom", "first"), [(3500, 6, 1, (3, 1, 20)), (9000, 30, 3, (10, 3, 40))])
def test_common_words(length, often, seldom, first, tiny_tokenizer):
    [sample] = load("cwe", None, tiny_tokenizer, lengths=[length], repeats=1)[1].samples
    text = tiny_tokenizer.decode(sample.prompt + sample.question)
    lists = re.findall(r"Remember those that do\.\n(.*?)\nQuestion", text, re.S)
    counts = [Counter(re.findall(r"\d+\. (\w+)", listed)) for listed in lists]
    assert len(lists) == 2 and Counter(counts[0].values()) == {first[0]: 10, first[1]: first[2] - 10}
    assert {word for word, count in counts[1].items() if count == often} == set(sample.references)
    assert set(counts[1].values()) == {often, seldom} and len(sample.references) == 10
    solved = re.search(r"often in the list are: (.*)\n\n", text)[1]
    assert {word for word, count in counts[0].items() if count == first[0]} == set(re.findall(r"\d+\. (\w+)", solved))
    numbers = [int(number) for number in re.findall(r"(\d+)\. \w+", lists[1])]
    assert numbers == list(range(1, len(numbers) + 1))


def test_frequent_words(tiny_tokenizer):
    """The published example: 682 words of a vocabulary of 80."""
    assert zeta_counts(682, 80)[:5] == [414, 103, 46, 25, 16]
    assert all(x[3] > x[4] for x in (zeta_counts(size, 5) for size in range(56, 3000)))
    [sample] = load("fwe", None, tiny_tokenizer, lengths=[4050], repeats=1)[1].samples
    words = tiny_tokenizer.decode(sample.prompt).split("\n\n")[1].split()
    common = Counter(words).most_common()
    assert common[0][0] == "..." and [word for word, _ in common[1:4]] == sample.references
    total = next(total for total in range(56, 3000) if sum(zeta_counts(total, 80)) == len(words))
    counts = sorted((count for _, count in common), reverse=True)
    assert counts == [count for count in zeta_counts(total, 80) if count]


def test_documents_of_squad(sources, tiny_tokenizer):
    """The paragraph of the question, others of its article before those of others; unanswerable ones left out."""
    task, loaded = load("qa_1", sources, tiny_tokenizer, lengths=[1000], repeats=3)
    for number, sample in enumerate(loaded.samples, start=1):
        text = tiny_tokenizer.decode(sample.prompt)
        assert sample.references == [f"word0{number}", "says"]
        assert f"Question: What says 0{number}?\nAnswer:" in tiny_tokenizer.decode(sample.question)
        documents = re.findall(r"Document (\d+):\nArticle (\d) paragraph (\d)", text)
        assert [int(one) for one, _, _ in documents] == list(range(1, len(documents) + 1))
        assert 3 < len(documents) < 7 and {article for _, article, _ in documents} == {"0"}
        assert str(number) in {paragraph for _, _, paragraph in documents}
        assert len({paragraph for _, _, paragraph in documents}) == len(documents)
    [everything] = load("qa_1", sources, tiny_tokenizer, lengths=[9000], repeats=1)[1].samples
    assert tiny_tokenizer.decode(everything.prompt).count("Document ") == 24
    assert [task.grade(text, loaded.samples[0]) for text in (" It WORD01 is", " no")] == [1.0, 0.0]


def test_seeds_ask_different_questions(sources, tiny_tokenizer):
    asked = {}
    for seed in range(3):
        task, loaded = load("qa_1", sources, tiny_tokenizer, lengths=[1000], repeats=3, seed=seed)
        asked[seed] = [tiny_tokenizer.decode(sample.question).split("Question: ")[1] for sample in loaded.samples]
        assert task.identity().get("first", 0) == task.first == 3 * seed
    assert len({question for questions in asked.values() for question in questions}) == 9
    assert asked[0][0].startswith("What says 01?") and "first" not in make("qa_1").identity()  # its rows stay valid


SQUAD_ROW = {"title": "t", "context": "c", "question": "q"}


def test_missing_and_damaged_documents(tiny_tokenizer, tmp_path, write):
    hint = ("qa_2", "root=FOLDER", "hotpot_qa/validation.jsonl", "load_dataset('hotpotqa/hotpot_qa', 'distractor')")
    for root in (str(tmp_path), None):  # the tests have no hub
        with refuses(UserError, *hint):
            make("qa_2", root).load(tiny_tokenizer, 1, 5000)
    for name, folder, row, message in (
        ("qa_2", "hotpot_qa", {"question": "q", "answer": "a", "context": {"title": ["t"]}}, "row 1: context has no"),
        ("qa_1", "squad_v2", {"question": "q"}, "row 1 has no field title"),
        ("qa_1", "squad_v2", SQUAD_ROW | {"answers": {}}, "no question with an"),
        # an empty answer, which every text contains
        ("qa_1", "squad_v2", SQUAD_ROW | {"answers": {"text": [""]}}, "no question with an"),
        ("qa_1", "squad_v2", SQUAD_ROW | {"answers": {"text": [5]}}, "row 1: field answers.text is int"),
    ):
        with refuses(UserError, message):
            make(name, write(f"{folder}/validation", [row])).load(tiny_tokenizer, 1, 5000)


def test_grades():
    def grade(task, text, *references):
        return make(task).grade(text, SimpleNamespace(references=list(references)))

    for text, score in ((" 1234567. And 7", 1.0), (" 7 or 1234567", 0.0), (" 12345678", 0.0), (" no", 0.0)):
        assert grade("needle_single", text, "1234567") == score
    assert grade("needle_multivalue", " 11, 22 and 99, 11", "11", "22", "33", "44") == 0.5
    assert [grade("needle_multivalue", text, "abcd") for text in (" Ab\x07Cd", " ABCD")] == [0.0, 1.0]
    assert grade("needle_variables", " ABCDE, VAR FGHIJ", "ABCDE", "FGHIJ", "KLMNO") == pytest.approx(2 / 3)


def ruler_score(answer, references, kind):
    """The score of one answer by RULER's scripts/eval: evaluate.py cleans it, synthetic/constants.py compares it."""
    answer = "".join("\n" if ord(letter) < 32 else letter for letter in answer.strip()).strip().lower()
    contained = [answer.count(reference.lower()) > 0 for reference in references]
    return float(max(contained)) if kind == "part" else contained.count(True) / len(contained)


@pytest.mark.parametrize(
    ("name", "kind", "drawn"),
    [
        ("niah_multivalue", "all", lambda rng: f"{rng.randrange(10**6, 10**7)}"),
        ("niah_multikey_3", "all", lambda rng: f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}"),
        ("vt", "all", lambda rng: "".join(rng.choices("ABCDE", k=2))),
        ("cwe", "all", lambda rng: "".join(rng.choices("abn\t", k=3))),
        ("qa_1", "part", lambda rng: "".join(rng.choices("Ab \n", k=3))),
    ],
)
def test_300_made_up_answers_have_the_scores_of_ruler(name, kind, drawn):
    """Numbers within longer numbers, parts of references, other cases, orders and repeats, control characters."""
    rng, scores = random.Random(7), []
    changes = [str, str.upper, str.lower, str.title, lambda x: f"9{x}1", lambda x: x[:-1], lambda x: x + x]
    for _ in range(300):
        references = [drawn(rng) for _ in range(rng.randint(1, 4))]
        parts = [rng.choice(changes)(rng.choice([*references, drawn(rng)])) for _ in range(rng.randint(0, 5))]
        answer = (
            rng.choice(["", " ", "\x07"]) + rng.choice([", ", "\x01", ""]).join(parts) + rng.choice(["", "\x1f", "."])
        )
        scores.append(make(name).grade(answer, SimpleNamespace(references=references)))
        assert scores[-1] == pytest.approx(ruler_score(answer, references, kind)), (answer, references)
    assert 0.0 in scores and 1.0 in scores


def test_lengths_without_room_and_missing_texts(tiny_tokenizer, write):
    root = write("pg19_style/test", [])
    for name, options, parts in (
        ("niah_single_1", {"lengths": [300]}, ("lengths=300", "128 tokens")),
        ("turns", {"haystack": "noise", "lengths": [300]}, ("lengths=300",)),
        ("needle_text", {"root": "here"}, ("root=FOLDER", "pg19_style/test.jsonl")),
        ("needle_text", {}, ("needle_text", "has no text")),
    ):
        with refuses(UserError, *parts):
            make(name, **{"root": root} | options).load(tiny_tokenizer, None, 512)


@pytest.mark.parametrize("question", ["after", "before"])
@torch.no_grad()
def test_run(tiny_llama, tiny_tokenizer, question):
    """What is generated is what plain generation gives that reads the prompt, and then the question as a later turn."""
    model = tiny_llama()
    options = {"lengths": [400], "depths": [0.5], "repeats": 1, "max_tokens": 512, "question": question}
    task, loaded = load("needle_single", None, tiny_tokenizer, **options)
    policies, [sample] = [ag.policy("full"), ag.policy("snapkv", 0.5)], loaded.samples
    outcomes = list(task.run(model, tiny_tokenizer, policies, [sample]))
    assert [index for index, _ in outcomes] == [0, 1]
    whole = torch.tensor([sample.prompt + sample.question])
    for (_, outcome), policy in zip(outcomes, policies, strict=True):
        cache = ag.EvictionCache(model, policy)
        if question == "after":
            model(whole[:, : len(sample.prompt)], past_key_values=cache)
            assert outcome.kept == pytest.approx(cache.kept_share())
        tokens = model.generate(whole, past_key_values=cache, max_new_tokens=sample.max_new_tokens, do_sample=False)
        answer = tiny_tokenizer.decode(tokens[0, whole.shape[1] :], skip_special_tokens=True)
        tags = {"length": 400, "depth": 0.5, "repeat": 0, "question": question, "answer": answer}
        assert outcome.tags | tags == outcome.tags
        assert outcome.tags.keys() - tags.keys() == {"nats", "hits", "kl", "same_top1"}
        assert (outcome.score, outcome.tokens) == (0.0, len(sample.prompt))


@pytest.mark.parametrize("per_unit", [1, 3, 40])
@pytest.mark.parametrize("room", [100, 999])
def test_the_largest_size_that_fits(per_unit, room):
    calls = []

    def tokens(size):
        calls.append(size)
        return 7 + per_unit * size + (size % 3)  # not quite even

    found = largest(tokens, room, 1)
    assert tokens(found) <= room < tokens(found + 1) and len(calls) < 24
    assert largest(tokens, room, 1, 2) == 2
    assert largest(tokens, 7, 1) is None
