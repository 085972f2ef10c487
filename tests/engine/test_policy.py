"""The grammar of policies: what a text means, and what is refused with which reason."""

import warnings
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ag
from ag.config.policies import ALIASES, FLAGS
from ag.config.spec import PolicySpec, specs_by_name
from ag.engine.allocators import ALLOCATORS
from ag.engine.allocators.heads import Heads
from ag.engine.allocators.pyramid import Pyramid
from ag.engine.evictor import Evictor
from ag.engine.scorers import SCORERS
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.wrappers import WRAPPERS
from ag.engine.wrappers.caote import Caote
from ag.engine.wrappers.vatp import Vatp
from ag.errors import BudgetWarning, UserError
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support.attention_by_hand import Scene
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

ROWLESS = {"caote", "fastcaote", "criticalkv"}  # wrappers that need no attention rows
#: Scorers that some wrappers refuse, and why.
ALONE = {"full": "nothing is evicted", "streaming_llm": "position", "random": "random"}
WITHOUT_ROWS = ("gates", "knorm", "keydiff", "rkv", "kvzip", "expected_attention")


@pytest.mark.parametrize("scorer", ["full", *SCORERS])
def test_a_text_names_its_parts(scorer):
    """Alone, under every allocator and with every wrapper, which is else refused with the reason."""
    budget = None if scorer == "full" else 64
    for allocator in () if scorer == "full" else ALLOCATORS:
        text = f"{scorer}@{allocator}"
        policy = ag.policy(text, budget)
        assert (policy.scorer, str(policy.spec)) == (SCORERS[scorer](), text)
        window = {"observers": 8} if text == "rkv@preference" else {}  # as wide as its own
        assert policy.allocator == ALLOCATORS[allocator](**window)
        assert eval(repr(policy)) == policy
    for wrapper in WRAPPERS:
        if scorer in ALONE or (scorer in WITHOUT_ROWS and wrapper not in ROWLESS):
            with refuses(UserError, wrapper, scorer, ALONE.get(scorer, "no attention rows")):
                ag.policy(f"{scorer}+{wrapper}", budget)
        else:
            made = ag.policy(f"{scorer}+{wrapper}", budget)
            assert (type(made.scorer), type(made.scorer.inner)) == (WRAPPERS[wrapper], SCORERS[scorer])
            assert eval(repr(made)) == made


GIVEN = [
    ("full", {}),
    ("gates", {"budget": 0.5, "recent": 3}),
    ("cake", {"budget": 1024, "tau": "mistral-0.3-7b-32k"}),
    ("pyramidkv", {"budget": 99, "beta": 7, "pooling": "avg", "schedule": "blocks:128+every"}),
    ("h2o", {"budget": 9, "window": None}),
    ("h2o", {"budget": 9}),
    ("kvzip", {"budget": 9}),
]


def test_a_repr_makes_the_policy_again_and_no_two_are_equal():
    policies = [ag.policy(spec, **given) for spec, given in GIVEN]
    for i, policy in enumerate(policies):
        again = eval(repr(policy))
        assert (again.scorer, again.allocator, repr(again)) == (policy.scorer, policy.allocator, repr(policy))
        assert hash(again) == hash(policy)
        assert [again == other for other in policies] == [i == j for j in range(len(policies))]
    assert repr(ag.policy("h2o", 0.5, "every", window=8)) == "ag.policy('h2o', budget=0.5, schedule='every', window=8)"


def test_options_go_to_the_part_that_has_them():
    policy = ag.policy("snapkv+vatp@pyramid", 64, window=8, kernel=5, pooling="avg", sinks=3, recent=9, beta=4)
    assert policy.scorer == Vatp(sinks=3, inner=SnapKV(window=8, kernel=5, pooling="avg", recent=9))
    assert policy.allocator == Pyramid(beta=4)
    policy = ag.policy("h2o+caote@heads", budget=64, sinks=2, recent=0.25, window=5, floor=0.1)
    assert (policy.scorer, policy.allocator) == (Caote(inner=H2O(sinks=2, recent=0.25, window=5)), Heads(floor=0.1))
    assert ag.policy("cake", budget=64, gamma=3).scorer.gamma == 3  # a whole number stands for a float
    assert ag.policy("expected_attention+caote", 0.5).scorer.inner.values is False  # which the wrapper weighs
    for wrapper, scope in (("vatp", "layer"), ("caote", "kv_head"), ("obcache_key", "kv_head")):
        assert ag.policy(f"tova+{wrapper}", budget=64).scorer.inner.scope == scope
    observers = [ag.policy(x, 64, window=16).allocator.observers for x in ("cake", "h2o@preference")]
    assert observers == [16, 32]  # one window for scores and preferences


