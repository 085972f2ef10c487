"""Wrappers where they change nothing: what stays is what stays under the base alone, down to one token a head."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ag
from ag.engine.allocators import ALLOCATORS
from ag.engine.scorers import SCORERS, RowScorer
from ag.engine.wrappers import WRAPPERS
from tests.support.drawn_scores import registered
from tests.support.gates_for import gates_for
from tests.support.held import feed
from tests.support.pairs import covering

FEW = settings(
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
ANY = sorted(name for name, scorer in SCORERS.items() if not scorer.alone)
ROWS = sorted(name for name in ANY if issubclass(SCORERS[name], RowScorer)) + ["drawn_row"]
SIGNED = ["keydiff", "knorm", "drawn"]
SCHEDULES = ["prefill", "every", "steps:2", "blocks:4", "blocks:1+every", "blocks:5+every"]
COMPETING = ("heads", "global")  # allocators under which heads compete


@dataclass(frozen=True)
class Neutral:
    """Where a wrapper changes nothing.

    Attributes:
        wrapper: its name.
        bases: scorers that it acts on.
        values: of the model: ``any``; ``equal``: ones everywhere; ``apart``: of one length, at right angles.
        options: values of the wrapper's options, by name.
        newest: whether the wrapper protects the newest token, so that the base has to.
        competes: whether heads may compete by the wrapper's score as they do by the base's.
    """

    wrapper: str
    bases: list[str]
    values: str = "any"
    options: dict[str, list[Any]] = field(default_factory=dict)
    newest: bool = False
    competes: bool = True


NEUTRAL = {
    # the base's score fills all of a head's budget
    "criticalkv": Neutral("criticalkv", SIGNED + ANY, options={"first": [1.0]}),
    # the sizes of a head's values are equal, so that its tokens have one order in both stages
    "criticalkv-sizes": Neutral("criticalkv", ["drawn", "drawn_row"], "equal", {"first": [0.0, 0.3, 0.5]}),
    # the norms are equal, and those of 16 ones are powers of 2: no rounding either
    "vatp": Neutral("vatp", ROWS, "equal", {"norm": [1, 2, "inf"], "stage": ["before", "after"]}),
    # of one query, the same for the group: 16 A^2 in every head, as v = o
    "obcache_value": Neutral("obcache_value", ["drawn_row"], "equal", {"group": ["sum", "mean", "max"]}),
    "obcache_joint": Neutral("obcache_joint", ["drawn_row"], "equal", {"group": ["sum", "mean", "max"]}),
    # of one query: A^2 s^2 (1 - 2 A + sum A^2) grows with a logit s from 1 to 2; by how much differs from head to head
    "obcache_key": Neutral("obcache_key", ["drawn_row"], "apart", competes=False),
    # h sqrt(1 + the squared length of the others' mix) grows with h; each head is normalised by itself
    "caote": Neutral("caote", ["drawn", "drawn_row"], "apart", {"greedy": [False, True]}, newest=True, competes=False),
    # all values are as far from their mean
    "fastcaote": Neutral("fastcaote", ["drawn", "drawn_row"], "apart", newest=True, competes=False),
}


@pytest.fixture(scope="module", autouse=True)
def _drawn():
    with registered():
        yield


def with_equal_values(make, **geometry):
    """A model whose values are ones."""
    model = make(**geometry)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias.fill_(1.0)
    return model


def with_values_apart(make, num_key_value_heads, **geometry):
    """A model in which token t has the value ``e_(t mod 32)``, as layers only read the embedding, ``e_t``."""
    sizes = {"hidden_size": 192, "head_dim": 32, "num_key_value_heads": num_key_value_heads}
    model = make(**geometry | sizes)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(128, 192))
        for layer in model.model.layers:
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.self_attn.v_proj):
                module.weight.zero_()
            for t in range(128):
                layer.self_attn.v_proj.weight[torch.arange(num_key_value_heads) * 32 + t % 32, t] = 1.0
    return model


@st.composite
def cases(draw, neutral):
    """A model's geometry, a policy with and without the wrapper, and passes of a padded batch."""
    kv_heads, group = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1)]))
    geometry = {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "hidden_size": 16 * kv_heads * group,
        "num_hidden_layers": draw(st.integers(1, 3)),
    }
    base = draw(st.sampled_from(neutral.bases))
    allocator = draw(st.sampled_from([*sorted(ALLOCATORS), *COMPETING]))
    budget = draw(st.one_of(st.just(1), st.integers(1, 9), st.sampled_from([0.3, 0.9])))
    schedule = "prefill" if SCORERS[base]().rereader else draw(st.sampled_from(SCHEDULES))
    options: dict[str, Any] = {"sinks": draw(st.sampled_from([0, 0, 1]))}
    options["recent"] = draw(st.integers(0, 1)) or int(neutral.newest)
    if base in ("snapkv", "cake", "h2o", "scissorhands"):
        options["window"] = draw(st.integers(1, 3))
    if allocator == "preference":
        options["observers"] = draw(st.integers(1, 4))
    if allocator in COMPETING:
        options["floor"] = draw(st.sampled_from([0.0, 0.2])) if neutral.competes else 1.0
    if base.startswith("drawn"):
        options["seed"] = draw(st.integers(0, 9))
    if base == "drawn":
        options["lowered"] = draw(st.sampled_from([None, 0, 1]))
    mine = {name: draw(st.sampled_from(values)) for name, values in neutral.options.items()}
    plain = {"values": False} if base == "expected_attention" else {}  # which wrappers turn off
    policies = [
        ag.policy(f"{name}@{allocator}", budget, schedule, strict=False, **options | own)
        for name, own in ((f"{base}+{neutral.wrapper}", mine), (base, plain))
    ]
    prompts = draw(st.lists(st.integers(4, 17), min_size=1, max_size=2))
    return geometry, policies, prompts, draw(st.sampled_from(["left", "right"])), draw(st.integers(0, 3))


