"""LongBench's metrics on cases worked out by hand, its prompts, and how they are cut."""

import inspect
import json
import sys
import zipfile

import pytest

import ag
from ag.data.sources import DataError
from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, make
from ag.evaluate.tasks.longbench_metrics import classification, code_similarity, count, f1, retrieval, rouge_l
from ag.evaluate.tasks.longbench_subsets import SUBSETS
from tests.support.refused import refuses


def row(context="Bob is tall.", question="Who is tall?", answers=("Bob",), classes=None):
    return {
        "input": question,
        "context": context,
        "answers": list(answers),
        "length": 7,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": classes,
        "_id": "x",
    }


CLASSES = ["Number", "Other number", "Date", "City", "Other city", "city"]


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "score"),
    [
        (f1, "The cat sat.", "a cat", 2 / 3),  # cat sat | cat: precision 1/2, recall 1
        (f1, "cat cat cat", "cat cat", 0.8),  # counted as often as both have it: 2 of 3, 2 of 2
        (f1, "U.S.A", "usa", 1.0),
        (f1, "dog", "cat", 0.0),
        (f1, "", "cat", 0.0),
        (rouge_l, "the cat sat on the mat", "the cat sat on the mat", 1.0),
        (rouge_l, "police killed the gunman", "police kill the gunman", 0.75),  # 3 of 4 words in order, both ways
        (rouge_l, "a b c d", "a c x", 2 * (1 / 2 * 2 / 3) / (1 / 2 + 2 / 3)),
        (rouge_l, "", "words", 0.0),
        (rouge_l, "...", "words", 0.0),
        (classification, "Type: Date", "Date", 1.0),
        (classification, "Date or City", "Date", 0.5),
        (classification, "Other number", "Other number", 1.0),
        (classification, "Number and Other number", "Other number", 0.5),  # "Number" is no part of "Other number"
        (classification, "City", "Date", 0.0),
        (classification, "nothing", "Date", 0.0),
        (classification, "Other city", "Other city", 1.0),  # parts of the right name are left out
        (classification, "Other city", "city", 0.5),
        *(
            (metric, answer, right, score)
            for metric, right in ((count, "7"), (retrieval, "Paragraph 7"))
            for answer, score in (("There are 7.", 1), ("7 or 8", 0.5), ("17", 0), ("seven", 0), ("7 7 8 9", 0.5))
        ),
        (retrieval, "7", "no paragraph", 0.0),
        (code_similarity, "return x", "return x", 1.0),
        (code_similarity, "\n# a comment\nreturn x\nmore", "return x", 1.0),
        (code_similarity, "```python\nabcd", "abcf", 0.75),  # 2 edits (out, in) of 8 letters
        (code_similarity, "// only comments", "abc", 0.0),
    ],
)
def test_metrics(metric, answer, reference, score):
    assert metric(answer, reference, CLASSES) == pytest.approx(score, rel=0, abs=1e-8)  # which rouge adds to p + r


def test_rouge_l_of_a_sentence_that_is_too_long_for_the_package():
    sentence = " ".join(f"w{i}" for i in range(250))
    assert rouge_l(sentence, sentence) == pytest.approx(1.0)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        assert rouge_l(sentence, sentence) == 0.0
    finally:
        sys.setrecursionlimit(usual)


def test_the_subsets_are_those_of_the_benchmark(shared_data):
    facts = json.loads((shared_data / "longbench" / "prompts.json").read_text())
    assert {name: subset.prompt for name, subset in SUBSETS.items()} == facts["dataset2prompt"]
    assert {name: subset.most for name, subset in SUBSETS.items()} == facts["dataset2maxlen"]
    assert [name for name, subset in SUBSETS.items() if subset.first_line] == facts["score_first_line_only"]
    assert {name for name, subset in SUBSETS.items() if not subset.chat} == set(facts["no_chat_template"])
    names = {"f1": "qa_f1", "code_similarity": "code_sim"}
    metrics = {name: subset.metric.__name__ for name, subset in SUBSETS.items()}
    assert {name: names.get(metric, metric) for name, metric in metrics.items()} == facts["dataset2metric"]


@pytest.mark.slow
def test_every_subset_of_the_data_loads(shared_data, tiny_tokenizer):
    for name in GROUPS["longbench"]:
        loaded = make(name, str(shared_data)).load(tiny_tokenizer, 2, 3000)
        assert len(loaded.samples) == 2
        for case in loaded.samples:
            assert len(case.prompt + case.question) <= 3000 - SUBSETS[name].most
            assert case.text.endswith(tiny_tokenizer.decode(case.question).replace("<unk>", "")[-20:])
            assert 0 < len(case.question) < 1500 and case.right


