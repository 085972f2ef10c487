import json

import pytest

from ag.data.sources import DataError, Source, local_folder
from ag.data.templates import TASKS, Example, examples
from tests.support.refused import refuses

ARC = {
    "id": "1",
    "question": "What melts?",
    "choices": {"text": ["ice", "fire", "wind", "light"], "label": ["1", "2", "3", "4"]},
    "answerKey": "1",
}
CASES = {
    "piqa": (
        {"goal": "Open a jar ", "sol1": "twist the lid ", "sol2": "sing", "label": 0},
        Example("Goal: Open a jar\nSolution:", ["twist the lid", "sing"], 0),
    ),
    "arc_easy": (ARC, Example("Question: What melts?\nAnswer:", ["ice", "fire", "wind", "light"], 0)),
    "arc_challenge": (
        ARC | {"choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}, "answerKey": "C"},
        Example("Question: What melts?\nAnswer:", ["a", "b", "c"], 2),
    ),
    "rte": (
        {"premise": "It rains.", "hypothesis": "It is wet.", "idx": 3, "label": 1},
        Example(
            "Text: It rains.\nClaim: It is wet.\nDoes the claim follow from the text?\nAnswer:",
            ["yes", "no"],
            1,
            "Text: It rains.",
        ),
    ),
    "copa": (
        {"premise": "I ran.", "choice1": "It rained.", "choice2": "I was late.", "question": "cause", "label": 1},
        Example("I ran, because", ["it rained.", "I was late."], 1),
    ),
    "boolq": (
        {"question": "is water wet", "title": "Water", "answer": True, "passage": "Water is wet."},
        Example("Water is wet.\nQuestion: is water wet?\nAnswer:", ["no", "yes"], 1, "Water is wet."),
    ),
    "openbookqa": (
        {"question_stem": "The sun gives", "choices": {"text": ["light", "rain"], "label": ["A", "B"]}}
        | {"answerKey": "B"},
        Example("The sun gives", ["light", "rain"], 1),
    ),
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "A cook stirs.",
            "ctx_b": "the cook",
            "ctx": "A cook stirs. the cook",
            "endings": ["[step] sings.", "bakes  a cake [title] Then rests."],
            "label": "1",
        },
        Example("Baking: A cook stirs. The cook", ["sings.", "bakes a cake. Then rests."], 1),
    ),
    "mmlu": (
        {"question": "How many?", "subject": "high_school_maths", "choices": ["1", "2", "3", "4"], "answer": 3},
        Example(
            "The following are multiple choice questions (with answers) about high school maths.\n\n"
            "How many?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
            ["A", "B", "C", "D"],
            3,
            "The following are multiple choice questions (with answers) about high school maths.\n\n"
            "How many?\nA. 1\nB. 2\nC. 3\nD. 4",
        ),
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_row_becomes_question(name):
    row, expected = CASES[name]
    [example] = examples(TASKS[name], [row], "file")
    assert example == expected
    assert example.prompt.startswith(example.context)


def test_other_forms_of_rows():
    """An effect links with so; the hub's raw row of hellaswag and the local form of it give one question."""
    row = CASES["copa"][0] | {"question": "effect"}
    assert next(examples(TASKS["copa"], [row], "file")).prompt == "I ran, so"
    clean = {"activity_label": "Baking", "ctx": "A cook stirs. The cook", "label": "1"}
    clean["endings"] = ["sings.", "bakes a cake. Then rests."]
    assert list(examples(TASKS["hellaswag"], [clean], "file")) == [CASES["hellaswag"][1]]


@pytest.mark.parametrize(
    "name, change, parts",
    [
        ("piqa", {"label": "0"}, "label str int"),
        ("piqa", {"label": 2}, "choice 2 choices"),
        ("piqa", {"sol2": "  "}, "empty"),
        ("arc_easy", {"answerKey": "E"}, "allenai/ai2_arc"),
        ("arc_easy", {"choices": {"text": [1, 2, 3, 4], "label": ["1", "2", "3", "4"]}}, "text"),
        ("copa", {"question": "why"}, "aps/super_glue"),
    ],
)
def test_rows_of_another_form_are_named(name, change, parts):
    good = CASES[name][0]
    with refuses(DataError, "file row 2", *parts.split()):
        list(examples(TASKS[name], [good, good | change], "file"))


ROWS = {
    "piqa": (16113, 919),
    "arc_challenge": (1119, 299),
    "arc_easy": (2251, 570),
    "boolq": (9427, 1635),
    "openbookqa": (4957, 500),
    "rte": (2490, 277),
    "copa": (400, 100),
    "hellaswag": (2000, 2000),
}


@pytest.mark.parametrize("name", ROWS)
def test_real_data(shared_data, name):
    """Every row of the real data becomes a question."""
    task = TASKS[name]
    source = Source(task.hub, folder=local_folder(str(shared_data), task.folder))
    for split, count in zip(("train", "validation"), ROWS[name], strict=True):
        questions = list(examples(task, source.read(split), split))
        assert len(questions) == count
        assert all(question.prompt == question.prompt.strip() for question in questions)
        assert "[title]" not in json.dumps(questions)