def held(model, policy, prompts, side, seed):
    """What a cache holds after the prompts of a batch and after each later pass; no two tokens of a row are alike."""
    make = torch.Generator().manual_seed(seed)
    rows = [32 + torch.randperm(32, generator=make)[: n + 6] for n in prompts]
    passes = [prompts, *([n] * len(rows) for n in (1, 1, 3, 1))]
    return feed(ag.EvictionCache(model, policy), model, rows, passes, side).held


def test_every_wrapper_has_a_neutral_setting():
    assert {neutral.wrapper for neutral in NEUTRAL.values()} == set(WRAPPERS)


@pytest.mark.parametrize(
    ("base", "allocator", "schedule", "budget", "side"),
    covering(
        base=SIGNED,
        allocator=sorted(ALLOCATORS),
        schedule=SCHEDULES,
        budget=[1, 2, 0.5],
        side=["left", "right"],
    ),
)
def test_criticalkv_of_the_first_stage_alone_is_its_base(tiny_llama, base, allocator, schedule, budget, side):
    """The middle one of three layers has drawn scores so low that it may lose all."""
    model, options = tiny_llama(), {"lowered": 1} if base == "drawn" else {}
    found, wanted = (
        held(model, ag.policy(f"{name}@{allocator}", budget, schedule, **options | mine), [14, 9], side, seed=1)
        for name, mine in ((f"{base}+criticalkv", {"first": 1.0}), (base, {}))
    )
    assert found == wanted
    if (base, allocator) == ("drawn", "global"):
        assert found[0][1] == [[[], []]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_wrapper_keeps_what_its_base_keeps(tiny_llama, tiny_qwen2, name):
    neutral = NEUTRAL[name]

    @given(cases(neutral))
    @FEW
    def holds(case):
        geometry, policies, prompts, side, seed = case
        if neutral.values == "any":
            model = tiny_llama(seed=seed, **geometry)
        elif neutral.values == "equal":
            model = with_equal_values(tiny_qwen2, seed=seed, **geometry)
        else:
            model = with_values_apart(tiny_llama, seed=seed, **geometry)
        if policies[0].by_gates:
            ag.attach(model, gates_for(model, kind="linear"))
        found, wanted = (held(model, policy, prompts, side, seed) for policy in policies)
        assert found == wanted

    holds()
