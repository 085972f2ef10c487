"""What a user asks of vLLM, read and refused without vLLM."""

import math
import pickle
from types import SimpleNamespace

import pytest
import torch

import ag
from ag.errors import UserError
from ag.vllm.settings import Settings, protected_tokens
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

NAMED = {"gates": "smollm2", "budget": 0.3}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (NAMED, {}, Settings("gates:smollm2", 0.3)),
        ({"policy": "gates@uniform", "gates": "smollm2", "budget": 64}, {}, Settings("gates:smollm2@uniform", 64)),
        ({"policy": "knorm", "budget": 0.5, "recent": 8}, {}, Settings("knorm", 0.5, '{"recent": 8}')),
        (NAMED | {"schedule": "steps:16"}, {}, Settings("gates:smollm2", 0.3, '{"schedule": "steps:16"}')),
        (None, {"AG_GATES": "smollm2", "AG_BUDGET": "0.3"}, Settings("gates:smollm2", 0.3)),
        (None, {"AG_GATES": "smollm2", "AG_BUDGET": "128"}, Settings("gates:smollm2", 128)),
        (NAMED, {"AG_GATES": "other", "AG_BUDGET": "7"}, Settings("gates:smollm2", 0.3)),
        (NAMED | {"policy": "gates:smollm2@uniform"}, {}, Settings("gates:smollm2@uniform", 0.3)),
        (None, {"AG_BUDGET": "128"}, None),
        (None, {"AG_GATES": "", "AG_BUDGET": "0.3"}, None),
    ],
)
def test_settings(given, environment, expected):
    made = Settings.parse({} if given is None else {"ag": given}, environment)
    assert made == expected
    if made is not None:
        there = pickle.loads(pickle.dumps(made))  # as it goes to vLLM's other processes: a text, and no weights
        assert there == made and hash(there) == hash(made) and len(pickle.dumps(made)) < 1000
        assert there.made_policy.budget == expected.budget and there.made_policy is made.made_policy


def test_one_token_is_not_all_tokens():
    """Python's caches take 1 for 1.0 unless the settings differ."""
    every, one = (Settings.parse({"ag": {"policy": "knorm", "budget": budget}}, {}) for budget in (1.0, 1))
    assert every != one and len({every, one}) == 2
    assert [str(settings.made_policy.budget) for settings in (every, one)] == ["1.0", "1"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gates": "smollm2"}, ["budget"]),
        ({"budget": 0.3}, ["gates"]),
        ("gates", ["ag='gates'"]),
        ({"gates": "smollm2", "budget": 0.0}, ["budget=0.0"]),
        ({"gates": "smollm2", "budget": "many"}, ["budget='many'"]),
        ({"gates": "smollm2", "budget": None}, ["budget=None"]),
        ({"gates": "smollm2", "budget": [0.3]}, ["budget=[0.3]"]),
        ({"gates": "", "budget": 0.3}, ["gates:EXPORT"]),
        ({"gates": 5, "budget": 0.3}, ["gates=5"]),
        ({"policy": 5, "budget": 0.3}, ["policy=5"]),
        ({"policy": "knorm", "budget": 0.3, "schedule": None}, ["schedule=None"]),
        ({"policy": "knorm", "gates": "smollm2", "budget": 0.3}, ["gates=smollm2", "policy=knorm"]),
        ({"policy": "gates:smollm2", "gates": "other", "budget": 0.3}, ["gates=other", "policy=gates:smollm2"]),
        ({"gates": "smollm2", "budget": 0.3, "sink": 2}, ["sink", "sinks"]),
        ({"policy": "gates", "budget": 0.3}, ["gates"]),
        ({"policy": "flags:smollm2", "budget": 0.3}, ["flags:smollm2", "gates:EXPORT"]),
        ({"policy": "full", "budget": 0.3}, ["full"]),
        ({"policy": "h2o", "budget": 0.3}, ["h2o"]),
        ({"policy": "knorm@pyramid", "budget": 0.3}, ["pyramid"]),
        ({"policy": "knorm+vatp", "budget": 0.3}, ["+vatp"]),
        ({"policy": "knorm", "budget": 0.3, "schedule": "often"}, ["schedule='often'"]),
        ({"policy": "knorm", "budget": 0.3, "positions": "slot"}, ["positions=slot"]),
        ({"policy": "knorm", "budget": 0.3, "kv_dtype": "int8"}, ["kv_dtype=int8"]),
        ({"policy": "gates:smollm2", "budget": 0.3, "floor": 0.1}, ["floor"]),
    ],
)
def test_refused(given, words):
    with refuses(UserError, *words):
        Settings.parse({"ag": given}, {})


@pytest.mark.parametrize("text", ["many", "", "null", "[1]", "NaN"])
def test_budget_of_the_environment_that_is_no_number(text):
    with refuses(UserError, "budget"):
        Settings.parse({}, {"AG_GATES": "smollm2", "AG_BUDGET": text})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kind": "attention"}, "gate.kind=attention"),
        ({"kind": "linear", "layer_offset": 1, "first_layer": 1}, "gate.layer_offset=1"),
        ({"kind": "linear", "scope": "prompt"}, "gate.scope=prompt"),
    ],
)
def test_gates_that_vllm_cannot_run(tmp_path, tiny_llama, options, word):
    gates_for(tiny_llama(), **options).save_pretrained(tmp_path / "gates")
    with refuses(UserError, word):
        Settings.parse({"ag": {"gates": str(tmp_path / "gates"), "budget": 0.3}}, {})


@pytest.mark.parametrize(
    ("options", "schedule", "word"),
    [
        ({"covers": "prompt"}, "steps:8", "gate.covers=prompt"),
        ({"first_layer": 1, "covers": "all"}, "steps:8", "gate.first_layer=1"),
        ({"first_layer": 1}, "blocks:8", "gate.first_layer=1"),
    ],
)
def test_gates_of_a_part_that_is_evicted_again(tmp_path, tiny_llama, options, schedule, word):
    gates_for(tiny_llama(), kind="linear", **options).save_pretrained(tmp_path / "gates")
    given = {"gates": str(tmp_path / "gates"), "budget": 0.3}
    Settings.parse({"ag": given}, {})
    with refuses(UserError, word, f"schedule={schedule}"):
        Settings.parse({"ag": given | {"schedule": schedule}}, {})


@pytest.mark.parametrize("kind", ["linear", "affine", "mlp", "fast_kvzip", "retention"])
def test_gates_that_vllm_runs(tmp_path, tiny_llama, kind):
    gates_for(tiny_llama(), kind=kind).save_pretrained(tmp_path / "gates")
    made = Settings.parse({"ag": {"gates": str(tmp_path / "gates"), "budget": 0.3}}, {})
    assert isinstance(made.made_policy.gates, ag.AttentionGates)
    hidden = torch.randn(1, 5, tiny_llama().config.hidden_size)
    assert made.made_policy.gates.layers["0"](hidden).shape == (1, 2, 5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 0), ({}, 0), ({"ag_protect": 7}, 7), ({"ag_protect": 7.0}, 7), ({"ag_protect": 10**400}, 40)],
)
def test_protected_tokens(given, expected):
    assert protected_tokens(SimpleNamespace(extra_args=given), 40) == expected


@pytest.mark.parametrize("value", [-1, 1.5, "7", True, None, math.inf, -math.inf, math.nan])
def test_protected_tokens_that_are_no_number(value):
    with refuses(UserError, "ag_protect"):
        protected_tokens(SimpleNamespace(extra_args={"ag_protect": value}), 40)
