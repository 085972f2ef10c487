"""What trains the package's gates and what measures them are apart: documents, books and forms of questions."""

import gzip
import json
import re
from pathlib import Path

import pytest

import ag.evaluate.tasks
from ag.data.relations import NUMBERS, RELATIONS
from ag.data.rules import REQUESTS, ROLES, RULES
from ag.evaluate.tasks.instructions import RULE_KINDS


def test_no_task_asks_in_a_form_of_the_training():
    tasks = "\n".join(path.read_text() for path in Path(ag.evaluate.tasks.__file__).parent.glob("*.py"))
    for relation in RELATIONS + NUMBERS:
        for text in (relation.fact, relation.question):
            parts = [part.strip() for part in re.split(r"\{who\}|\{what\}", text)]
            forms = [part for part in parts if len(part.split()) > 1]
            assert forms and not [form for form in forms if form in tasks], text
    said = {choice.rule_text for kind in RULE_KINDS.values() for choice in kind.choices}
    for rule in RULES:
        for text in filter(None, (rule.text, rule.lead)):
            assert text.partition("{what}")[0].strip() not in tasks, text
        assert not said & set(rule.demands)
    assert not [text for text in ROLES + REQUESTS if text in tasks]


@pytest.mark.slow
@pytest.mark.nightly
def test_no_measured_text_is_in_the_training_documents(shared_data):
    corpus = shared_data / "corpus"
    with gzip.open(corpus / "train.jsonl.gz", "rt") as file:
        trained = "\n".join(json.loads(line)["text"] for line in file)
    documents = [json.loads(line)["text"] for line in (corpus / "validation.jsonl").open()]
    with gzip.open(shared_data / "pg19_style" / "test.jsonl.gz", "rt") as file:
        books = [json.loads(line)["text"] for line in file]
    assert books and documents

    def found(text):
        places = range(500, len(text) - 200, max(1, len(text) // 4))
        return sum(text[at : at + 200] in trained for at in places)

    assert not any(map(found, books))
    assert max(map(found, documents)) <= 1  # two pages of a site may share a paragraph