def test_a_prompt_loses_its_middle(tiny_tokenizer, write):
    context = "".join(f"[{i}]" for i in range(300))
    root = write("longbench/hotpotqa", [row(), row(context)])
    short, long = make("hotpotqa", root, max_length=601).load(tiny_tokenizer, None, 1000).samples
    whole = SUBSETS["hotpotqa"].prompt.format(context=context, input="Who is tall?")
    head, tail = SUBSETS["hotpotqa"].prompt.format(context="Bob is tall.|", input="Who is tall?").split("|")
    assert tiny_tokenizer.decode(short.prompt) == head
    assert tiny_tokenizer.decode(short.question) == tail == tiny_tokenizer.decode(long.question)
    assert tiny_tokenizer.decode(long.prompt + long.question) == whole[:300] + whole[-300:]
    assert short.tags == {"subset": "hotpotqa", "words": 7, "cut": 0, "question": "after"}
    assert long.tags["cut"] == len(whole) - 600
    [_, fitted] = make("hotpotqa", root).load(tiny_tokenizer, None, 1000).samples
    assert 1000 - 32 - 10 <= len(fitted.prompt + fitted.question) <= 1000 - 32
    before = make("hotpotqa", root, max_length=601, question="before").load(tiny_tokenizer, None, 1000).samples
    assert [(case.prompt, case.question) for case in before] == [(x.prompt + x.question, []) for x in (short, long)]
    loaded = make("hotpotqa", root, max_length=980).load(tiny_tokenizer, None, 1000)
    assert (len(loaded.samples), loaded.too_long) == (1, 1)
    twice = write("longbench/hotpotqa", [row(context="tall. " * 300), row(), row()])
    loaded = make("hotpotqa", twice, max_length=980).load(tiny_tokenizer, 1, 1000)
    assert ([case.id for case in loaded.samples], loaded.too_long) == (["hotpotqa-2"], 1)
    with refuses(UserError, "gov_report", "512 tokens"):
        make("gov_report", write("longbench/gov_report", [row()])).load(tiny_tokenizer, None, 512)


def test_chat(tiny_tokenizer, write, monkeypatch):
    root = write("longbench/hotpotqa", [row()])
    write("longbench/lcc", [row()])
    with refuses(UserError, "chat=false"):
        make("hotpotqa", root, chat=True).load(tiny_tokenizer, None, 1000)
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    [asked] = make("hotpotqa", root, chat=True).load(tiny_tokenizer, None, 1000).samples
    [code] = make("lcc", root, chat=True).load(tiny_tokenizer, None, 1000).samples
    assert tiny_tokenizer.decode(asked.prompt).startswith("<Answer the question")
    assert tiny_tokenizer.decode(asked.prompt).endswith("Bob is tall.")
    assert tiny_tokenizer.decode(asked.question).endswith("Question: Who is tall?\nAnswer:>")
    assert tiny_tokenizer.decode(code.prompt).startswith("Please complete")


@pytest.mark.parametrize("name", ["hotpotqa", "samsum"])
def test_the_best_reference_counts(tiny_llama, tiny_tokenizer, write, name):
    model = tiny_llama()
    root = write(f"longbench/{name}", [row(answers=("nothing",))])
    task = make(name, root)
    loaded = task.load(tiny_tokenizer, None, 512)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], loaded.samples)
    whole = loaded.samples[0].prompt + loaded.samples[0].question
    ids = tiny_tokenizer.decode(whole)
    newline = tiny_tokenizer("\n")["input_ids"]
    ends = {"eos_token_id": [2, *newline], "min_new_tokens": 1} if name == "samsum" else {"eos_token_id": 2}
    tokens = model.generate(
        tiny_tokenizer(ids, return_tensors="pt")["input_ids"],
        max_new_tokens=SUBSETS[name].most,
        do_sample=False,
        **ends,
    )
    text = tiny_tokenizer.decode(tokens[0, len(whole) :], skip_special_tokens=True)
    assert outcome.tags["answer"] == (text.rstrip("\n") if name == "samsum" else text)
    root = write(f"longbench/{name}", [row(answers=("nothing", text.strip("\n").split("\n")[0]))])
    task = make(name, root)
    [(_, better)] = task.run(model, tiny_tokenizer, [ag.policy("full")], task.load(tiny_tokenizer, None, 512).samples)
    assert better.score > outcome.score


def test_the_archive_of_the_hub(tiny_tokenizer, tmp_path, monkeypatch):
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/hotpotqa.jsonl", json.dumps(row("One.")) + "\n" + json.dumps(row("Two.")) + "\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(archive))
    first, second = make("hotpotqa").load(tiny_tokenizer, None, 1000).samples
    assert "One." in tiny_tokenizer.decode(first.prompt)
    assert (second.id, second.references) == ("hotpotqa-2", ["Bob"])


def test_missing_data(tiny_tokenizer, tmp_path, write):
    hint = ("root=FOLDER", "longbench/qasper.jsonl", "hf download zai-org/LongBench data.zip")
    with refuses(DataError, *hint):
        make("qasper", str(tmp_path)).load(tiny_tokenizer, None, 1000)
    with refuses(DataError, *hint):  # the tests have no hub
        make("qasper").load(tiny_tokenizer, None, 1000)
    with refuses(DataError, *hint):
        make("qasper", write("longbench/lcc", [row()])).load(tiny_tokenizer, None, 1000)
    with refuses(DataError, "qasper row 1", "context"):
        make("qasper", write("longbench/qasper", [{"input": "x"}])).load(tiny_tokenizer, None, 1000)
