"""Gates as policies: under a budget they protect what their training did; options move the boundary of their flags."""

import math
import re
from dataclasses import replace

import pytest
import torch

import ag
from ag.config import Config
from ag.config.recipes import resolve
from ag.engine import EvictionCache
from ag.errors import BudgetWarning, UserError
from ag.gates.calibration import Calibration
from tests.support import by_hand
from tests.support.batches import columns, read, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses


def kept(model, policy, length=40, seed=0, **options):
    """What a cache holds after a prompt, sets of (layer, head, column)."""
    held = columns(read(model, row(length, seed), policy, **options))
    return {(layer, head, x) for layer, [heads] in enumerate(held) for head, kept in enumerate(heads) for x in kept}


@pytest.fixture
def trained(tiny_llama, tmp_path):
    """A model, and gates trained with 2 sinks and 6 recents, dense prefill."""
    model = tiny_llama()
    gates = gates_for(model, sink_tokens=2, recent_tokens=6, prefill="dense")
    gates.save_pretrained(tmp_path / "gates")
    return model, gates, tmp_path / "gates"


def test_recents_of_the_training_take_a_quarter_of_a_small_budget(trained):
    """So that a budget below what training protected is kept, and is not all recents."""
    model, _, path = trained
    held = kept(model, f"gates:{path}", budget=8)
    assert {(layer, head, x) for layer in range(3) for head in range(2) for x in (0, 1, 38, 39)} <= held
    assert len(held) == 8 * 6
    ends = {(layer, head, 37) for layer in range(3) for head in range(2)}
    assert ends - held
    assert ends <= kept(model, f"gates:{path}", budget=8, recent_share=0.5)


def test_a_share_of_recents_is_not_bounded_by_the_training(trained):
    model, _, path = trained
    for budget, recents in ((8, 4), (20, 10)):  # the training had 5
        newest = {(layer, head, x) for layer in range(3) for head in range(2) for x in range(40 - recents, 40)}
        assert newest <= kept(model, f"gates:{path}", budget=budget, recent_share=0.5)


@pytest.mark.parametrize("sinks", [{}, {"sinks": 4}], ids=["trained", "asked for"])
def test_all_sinks_stay_under_a_budget_below_them(tiny_llama, tmp_path, sinks):
    model = tiny_llama()
    gates_for(model, sink_tokens=4, recent_tokens=6, prefill="dense").save_pretrained(tmp_path / "gates")
    everywhere = {(layer, head, x) for layer in range(3) for head in range(2) for x in range(4)}
    with pytest.warns(BudgetWarning, match="protects 4 tokens per KV head"):
        assert kept(model, f"gates:{tmp_path / 'gates'}", budget=2, **sinks) == everywhere
    for budget in (4, 5):  # the sinks come before the recents
        held = kept(model, f"gates:{tmp_path / 'gates'}", budget=budget, recent_share=1.0, **sinks)
        assert everywhere <= held and len(held) == budget * 6


@pytest.mark.parametrize("name", ["trained_sinks", "trained_recent"])
def test_what_the_gates_say_is_no_option(name):
    for budget in (8, None):
        with pytest.raises(UserError) as caught:
            ag.policy("gates", budget, **{name: 3})
        assert str(caught.value).count("trained_") == 1  # nor is it offered


# ---- layers without a gate


@pytest.mark.parametrize("allocator", ["", "@heads", "@uniform", "@pyramid", "+caote@heads", "+criticalkv"])
def test_layers_without_a_gate_keep_everything_and_take_no_budget(tiny_llama, allocator):
    """As under flags; a warning says that the budget is that of the others."""
    model = tiny_llama(num_hidden_layers=6)
    ag.attach(model, gates_for(model, first_layer=2))
    with pytest.warns(BudgetWarning, match=r"2 of 6 layers have no gate \(gate.first_layer=2\)"):
        held = kept(model, f"gates{allocator}", length=200, budget=0.4)
    by_layer = [sum(layer == place for layer, _, _ in held) for place in range(6)]
    assert by_layer[:2] == [400, 400] and sum(by_layer[2:]) == 4 * 2 * 80
    if allocator in ("@heads", "@uniform", "+caote@heads"):
        assert by_layer[2:] == [160] * 4


