import pytest
import torch
from gates_for import gates_for

import ag
from ag.errors import UserError
from ag.export import ExportError


def test_a_policy_is_its_text():
    assert ag.policy("full").scorer == "full"
    assert ag.policy("gates").scorer == "gates"
    assert ag.policy("gates").gates is None
    assert ag.policy("full") == ag.policy("full") != ag.policy("gates")
    assert repr(ag.policy("full")) == "ag.policy('full')"
    assert eval(repr(ag.policy("full"))) == ag.policy("full")


def test_gates_are_read_from_a_folder(tiny_llama, tmp_path):
    gates = gates_for(tiny_llama(), seed=3)
    gates.save_pretrained(tmp_path / "gates")
    policy = ag.policy(f"gates:{tmp_path / 'gates'}")
    assert policy.scorer == "gates"
    assert eval(repr(policy)) == policy
    for name, value in policy.gates.state_dict().items():
        assert torch.equal(value, gates.state_dict()[name])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gate", r"Unknown policy 'gate': expected one of full, gates; did you mean gates\?"),
        ("ful", r"did you mean full\?"),
        ("gates_:x", r"Unknown policy 'gates_:x'.*did you mean gates\?"),
        ("", "Unknown policy ''"),
        ("gates:", "Policy 'gates:': expected gates:PATH"),
        ("full:x", "Policy 'full:x': expected full"),
    ],
)
def test_unknown_policies(spec, message):
    with pytest.raises(UserError, match=message):
        ag.policy(spec)


def test_a_far_name_gets_no_suggestion():
    with pytest.raises(UserError) as caught:
        ag.policy("zzz")
    assert "did you mean" not in str(caught.value)


def test_a_folder_without_gates(tmp_path):
    with pytest.raises(ExportError, match=str(tmp_path / "nothing")):
        ag.policy(f"gates:{tmp_path / 'nothing'}")
