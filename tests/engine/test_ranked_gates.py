"""Gates under a budget: they protect what their training did, and rank to the set of their own flags."""

from dataclasses import replace

import pytest

import ag
from ag.engine.scorers.gates import Gates
from ag.engine.wrappers.caote import Caote
from ag.errors import BudgetWarning, UserError
from tests.support.batches import columns, read, row
from tests.support.gates_for import gates_for


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


ENDS = (0, 1, 35, 36, 37, 38, 39)  # a query behind the prompt sees itself and 5 more


@pytest.mark.parametrize(
    ("spec", "attached"), [("gates", True), ("gates+caote@heads", False), ("gates@pyramid", False)]
)
def test_sinks_and_recents_of_the_training_stay(trained, spec, attached):
    model, gates, path = trained
    if attached:
        ag.attach(model, gates)
    held = kept(model, spec if attached else spec.replace("gates", f"gates:{path}", 1), budget=20)
    assert {(layer, head, x) for layer in range(3) for head in range(2) for x in ENDS} <= held
    assert len(held) == 20 * 6
    loose = kept(model, spec if attached else spec.replace("gates", f"gates:{path}", 1), budget=20, sinks=0, recent=0)
    assert len(loose) == 20 * 6
    missing = {(layer, head, x) for layer in range(3) for head in range(2) for x in ENDS} - loose
    assert missing, "without protection some of these go"


@pytest.mark.slow
def test_as_many_as_the_flags_keep_are_the_flagged(trained):
    """Over all layers and heads, since one threshold holds for all; the budget is per KV head, 6 of them."""
    model, gates, _ = trained
    ag.attach(model, gates)
    compared = 0
    for seed in range(30):
        flagged = kept(model, "gates", seed=seed)
        if len(flagged) % 6 == 0:
            assert kept(model, "gates@global", budget=len(flagged) // 6, seed=seed) == flagged
            compared += 1
    assert compared > 1


def test_what_the_policy_says_comes_first(trained):
    model, gates, path = trained
    protecting = Gates(trained_sinks=2, trained_recent=5)
    assert ag.policy(f"gates:{path}@heads", 0.5).scorer == protecting
    assert ag.policy(f"gates:{path}", 0.5, recent=0).scorer == replace(protecting, recent=0)
    assert ag.policy(f"gates:{path}+caote", 0.5, sinks=7).scorer.inner == replace(protecting, sinks=7)
    assert ag.policy("gates", 0.5).scorer == Gates()  # which gates is known when there is a model
    ag.attach(model, gates)
    assert ag.EvictionCache(model, "gates+caote", 0.5).policy.scorer == Caote(inner=protecting)
    policy = ag.policy(f"gates:{path}@heads", 0.5)
    assert eval(repr(policy)).scorer == policy.scorer


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