BUDGET = {"budget": 64}
#: What is given, and what the error names.
REFUSED = [
    ("h2o", {"widnow": 3} | BUDGET, "'widnow' 'h2o' window?"),
    ("h2o", {"compression_ratio": 0.3}, "'h2o' compression_ratio=0.3 budget=0.7"),
    ("h2o", {"compression_ratio": 0.3} | BUDGET, "'h2o' compression_ratio=0.3 budget=0.7"),
    ("full", {"compression_ratio": 0.3}, "'full' compression_ratio=0.3 leave"),
    ("h2o", {"ratio": 0.3}, "'ratio' 'h2o' window"),
    (0.3, {}, "spec=0.3 'h2o'"),
    ("h2o", {"budget": "30%"}, "budget='30%' 0.3"),
    ("gates", {"recent": 5}, "recent flags"),
    ("snapkv", {"kernel": 4} | BUDGET, "SnapKV: kernel=4 odd"),
    ("snapkv", {"window": "32"} | BUDGET, "SnapKV: window='32' int"),
    ("h2o", {"recent": 10**23} | BUDGET, "'h2o' recent=100000000000000000000000 1099511627776"),
    ("tova+caote", {"scope": "layer"} | BUDGET, "scope=layer caote"),
    ("cake", {"tau": "mistral-0.3-7b-32k", "budget": 0.25}, "tau"),
    ("cake", {"tau": "mistral-0.3-7b-32k", "tau2": 0.5, "budget": 1024}, "tau2=0.5 tau=mistral-0.3-7b-32k tau1"),
    ("kvzip", {"schedule": "every"} | BUDGET, "schedule='every' prefill"),
    ("kvzip", {"ask": "seven"} | BUDGET, "ask='seven' ids"),
    ("h2o+caot", BUDGET, "'caot' 'h2o+caot' vatp, caote?"),
    ("gates:runs/x@head", BUDGET, "'head' 'gates:runs/x@head' heads?"),
    ("pyramidkv@heads", BUDGET, "pyramidkv snapkv@pyramid"),
    ("h2o", {"schedule": "blocks:0"} | BUDGET, "prefill, blocks:m, every, steps:n"),
    ("h2o", {"schedule": "every+steps:2"} | BUDGET, "one part"),
    *(("snapkv", {"budget": x}, "tokens share") for x in (1.0001, 64.0, True)),
    *((x, {}, "budget") for x in ("h2o", "gates@uniform")),
    ("full", BUDGET, "budget=64"),
    ("flags:x", {"budget": 0.3}, "'flags:x' budget=0.3 gates:x"),
    ("gates:x", {"budget": 0.5, "share": 0.3}, "'gates:x' budget=0.5 share=0.3 flags:x"),
]


@pytest.mark.parametrize(("spec", "given", "parts"), REFUSED, ids=str)
def test_what_is_refused(spec, given, parts, monkeypatch):
    monkeypatch.setattr(AttentionGates, "from_pretrained", lambda path: None)
    with refuses(UserError, *parts.split()):
        ag.policy(spec, **given)


@pytest.mark.parametrize("text", ["+caote", "h2o:x", "gates:+caote", "h2o@+vatp", "h2o+vatp+caote", "h2o@heads+vatp"])
def test_parts_out_of_order(text):
    with refuses(UserError, repr(text), "expected"):
        ag.policy(text, budget=64)


def test_schedules_and_budgets():
    """floor(share x tokens) as a person works it out: 0.29 of 100 tokens are 29, not 28."""
    for schedule, block, steps in (("prefill", None, None), ("every+blocks:7", 7, 1), ("blocks:7+steps:3", 7, 3)):
        policy = ag.policy("h2o", budget=64, schedule=schedule)
        assert (policy.block, policy.steps) == (block, steps)
    lengths = torch.arange(1, 400)
    assert policy.capacity(lengths).tolist() == [64] * 399
    for percent in range(1, 101):
        wanted = [max(1, int(Fraction(percent, 100) * n)) for n in lengths.tolist()]
        assert ag.policy("h2o", budget=percent / 100).capacity(lengths).tolist() == wanted


def decide(policy, scene):
    return Evictor(policy, [0], [scene.kv_heads]).decide(scene.reader)[0]


