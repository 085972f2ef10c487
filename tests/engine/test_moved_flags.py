"""Flags with another boundary: ``threshold=`` and ``share=`` of ``gates:PATH``."""

import math
from dataclasses import replace

import pytest
import torch

import ag
from ag.engine import EvictionCache
from ag.errors import UserError
from ag.gates.calibration import Calibration
from tests.support import by_hand
from tests.support.batches import row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

TABLE = Calibration((0.1, 0.5, 0.9), (1.5, 0.25, -2.25))
PROMPT = 24
#: options, and the boundary that they give gates of threshold 0.3 and bias 0.4
MOVED = {
    "share": ({"share": 0.7}, -1.0),
    "row": ({"share": 0.5}, 0.25),
    "threshold": ({"threshold": 0.6}, math.log(0.6 / 0.4) - 0.4),
}


def calibrated(model, **changes):
    gates = gates_for(model, threshold=0.3, bias=0.4, sink_tokens=2, recent_tokens=3, **changes)
    gates.calibration = TABLE
    return gates


@pytest.fixture
def folder(tiny_llama, tmp_path):
    calibrated(tiny_llama()).save_pretrained(tmp_path / "export")
    return str(tmp_path / "export")


@pytest.mark.parametrize(("name", "scorer"), [("share", "flags"), ("row", "gates"), ("threshold", "flags")])
def test_tokens_above_the_boundary_stay(tiny_llama, folder, name, scorer):
    """Held tokens against a forward pass written out, whose gates have the boundary as their bias."""
    options, boundary = MOVED[name]
    model, ids = tiny_llama(), row(PROMPT, 5)
    policy = ag.policy(f"{scorer}:{folder}", **options)
    cache = EvictionCache(model, policy)
    with torch.no_grad():
        model(ids[None], past_key_values=cache)
        logits = model(ids[None, :1], past_key_values=cache).logits[0, -1]
    moved = calibrated(model)
    moved.config = replace(moved.config, threshold=0.5, bias=-boundary)
    want, flags = by_hand.forward(model, moved, torch.cat([ids, ids[:1]]), PROMPT)
    plain = by_hand.forward(model, calibrated(model), ids, PROMPT)[1]
    hold(logits, want[-1], of_logits(model))
    for layer, said in flags.items():
        held = [head.tolist() for head in cache.kept_positions(layer)[0]]
        assert held == by_hand.kept(moved, said, PROMPT, PROMPT + 1, PROMPT)
    assert any(not torch.equal(said, plain[layer]) for layer, said in flags.items()), "flags move with the boundary"
    assert eval(repr(policy)) == policy and repr(policy).count(next(iter(options))) == 1


@pytest.mark.parametrize(
    ("spec", "options", "parts"),
    [
        ("gates:{}", {"share": 0.3, "threshold": 0.5}, "threshold= share="),
        ("gates:{}@heads", {"threshold": 0.3, "budget": 64}, "threshold=0.3 budget=64"),
        ("gates:{}@heads", {"share": 0.3}, "budget"),
        ("gates:{}", {"share": 30}, "share=30 0.1 0.9"),
        ("gates:{}", {"share": "0.3"}, "share='0.3' float"),
        ("gates:{}", {"threshold": float("nan")}, "threshold=nan 0 1"),
        ("gates:{}", {"shar": 0.3}, "'shar' share?"),
        ("gates", {"share": 0.3}, "share=0.3 gates:PATH gates.at(share=0.3)"),
        ("h2o", {"share": 0.3, "budget": 64}, "'share' 'h2o'"),
    ],
)
def test_options_that_clash(folder, spec, options, parts):
    with refuses(UserError, *parts.split()):
        ag.policy(spec.format(folder), **options)


def test_gates_without_a_table(tiny_llama, tmp_path):
    gates_for(tiny_llama()).save_pretrained(tmp_path / "old")
    with refuses(UserError, "share=0.3", "init=EXPORT", "threshold="):
        ag.policy(f"gates:{tmp_path / 'old'}", share=0.3)
    moved = ag.policy(f"gates:{tmp_path / 'old'}", threshold=0.2).gates
    assert moved is not None and moved.config.threshold == 0.2
