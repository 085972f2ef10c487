"""One rule for budgets: an int is tokens, a float in (0, 1] a share, anything else the same error in every command."""

import re

import pytest

import ag.compare
import ag.evaluate.__main__
import ag.explain
import ag.generate
from ag.config.command_line import parse
from ag.config.spec import parse_budget
from ag.continuation import _policies
from ag.errors import UserError
from ag.evaluate import explain
from ag.evaluate.comparison import cells

COMMANDS = {
    "generate": (ag.generate.main, ["policy=h2o", "prompt=x", "model=none"], "budget={}"),
    "compare": (ag.compare.main, ["policies=[full,h2o]", "model=none"], "budgets=[0.5,{}]"),
    "compare, nothing evicted": (ag.compare.main, ["policies=[full]", "model=none"], "budgets=[{}]"),
    "evaluate": (ag.evaluate.__main__.main, ["root=.", "policies=[h2o]"], "budgets=[{}]"),
    "explain": (ag.explain.main, ["root=.", "policies=[h2o]"], "budget={}"),
}
WRONG = {"1.5": 1.5, "0": 0, "64.0": 64.0, "abc": "abc", ".nan": float("nan"), "true": True, "[1]": [1]}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it_in_the_same_words(command, capsys):
    main, words, key = COMMANDS[command]
    for text, value in WRONG.items():
        with pytest.raises(UserError) as caught:
            parse_budget(value)
        assert main([*words, key.format(text)]) == 2
        error = re.sub(r"^ag\.\w+: error: ", "", capsys.readouterr().err).strip()
        assert error == str(caught.value) and error.startswith(f"budget={value!r}: ")


@pytest.mark.parametrize(("text", "budget"), [("1", 1), ("1.0", 1.0), ("256", 256), ("1e-1", 0.1)])
def test_one_is_a_token_and_one_point_nought_the_whole_prompt(text, budget):
    def config(schema, *words):
        return parse(words, schema, "ag.x").config

    generated = _policies(config(ag.generate.GenerateConfig, "policy=h2o", "prompt=x", f"budget={text}"))["h2o"]
    explained = explain._policies(config(ag.explain.ExplainConfig, "policies=[h2o]", f"budget={text}"))["h2o"]
    _, compared = cells.list_cells(config(ag.compare.CompareConfig, "policies=[full,h2o]", f"budgets=[{text}]"))
    for policy in (generated, explained, compared.policy, ag.policy("h2o", budget)):
        assert (policy.budget, type(policy.budget)) == (budget, type(budget))
