"""Names of tasks."""

from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, TASKS, expand, make
from tests.support.refused import refuses


def test_names_and_groups():
    assert make("arc_c").name == "arc_challenge" and make("obqa", "/data").root == "/data"
    assert (make("needle_multikey").keys, make("needle_multikey", keys=2).keys) == (4, 2)
    for name in TASKS:
        task = make(name)
        assert task.name == name and task.metric
        assert task.higher_is_better == (name not in ("ppl", "ppl_stream", "responses"))
    sizes = {"multiple_choice": 9, "needle": 5, "needle_books": 3, "instructions": 4, "ruler": 13, "longbench": 16}
    assert {name: len(names) for name, names in GROUPS.items()} == sizes
    assert expand(["boolq", "longbench", "obqa", "qasper", "boolq"]) == ["boolq", *GROUPS["longbench"], "openbookqa"]


def test_unknown_names():
    for call, parts in (
        (lambda: make("needle"), ("needle", "needle_single")),
        (lambda: make("bolq"), ("'bolq'", "boolq")),
        (lambda: expand(["ppl", "longbnch"]), ("'longbnch'", "longbench")),
        (lambda: make("ppl", promt=3), ("ppl", "'promt'", "prompt")),
        (lambda: make("boolq", depths=[1]), ("boolq", "'depths'", "question")),
    ):
        with refuses(UserError, *parts):
            call()
