"""LongBench's metrics on cases worked out by hand, its prompts, and how they are cut."""

import json
import zipfile

import pytest

import ag
from ag.data.sources import DataError
from ag.data.tokens import apply_template
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.evaluate.tasks.longbench import SUBSETS, classification, code_similarity, count, f1, retrieval, rouge_l
from tests.support.refused import refuses


def row(context="Bob is tall.", answers=("Bob",)):
    return {"input": "Who is tall?", "context": context, "answers": [*answers], "length": 7, "all_classes": None}


CLASSES = ["Number", "Other number", "Date", "City", "Other city", "city"]


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "score"),
    [
        (f1, "The cat sat.", "a cat", 2 / 3),  # cat sat | cat: precision 1/2, recall 1
        (f1, "cat cat cat", "cat cat", 0.8),  # counted as often as both have it: 2 of 3, 2 of 2
        (f1, "U.S.A", "usa", 1.0),
        (rouge_l, "police killed the gunman", "police kill the gunman", 0.75),  # 3 of 4 words in order, both ways
        (rouge_l, "a b c d", "a c x", 2 * (1 / 2 * 2 / 3) / (1 / 2 + 2 / 3)),
        (rouge_l, "...", "words", 0.0),
        (classification, "Date or City", "Date", 0.5),
        (classification, "Number and Other number", "Other number", 0.5),  # "Number" is no part of "Other number"
        (classification, "Other city", "Other city", 1.0),  # parts of the right name are left out
        (classification, "Other city", "city", 0.5),
        (count, "7 7 17 8", "7", 0.5),
        (retrieval, "Number 7 or 8", "Paragraph 7", 0.5),
        (retrieval, "7", "no paragraph", 0.0),
        (code_similarity, "\n# a comment\nreturn x\nmore", "return x", 1.0),
        (code_similarity, "```python\nabcd", "abcf", 0.75),  # 2 edits (out, in) of 8 letters
    ],
)
def test_metrics(metric, answer, reference, score):
    assert metric(answer, reference, CLASSES) == pytest.approx(score, rel=0, abs=1e-8)  # which rouge adds to p + r


def test_the_subsets_are_those_of_the_benchmark(shared_data):
    facts = json.loads((shared_data / "longbench" / "prompts.json").read_text())
    assert {name: subset.prompt for name, subset in SUBSETS.items()} == facts["dataset2prompt"]
    assert {name: subset.max_new_tokens for name, subset in SUBSETS.items()} == facts["dataset2maxlen"]
    assert [name for name, subset in SUBSETS.items() if subset.first_line] == facts["score_first_line_only"]
    assert {name for name, subset in SUBSETS.items() if not subset.chat} == set(facts["no_chat_template"])
    theirs = {"qa_f1": f1, "rouge_l": rouge_l, "code_sim": code_similarity}
    theirs |= {"classification": classification, "count": count, "retrieval": retrieval}
    metrics = {name: theirs[metric] for name, metric in facts["dataset2metric"].items()}
    assert {name: subset.metric for name, subset in SUBSETS.items()} == metrics


def test_a_prompt_loses_its_middle(tiny_tokenizer, write):
    def load(limit=None, max_tokens=1000, **options):
        loaded = make("hotpotqa", root, **options).load(tiny_tokenizer, limit, max_tokens)
        return loaded.samples, loaded.too_long

    context = "".join(f"[{i}]" for i in range(300))
    root = write("longbench/hotpotqa", [row(), row(context), row()])
    (short, long, _), _ = load(max_length=601)
    whole = SUBSETS["hotpotqa"].prompt.format(context=context, input="Who is tall?")
    head, tail = SUBSETS["hotpotqa"].prompt.format(context="Bob is tall.|", input="Who is tall?").split("|")
    assert tiny_tokenizer.decode(short.prompt) == head
    assert tiny_tokenizer.decode(short.question) == tail == tiny_tokenizer.decode(long.question)
    assert tiny_tokenizer.decode(long.prompt + long.question) == whole[:300] + whole[-300:]
    assert short.tags == {"subset": "hotpotqa", "words": 7, "cut": 0, "question": "after"}
    assert long.tags["cut"] == len(whole) - 600
    (_, fitted, _), _ = load()
    assert 1000 - 32 - 10 <= len(fitted.prompt + fitted.question) <= 1000 - 32
    (first, second, _), _ = load(max_length=601, question="before")
    assert [(x.prompt, x.question) for x in (first, second)] == [(x.prompt + x.question, []) for x in (short, long)]
    found, left = load(2, max_length=980)
    assert ([case.id for case in found], left) == (["hotpotqa-1", "hotpotqa-3"], 1)
    with refuses(UserError, "gov_report", "512 tokens"):
        make("gov_report", write("longbench/gov_report", [row()])).load(tiny_tokenizer, None, 512)


