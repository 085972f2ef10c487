"""Flags with another boundary: ``threshold=`` and ``share=`` of ``gates:PATH``."""

import math
from dataclasses import replace

import pytest
import torch

import ag
from ag.commands.compare import CompareConfig
from ag.continuation import _policies
from ag.engine import EvictionCache
from ag.errors import UserError
from ag.evaluate.comparison.cells import list_cells
from ag.gates.calibration import Calibration
from ag.generate import GenerateConfig
from tests.support import by_hand
from tests.support.batches import row
from tests.support.bounds import hold, of_logits, premise
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


@pytest.mark.parametrize("scorer", ["flags", "gates"])
@pytest.mark.parametrize("name", MOVED)
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
    premise(any(not torch.equal(said, plain[layer]) for layer, said in flags.items()), "flags move with the boundary")
    assert eval(repr(policy)) == policy and repr(policy).count(next(iter(options))) == 1


def test_gates_in_memory(tiny_llama):
    gates = calibrated(tiny_llama())
    before = gates.config
    for options, boundary in MOVED.values():
        moved = gates.at(**options)
        assert moved.config.boundary == pytest.approx(boundary)
        assert (moved.config.sink_tokens, moved.config.recent_tokens) == (2, 3)
        assert all(a is b for a, b in zip(moved.parameters(), gates.parameters(), strict=True))
        logits = torch.tensor([boundary - 1e-4, boundary + 1e-4])
        assert moved.flags(logits).tolist() == [False, True]
    assert gates.config is before
    model = tiny_llama()
    ag.attach(model, gates.at(share=0.7))
    for scorer in ("gates", "flags"):
        assert EvictionCache(model, scorer).gates.config.boundary == pytest.approx(-1.0)
    with refuses(UserError, "'flags'", "ag.attach", "flags:PATH"):
        EvictionCache(tiny_llama(), "flags")


@pytest.mark.parametrize(
    ("spec", "options", "parts"),
    [
        ("gates:{}", {"share": 0.3, "threshold": 0.5}, "threshold= share="),
        ("gates:{}@heads", {"threshold": 0.3, "budget": 64}, "threshold=0.3 budget=64"),
        ("gates:{}@heads", {"share": 0.3}, "budget"),
        ("gates:{}", {"share": 0.05}, "share=0.05 0.1 0.9"),
        ("gates:{}", {"share": 30}, "share=30 0.1 0.9"),
        ("gates:{}", {"share": "0.3"}, "share='0.3' float"),
        ("gates:{}", {"threshold": True}, "threshold=True float"),
        ("gates:{}", {"threshold": 1.0}, "threshold=1.0 0 1"),
        ("gates:{}", {"threshold": float("nan")}, "threshold=nan 0 1"),
        ("gates:{}", {"shar": 0.3}, "'shar' share?"),
        ("gates:{}", {"share": 0.3, "recent": 5}, "recent flags"),
        ("gates", {"share": 0.3}, "share=0.3 gates:PATH gates.at(share=0.3)"),
        ("h2o", {"share": 0.3, "budget": 64}, "'share' 'h2o'"),
        ("full", {"threshold": 0.3}, "'threshold' 'full'"),
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


def test_in_the_commands(folder):
    label = f"gates:{folder}"
    [made] = _policies(GenerateConfig(gates=folder, options={"share": 0.7}, prompt="x")).values()
    assert made.gates is not None and made.gates.config.boundary == pytest.approx(-1.0)
    values = {"policies": ["full", label], "tasks": ["ppl"], "root": folder}
    cells = [list_cells(CompareConfig(**values, policy_options={label: {"share": share}}))[1] for share in (0.7, 0.5)]
    assert [cell.policy.gates.config.boundary for cell in cells] == pytest.approx([-1.0, 0.25])
    assert len({cell.key for cell in [*cells, list_cells(CompareConfig(**values))[1]]}) == 3
