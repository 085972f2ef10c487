"""Names of tasks."""

from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, TASKS, expand, make
from tests.support.refused import refuses


def test_names():
    assert make("arc_c").name == "arc_challenge"
    assert make("obqa", "/data").root == "/data"
    assert make("needle_multikey").keys == 4
    assert make("needle_multikey", keys=2).keys == 2
    for name in TASKS:
        task = make(name)
        assert task.name == name
        assert task.metric
        assert task.higher_is_better == (name not in ("ppl", "ppl_stream", "responses"))


def test_groups():
    assert len(GROUPS["longbench"]) == 16
    assert len(GROUPS["multiple_choice"]) == 9
    assert expand(["boolq", "longbench", "obqa", "qasper", "boolq"]) == ["boolq", *GROUPS["longbench"], "openbookqa"]
    assert expand(["needle"]) == [
        *("needle_single", "needle_text", "needle_multikey", "needle_multivalue", "needle_variables")
    ]
    assert expand(["needle_books"]) == ["needle_books_1", "needle_books_4", "needle_books_8"]
    assert expand(["ruler"]) == [
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    ]
    with refuses(UserError, "needle", "needle_single"):
        make("needle")


def test_unknown_names():
    with refuses(UserError, "'bolq'", "boolq"):
        make("bolq")
    with refuses(UserError, "'longbnch'", "longbench"):
        expand(["ppl", "longbnch"])
    with refuses(UserError, "ppl", "'promt'", "prompt"):
        make("ppl", promt=3)
    with refuses(UserError, "boolq", "'depths'", "question"):
        make("boolq", depths=[1])