@pytest.mark.parametrize(
    ("spec", "options", "least"),
    [("snapkv@pyramid", {"window": 8, "sinks": 3}, 11), ("streaming_llm@heads", {"recent": 5}, 9)],
)
def test_a_budget_smaller_than_what_is_protected(spec, options, least):
    """What is protected stays, and a warning says so, but only when something has to go; it may be made an error."""
    scene, short = Scene(lengths=(30,)), Scene(lengths=(least - 1,))
    small = ag.policy(spec, budget=least - 1, **options)
    with pytest.warns(BudgetWarning) as told:
        assert decide(small, scene).sum(-1).tolist() == [[least] * 2]
    names(str(told[0].message), repr(small), f"protects {least} tokens per KV head")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", ag.BudgetWarning)
        with pytest.raises(BudgetWarning):
            decide(small, scene)
        assert bool(decide(small, short).all())
        assert decide(replace(small, budget=least), scene).sum(-1).tolist() == [[least] * 2]


def test_gates_are_read_from_a_folder(tiny_llama, tmp_path):
    gates = gates_for(tiny_llama(), seed=3)
    folder = tmp_path / "run@2" / "a+b"  # neither sign is the grammar's here
    gates.save_pretrained(folder)
    ranked = Gates()  # these gates were trained without sinks and recents
    for spec, scorer, kind, budget in [
        (f"gates:{folder}", ranked, "global", None),
        (f"gates:{folder}@heads", ranked, "heads", 7),
        (f"gates:{folder}+caote@uniform", Caote(inner=ranked), "uniform", 7),
        (f"flags:{folder}", ranked, "global", None),
    ]:
        policy = ag.policy(spec, budget=budget)
        assert (policy.scorer, policy.allocator, policy.by_gates) == (scorer, ALLOCATORS[kind](), True)
        assert eval(repr(policy)) == policy
        for name, value in policy.gates.state_dict().items():
            assert torch.equal(value, gates.state_dict()[name])
    assert ag.policy("gates").gates is None
    with refuses(ExportError, str(tmp_path / "nothing")):
        ag.policy(f"gates:{tmp_path / 'nothing'}")


def texts(*pieces, least=0):
    return st.lists(st.sampled_from(pieces), min_size=least, max_size=8).map("".join)


NAMES = texts(*"ab/@+:. é", "heads", "head", "vatp", "uniform", "gates", least=1)


@given(
    scorer=st.sampled_from(["full", FLAGS, *SCORERS, *ALIASES]),
    wrapper=st.none() | st.sampled_from([*WRAPPERS]),
    allocator=st.none() | st.sampled_from([*ALLOCATORS]),
    path=st.none() | NAMES,
)
def test_a_spec_is_what_its_text_says(scorer, wrapper, allocator, path):
    reads = scorer in ("gates", "flags")
    spec = PolicySpec(scorer, wrapper, None if scorer in ALIASES else allocator, path if reads else None)
    assert PolicySpec.parse(str(spec)) == spec
    if reads and path:  # a path with a slash behind it is that path
        assert PolicySpec.parse(f"gates:{path}/+vatp@heads") == PolicySpec("gates", "vatp", "heads", path)


@given(texts(*"+@:/x", "h2o", "gates", "vatp", "heads", "pyramidkv", "full"))
def test_any_text_is_a_policy_or_one_clear_error(text):
    try:
        spec = PolicySpec.parse(text)
    except UserError as error:
        assert repr(text) in str(error)
    else:
        assert PolicySpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "label", "same"),
    [
        ("mine=gates:a@heads", "mine", PolicySpec("gates", None, "heads", "a")),
        ("gates=gates:x=y", "gates", PolicySpec("gates", path="x=y")),
        ("gates:x=y", None, PolicySpec("gates", path="x=y")),
        ("gates:a@v1", None, PolicySpec("gates", path="a@v1")),
        ("gates:runs@heads/", None, PolicySpec("gates", path="runs@heads")),
    ],
)
def test_labels_and_signs_in_paths(text, label, same):
    spec = PolicySpec.parse(text)
    assert (spec.label, spec) == (label, same)


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["a=h2o", "a=tova"], "'a' h2o tova label"),
        (["h2o", "h2o"], "'h2o' LABEL=h2o"),
        (["tova=h2o"], "'tova=h2o' 'tova' label"),
        (["a=b=h2o"], "'a=b=h2o' label"),
    ],
)
def test_labels_that_cannot_be(texts, parts):
    with refuses(UserError, *parts.split()):
        specs_by_name(texts)


def test_names_of_paths_are_short_and_differ():
    texts = ["h2o", "gates:/a/b/c/d", "gates:x/y/c/d@heads", "gates:/a/b/c/d@heads", "gates:/r/s/t", "gates:u/v"]
    names = ["h2o", "gates:…/b/c/d", "gates:x/y/c/d@heads", "gates:…/b/c/d@heads", "gates:…/s/t", "gates:u/v"]
    assert list(specs_by_name(texts)) == names
    assert [str(spec) for spec in specs_by_name(texts).values()] == texts