def test_chat(tiny_tokenizer, write, monkeypatch):
    root = write("longbench/hotpotqa", [row()])
    write("longbench/lcc", [row()])
    with refuses(UserError, "chat=false"):
        make("hotpotqa", root, chat=True).load(tiny_tokenizer, None, 1000)
    monkeypatch.setattr(tiny_tokenizer, "chat_template", "{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    (prompt, question), (code, _) = (
        [tiny_tokenizer.decode(ids) for sample in loaded.samples for ids in (sample.prompt, sample.question)]
        for loaded in (make(name, root, chat=True).load(tiny_tokenizer, None, 1000) for name in ("hotpotqa", "lcc"))
    )
    assert prompt.startswith("<Answer the question") and prompt.endswith("Bob is tall.")
    assert question.endswith("Question: Who is tall?\nAnswer:>") and code.startswith("Please complete")


def test_answers_follow_the_end_of_the_template(tiny_tokenizer, write, monkeypatch):
    """Behind a line break they have no space of their own; the rows of a chat differ from those of older versions."""
    root, found = write("longbench/hotpotqa", [row()]), {}
    for end in (">", "\\n"):
        template = f"{{% for m in messages %}}<{{{{ m['content'] }}}}{{% endfor %}}{{{{ '{end}' }}}}"
        monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
        [sample] = make("hotpotqa", root, chat=True).load(tiny_tokenizer, None, 1000).samples
        found[tiny_tokenizer.decode(sample.question)[-1]] = tiny_tokenizer.decode(sample.target_tokens)
    assert found == {">": " Bob", "\n": "Bob"}
    told = [make(name, chat=chat).identity().get("follows") for name in ("hotpotqa", "lcc") for chat in (True, False)]
    assert told == ["template", None, None, None]


def test_samples_are_the_same_tomorrow(tiny_tokenizer, write, monkeypatch):
    """As of a template that prints the day, which transformers takes from the clock."""
    root = write("longbench/hotpotqa", [row()])
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    [sample] = make("hotpotqa", root, chat=True).load(tiny_tokenizer, None, 1000).samples
    assert tiny_tokenizer.decode(sample.prompt).startswith("26 Jul 2024<")


@pytest.mark.parametrize("start", ["", "\n", "\n\n", "  ", "  {% if true %}\n{% endif %}"])
def test_a_template_without_a_day_is_as_it_is_alone(tiny_tokenizer, monkeypatch, start):
    template = start + "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "Who?"}]
    alone = tiny_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert apply_template(tiny_tokenizer, messages) == alone


def test_an_answer_that_is_no_text_is_refused(tiny_tokenizer, write):
    root = write("longbench/hotpotqa", [row(), row(answers=["Bob", 5])])
    with refuses(DataError, "hotpotqa row 2", "answers", "int", "str"):
        make("hotpotqa", root).load(tiny_tokenizer, None, 1000)


@pytest.mark.slow
def test_the_best_reference_counts(tiny_llama, tiny_tokenizer, write):
    """The answer is that of ``generate``, up to the end of its line."""
    model, outcomes, name = tiny_llama(), [], "samsum"
    ends = {"eos_token_id": [2, *tiny_tokenizer("\n")["input_ids"]], "min_new_tokens": 1}
    for answers in (("nothing",), ("nothing", None)):
        said = outcomes[0].tags["answer"].strip("\n").split("\n")[0] if outcomes else ""
        task = make(name, write(f"longbench/{name}", [row(answers=[said if x is None else x for x in answers])]))
        [sample] = task.load(tiny_tokenizer, None, 512).samples
        outcomes += [outcome for _, outcome in task.run(model, tiny_tokenizer, [ag.policy("full")], [sample])]
    ids = tiny_tokenizer(tiny_tokenizer.decode(sample.prompt + sample.question), return_tensors="pt")["input_ids"]
    tokens = model.generate(ids, max_new_tokens=SUBSETS[name].max_new_tokens, do_sample=False, **ends)
    text = tiny_tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    assert outcomes[0].tags["answer"] == text.rstrip("\n")
    assert outcomes[1].score > outcomes[0].score


def test_the_archive_of_the_hub_and_missing_data(tiny_tokenizer, tmp_path, write, monkeypatch):
    for root in (str(tmp_path), None, write("longbench/lcc", [row()])):  # the tests have no hub
        with refuses(DataError, "root=FOLDER", "longbench/qasper.jsonl", "hf download zai-org/LongBench data.zip"):
            make("qasper", root).load(tiny_tokenizer, None, 1000)
    with refuses(DataError, "qasper row 1", "context"):
        make("qasper", write("longbench/qasper", [{"input": "x"}])).load(tiny_tokenizer, None, 1000)
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/hotpotqa.jsonl", json.dumps(row("One.")) + "\n" + json.dumps(row("Two.")) + "\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(archive))
    first, second = make("hotpotqa").load(tiny_tokenizer, None, 1000).samples
    assert "One." in tiny_tokenizer.decode(first.prompt) and second.id == "hotpotqa-2"