@pytest.mark.filterwarnings("ignore::ag.BudgetWarning")
def test_a_layer_without_a_gate_grows_with_the_text(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, first_layer=1, scope="causal", covers="all"))
    cache = read(model, row(40), "gates@heads", budget=8, schedule="every")
    for place in range(5):
        with torch.no_grad():
            model(row(1, place)[None], past_key_values=cache)
    assert cache.held_tokens().tolist() == [[45, 8, 8]]


# ---- logits


def test_tokens_rank_by_logits_whose_probabilities_are_all_1(tiny_llama):
    model = tiny_llama()
    gates = gates_for(model, kind="linear", prefill="dense", bias=30.0)
    ag.attach(model, gates)
    ids = row(40)[None]
    gating = ag.Gating(gates, torch.ones_like(ids), torch.tensor([40]), open=True)
    with torch.no_grad():
        model(ids, gating=gating, use_cache=False)
    logits = torch.stack([x[0] for x in gating.logits.values()])  # [L, Hkv, N]
    assert bool((gates.probability(logits) == 1).all())
    best = logits.flatten().argsort(descending=True)[: 8 * 6]
    wanted = {tuple(int(x) for x in place) for place in zip(*torch.unravel_index(best, logits.shape), strict=True)}
    assert kept(model, "gates", budget=8, seed=40, recent=0) == wanted


# ---- generated tokens that no gate judges


@pytest.mark.parametrize("wrapper", ["", "+criticalkv"])
def test_a_generated_token_ranks_above_all_of_a_prompt(tiny_llama, wrapper):
    """Also above tokens whose probability float32 rounds to 1."""
    model = tiny_llama()
    gates = gates_for(model, scope="causal", kind="linear", bias=30.0)
    ag.attach(model, gates)
    options = {"budget": 8, "schedule": "every", "recent": 0} | ({"first": 1.0} if wrapper else {})
    cache = read(model, row(40), f"gates{wrapper}@uniform", **options)
    for place in range(5):
        with torch.no_grad():
            model(row(1, place)[None], past_key_values=cache)
    for layer in range(3):
        for kept_there in cache.kept_positions(layer)[0]:
            assert len(kept_there) == 8 and kept_there[-5:].tolist() == [40, 41, 42, 43, 44]


# ---- flags with another boundary: ``threshold=`` and ``share=`` of ``gates:PATH``


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
        ("gates:{}", {"share": "0.3"}, "share='0.3' float"),
        ("gates:{}", {"threshold": float("nan")}, "threshold=nan 0 1"),
        ("gates", {"share": 0.3}, "share=0.3 gates:PATH gates.at(share=0.3)"),
        ("h2o", {"share": 0.3, "budget": 64}, "'share' 'h2o'"),
    ],
)
def test_options_that_clash(folder, spec, options, parts):
    with refuses(UserError, *parts.split()):
        ag.policy(spec.format(folder), **options)


def test_gates_without_a_table(tiny_llama, tmp_path):
    gates_for(tiny_llama()).save_pretrained(tmp_path / "old")
    with refuses(UserError, "share=0.3", "init=EXPORT", "threshold=") as refused:
        ag.policy(f"gates:{tmp_path / 'old'}", share=0.3)
    [keys] = re.findall(r"ag\.fit recipe=RECIPE init=EXPORT ([^(]*) \(", str(refused.value))
    for recipe in ("quickstart", "remember", "smollm2_repeat", "piqa_sft"):
        resolve(Config, {"recipe": recipe, "init": "EXPORT"} | dict(pair.split("=") for pair in keys.split()))
    moved = ag.policy(f"gates:{tmp_path / 'old'}", threshold=0.2).gates
    assert moved is not None and moved.config.threshold == 0.2
