"""Names of tasks, and their options."""

import pytest

from ag.errors import UserError
from ag.evaluate.tasks import GROUPS, TASKS, expand, make
from tests.support.refused import refuses

NATS = ("ppl", "ppl_stream", "responses", "own")


def test_names_and_groups():
    assert make("arc_c").name == "arc_challenge" and make("obqa", "/data").root == "/data"
    assert (make("needle_multikey").keys, make("needle_multikey", keys=2).keys) == (4, 2)
    for name in TASKS:
        task = make(name)
        assert task.name == name and task.metric
        assert task.higher_is_better == (not name.endswith("_nats") and name not in NATS)
    sizes = {"multiple_choice": 9, "needle": 5, "needle_books": 3, "instructions": 4, "ruler": 13, "longbench": 16}
    assert {name: len(names) for name, names in GROUPS.items()} == sizes
    assert expand(["boolq", "longbench", "obqa", "qasper", "boolq"]) == ["boolq", *GROUPS["longbench"], "openbookqa"]
    with refuses(UserError, "'longbnch'", "longbench"):
        expand(["ppl", "longbnch"])


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("needle", {}, ("needle", "needle_single")),
        ("bolq", {}, ("'bolq'", "boolq")),
        ("ppl", {"promt": 3}, ("ppl", "'promt'", "prompt")),
        ("ppl", {"prompt": 0}, ("ppl", "prompt=0", "greater than or equal to 1")),
        ("needle_single", {"depths": [0.5, 2]}, ("depths=[0.5, 2]", "less than or equal to 1")),
        ("needle_variables", {"lengths": []}, ("lengths=[]", "at least 1 item")),
        ("needle_multikey", {"keys": 1000}, ("keys=1000", "1 to 240")),
        ("niah_multikey_2", {"keys": 240, "key": "noun"}, ("keys=240", "1 to 239")),
        ("needle_multivalue", {"values": 901, "digits": 3}, ("digits=3", "keys * values = 901", "900")),
        ("niah_multiquery", {"queries": 5}, ("queries=5", "1 to keys=4")),
        ("niah_single_1", {"haystack": "essay"}, ("haystack='essay'", "'noise', 'text' or 'needles'")),
        ("turns", {"question": "before"}, ("question='before'", "'after'")),
        ("instructions_4", {"generate": 6}, ("generate=6", "None")),
        ("instructions_4", {"protect": "system"}, ("protect='system'", "boolean")),
        ("worked", {"kind": "division"}, ("kind='division'", "worked, addition, sorting, variables, chain_sum")),
        ("worked", {"solution_min": 300, "solution_max": 200}, ("solution_max=200", "at least solution_min")),
        *((name, {"question": "after"}, (name, "question=after", "needs a context")) for name in ("piqa", "ppl")),
    ],
)
def test_unknown_names_and_options(name, options, parts):
    with refuses(UserError, *parts):
        make(name, **options)
