"""Names of tasks."""

from refused import refuses

from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, TASKS, expand, make


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
    with refuses(UserError, "needle", "needle_single"):
        make("needle")


def test_unknown_names():
    with refuses(UserError, "'bolq'", "boolq"):
        make("bolq")
    with refuses(UserError, "'longbnch'", "longbench"):
        expand(["ppl", "longbnch"])
    with refuses(UserError, "ppl", "'promt'", "prompt"):
        make("ppl", promt=3)
    with refuses(UserError, "boolq", "'depths'"):
        make("boolq", depths=[1])
