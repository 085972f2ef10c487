"""The grammar of policies: what a text means, and what is refused with which reason."""

import warnings
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ag
import ag.gates.export
from ag.engine.allocators import ALLOCATORS
from ag.engine.allocators.base import LayerAllocator
from ag.engine.allocators.heads import Heads
from ag.engine.allocators.pyramid import Pyramid
from ag.engine.allocators.uniform import Uniform
from ag.engine.decide import Decision
from ag.engine.scorers import SCORERS
from ag.engine.scorers.base import Needs, RowScorer, Scorer
from ag.engine.scorers.cake import Cake
from ag.engine.scorers.controls import KNorm, Random
from ag.engine.scorers.expected_attention import ExpectedAttention
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.keydiff import KeyDiff
from ag.engine.scorers.kvzip import KVzip
from ag.engine.scorers.scissorhands import Scissorhands
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.scorers.streaming_llm import StreamingLLM
from ag.engine.scorers.tova import Tova
from ag.engine.spec import ALIASES, FLAGS, PolicySpec, named
from ag.engine.wrappers import WRAPPERS, Wrapper
from ag.engine.wrappers.caote import Caote, FastCaote
from ag.engine.wrappers.criticalkv import CriticalKV
from ag.engine.wrappers.obcache import OBCacheJoint, OBCacheKey, OBCacheValue
from ag.engine.wrappers.vatp import Vatp
from ag.errors import BudgetWarning, UserError
from ag.gates.gate import AttentionGates
from tests.support.attention_by_hand import Scene
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

BASES = {
    "streaming_llm": StreamingLLM(),
    "h2o": H2O(),
    "scissorhands": Scissorhands(),
    "tova": Tova(),
    "snapkv": SnapKV(),
    "cake": Cake(),
    "gates": Gates(),
    "random": Random(),
    "knorm": KNorm(),
    "keydiff": KeyDiff(),
    "kvzip": KVzip(),
    "expected_attention": ExpectedAttention(),
}
COMBINED = {
    "h2o+vatp": Vatp(inner=H2O()),
    "scissorhands+caote": Caote(inner=Scissorhands()),
    "snapkv+fastcaote": FastCaote(inner=SnapKV()),
    "h2o+obcache_value": OBCacheValue(inner=H2O()),
    "snapkv+obcache_key": OBCacheKey(inner=SnapKV()),
    "cake+obcache_joint": OBCacheJoint(inner=Cake()),
    "knorm+caote": Caote(inner=KNorm()),
    "snapkv+criticalkv": CriticalKV(inner=SnapKV()),
    "expected_attention+criticalkv": CriticalKV(inner=ExpectedAttention(values=False)),
    "gates+fastcaote": FastCaote(inner=Gates()),
    "pyramidkv+caote": Caote(inner=SnapKV()),
}


@pytest.mark.parametrize("spec", BASES | COMBINED, ids=str)
def test_a_text_names_its_parts(spec):
    policy = ag.policy(spec, budget=64)
    assert policy.scorer == (BASES | COMBINED)[spec]
    assert str(policy.spec) == spec
    assert policy.by_gates == spec.startswith("gates")
    assert eval(repr(policy)) == policy
    assert set(BASES) == set(SCORERS)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("spec", ["snapkv", "h2o+caote", "gates", "random", "streaming_llm"])
def test_any_scorer_with_any_allocator(spec, allocator):
    policy = ag.policy(f"{spec}@{allocator}", budget=0.5)
    assert policy.allocator == ALLOCATORS[allocator]()
    assert policy.scorer == ag.policy(spec, budget=0.5).scorer
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize(
    ("alias", "same"),
    [
        ("pyramidkv", "snapkv@pyramid"),
        ("pyramidkv+obcache_key", "snapkv+obcache_key@pyramid"),
        ("cake", "cake@preference"),
        ("cake+caote", "cake+caote@preference"),
        ("h2o", "h2o@uniform"),
        ("kvzip", "kvzip@global"),
        ("snapkv+vatp", "snapkv+vatp@uniform"),
    ],
)
def test_aliases(alias, same):
    short, long = ag.policy(alias, budget=64), ag.policy(same, budget=64)
    assert (short.scorer, short.allocator) == (long.scorer, long.allocator)
    assert eval(repr(short)) == short != long  # each keeps its own name


def test_cake_alone_is_its_indicator():
    assert ag.policy("cake@uniform", budget=64).allocator == Uniform()


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        ("full", {}),
        ("gates", {}),
        ("gates", {"budget": 0.5, "recent": 3}),
        ("snapkv+caote@preference", {"budget": 0.25, "window": 16, "tau1": 1.6, "tau2": 0.4}),
        ("h2o+vatp", {"budget": 256, "norm": "inf", "sinks": 4, "window": 16, "recent": 0.25}),
        ("tova", {"budget": 1, "scope": "kv_head", "recent": 0}),
        ("scissorhands", {"budget": 1.0, "count": True}),
        ("cake@heads", {"budget": 99, "gamma": 3.5, "floor": 0.0}),
        ("pyramidkv", {"budget": 99, "beta": 7, "pooling": "avg", "schedule": "blocks:128+every"}),
        ("random", {"budget": 9, "seed": -3, "schedule": "steps:16"}),
        ("h2o", {"budget": 9, "window": None}),
    ],
)
def test_a_repr_makes_the_policy_again(spec, given):
    policy = ag.policy(spec, **given)
    again = eval(repr(policy))
    assert again == policy
    assert (again.scorer, again.allocator) == (policy.scorer, policy.allocator)
    assert repr(again) == repr(policy)


def test_the_text_of_a_repr():
    assert repr(ag.policy("full")) == "ag.policy('full')"
    assert repr(ag.policy("h2o", 64, window=8)) == "ag.policy('h2o', budget=64, window=8)"
    assert repr(ag.policy("h2o", 0.5, "every")) == "ag.policy('h2o', budget=0.5, schedule='every')"


def test_policies_differ_by_everything_that_was_given():
    policies = [
        ag.policy("h2o", budget=64),
        ag.policy("h2o", budget=65),
        ag.policy("h2o", budget=64, window=8),
        ag.policy("h2o", budget=64, schedule="every"),
        ag.policy("tova", budget=64),
        ag.policy("full"),
        ag.policy("gates"),
    ]
    for i, one in enumerate(policies):
        assert [one == other for other in policies] == [i == j for j in range(len(policies))]


# ---- options


def test_options_go_to_the_part_that_has_them():
    policy = ag.policy(
        "snapkv+vatp@pyramid", budget=64, window=8, kernel=5, pooling="avg", norm=2, sinks=3, recent=9, beta=4
    )
    assert policy.scorer == Vatp(norm=2, sinks=3, inner=SnapKV(window=8, kernel=5, pooling="avg", recent=9))
    assert policy.allocator == Pyramid(beta=4)
    policy = ag.policy("h2o+caote@heads", budget=64, sinks=2, recent=0.25, window=5, floor=0.1)
    assert policy.scorer == Caote(inner=H2O(sinks=2, recent=0.25, window=5))
    assert policy.allocator == Heads(floor=0.1)


def test_one_window_observes_for_scores_and_preferences():
    assert ag.policy("cake", budget=64, window=16).allocator.observers == 16
    assert ag.policy("snapkv+caote@preference", budget=64, window=16).allocator.observers == 16
    assert ag.policy("cake", budget=64, window=16, observers=8).allocator.observers == 8
    assert ag.policy("cake", budget=64).allocator.observers == 32
    assert ag.policy("h2o@preference", budget=64, window=16).allocator.observers == 32


@pytest.mark.parametrize(
    ("wrapper", "scope"),
    [("vatp", "layer"), ("caote", "kv_head"), ("fastcaote", "kv_head")]
    + [(f"obcache_{part}", "kv_head") for part in ("value", "key", "joint")],
)
def test_the_scope_of_tova_under_a_wrapper(wrapper, scope):
    assert ag.policy(f"tova+{wrapper}", budget=64).scorer.inner.scope == scope
    assert ag.policy(f"tova+{wrapper}", budget=64, scope="kv_head").scorer.inner.scope == "kv_head"
    if wrapper != "vatp":
        with pytest.raises(UserError, match=f"scope=layer .*{wrapper}"):
            ag.policy(f"tova+{wrapper}", budget=64, scope="layer")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("h2o", {"widnow": 3}, r"Unknown option 'widnow' in 'h2o': expected one of .*group, normalize, .*window\?"),
        ("h2o", {"postions": "slot"}, r"Unknown option 'postions'.*did you mean positions\?"),
        ("snapkv", {"beta": 3}, "Unknown option 'beta' in 'snapkv'"),
        ("snapkv@pyramid", {"tau1": 3}, "Unknown option 'tau1'.*: expected one of beta, budget_of, evict_before_att"),
        ("cake", {"taus": "x"}, r"Unknown option 'taus'.*did you mean tau\?"),
        ("snapkv+caote", {"norm": 2}, "Unknown option 'norm'"),
        ("h2o+vatp", {"inner": 2}, "Unknown option 'inner' in 'h2o\\+vatp': expected one of budget_of, evict_"),
        ("h2o+obcache_key", {"inner": 2}, "Unknown option 'inner'"),
        ("cake", {"kind": "uniform"}, "Unknown option 'kind'"),
        ("full", {"window": 3}, "Unknown option 'window' in 'full': expected one of positions$"),
        ("full", {"strict": False}, "Policy 'full': strict has no meaning, because nothing is evicted; leave it out"),
        ("gates", {"recent": 5}, "recent has no meaning, because without a budget the gates' flags decide"),
        ("gates", {"evict_before_attend": True}, "evict_before_attend has no meaning, because without a budget the"),
    ],
)  # fmt: skip
def test_unknown_options(spec, options, message):
    with pytest.raises(UserError, match=message):
        ag.policy(spec, budget=None if spec in ("full", "gates") else 64, **options)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("snapkv", {"window": 0}, "SnapKV: window=0: expected 1 or more"),
        ("cake", {"window": -1}, "Cake: window=-1: expected 1 or more"),
        ("snapkv", {"kernel": 4}, "SnapKV: kernel=4: expected an odd number"),
        ("snapkv", {"kernel": -1}, "SnapKV: kernel=-1: expected an odd number"),
        ("snapkv", {"pooling": "mean"}, "SnapKV: pooling='mean': expected max or avg"),
        ("cake", {"pooling": "mean"}, "Cake: pooling='mean': expected max or avg"),
        ("snapkv", {"window": "32"}, "SnapKV: window='32': expected int"),
        ("snapkv", {"window": 32.0}, "SnapKV: window=32.0: expected int"),
        ("snapkv", {"window": True}, "SnapKV: window=True: expected int"),
        ("h2o", {"window": 0}, "H2O: window=0: expected 1 or more, or None"),
        ("h2o", {"recent": -1}, "H2O: recent=-1: expected 0 or more"),
        ("h2o", {"recent": 1.5}, "H2O: recent=1.5: expected tokens, or a share up to 1.0"),
        ("h2o", {"recent": "all"}, "H2O: recent='all': expected int or float"),
        ("scissorhands", {"window": 0}, "Scissorhands: window=0: expected 1 or more"),
        ("scissorhands", {"count": 1}, "Scissorhands: count=1: expected bool"),
        ("tova", {"scope": "head"}, "Tova: scope='head': expected layer or kv_head"),
        ("streaming_llm", {"sinks": -1}, "StreamingLLM: sinks=-1: expected 0 or more"),
        ("h2o+vatp", {"norm": 3}, "Vatp: norm=3: expected 1 or 2 or inf"),
        ("h2o+vatp", {"sinks": -1}, "Vatp: sinks=-1: expected 0 or more"),
        ("snapkv@pyramid", {"beta": 0}, "Pyramid: beta=0: expected 1 or more"),
        ("snapkv@preference", {"tau1": 0}, "Preference: tau1=0: expected more than 0"),
        ("snapkv@preference", {"tau2": float("nan")}, "Preference: tau2=nan: expected more than 0"),
        ("snapkv@preference", {"observers": 0}, "Preference: observers=0: expected 1 or more"),
        ("snapkv@heads", {"floor": 1.1}, "Heads: floor=1.1: expected a share from 0 to 1"),
    ],
)
def test_values_out_of_range(spec, options, message):
    with pytest.raises(UserError, match=message):
        ag.policy(spec, budget=64, **options)


def test_a_whole_number_stands_for_a_float():
    assert ag.policy("cake", budget=64, gamma=3).scorer.gamma == 3


# ---- names


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gate", r"Unknown policy 'gate' in 'gate': expected one of full, streaming_llm, .*; did you mean gates\?"),
        ("ful", r"did you mean full\?"),
        ("snapk", r"did you mean snapkv\?"),
        ("pyramidv", r"did you mean pyramidkv\?"),
        ("gates_:x", r"Unknown policy 'gates_'.*did you mean gates\?"),
        ("", "Unknown policy ''"),
        ("h2o+caot", r"Unknown wrapper 'caot' in 'h2o\+caot': expected one of vatp, .*; did you mean caote\?"),
        ("h2o+obcache", r"did you mean obcache_\w+\?"),
        ("h2o@pyramd", r"Unknown allocator 'pyramd' in 'h2o@pyramd': .* uniform, .*; did you mean pyramid\?"),
        ("gates:runs/x@head", r"Unknown allocator 'head' in 'gates:runs/x@head'.*did you mean heads\?"),
        ("gates:runs/x+vapt@heads", r"Unknown wrapper 'vapt'.*did you mean vatp\?"),
        ("pyramidkv@heads", "pyramidkv stands for snapkv@pyramid, allocator included; name the parts instead"),
    ],
)  # fmt: skip
def test_unknown_names(spec, message):
    with pytest.raises(UserError, match=message):
        ag.policy(spec, budget=64)


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("+caote", 1),
        ("@heads", 1),
        (":x", 1),
        ("full:x", 5),
        ("h2o:x", 4),
        ("gates:", 7),
        ("gates:+caote", 7),
        ("gates:@heads", 7),
        ("h2o+", 5),
        ("h2o@", 5),
        ("h2o@+vatp", 5),
        ("h2o++vatp", 5),
        ("h2o+vatp+caote", 9),
        ("h2o@heads+vatp", 10),
        ("h2o@heads@heads", 10),
        ("gates:runs/a+b@", 16),
        ("gates:runs/a@heads+vatp", 19),
        ("gates:runs/a+vatp+caote", 18),
    ],
)
def test_a_sign_out_of_place_is_pointed_at(text, character):
    with pytest.raises(
        UserError, match=rf"at character {character}: expected|at character {character}: \w+ takes no path"
    ):
        ag.policy(text, budget=64)


@pytest.mark.parametrize("spec", ["zzz", "h2o+zzz", "h2o@zzz"])
def test_a_far_name_gets_no_suggestion(spec):
    with pytest.raises(UserError) as caught:
        ag.policy(spec, budget=64)
    assert "did you mean" not in str(caught.value)


# ---- combinations (section 13, point 6)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("full", "nothing is evicted"),
        ("streaming_llm", "its score is the position alone"),
        ("random", "its scores are random"),
        ("knorm", "it has no attention rows to act on"),
        ("gates", "it has no attention rows to act on"),
    ],
)
def test_wrappers_are_refused_with_the_reason(head, reason, wrapper):
    budget = None if head == "full" else 64
    if head in ("knorm", "gates") and wrapper in ("caote", "fastcaote", "criticalkv"):
        assert ag.policy(f"{head}+{wrapper}", budget=budget).scorer == WRAPPERS[wrapper](inner=BASES[head])
    else:
        with pytest.raises(UserError, match=f"{wrapper} .*{head}, .*{reason}"):
            ag.policy(f"{head}+{wrapper}", budget=budget)


@pytest.mark.parametrize(
    ("spec", "schedule", "message"),
    [
        ("full@pyramid", "prefill", "allocator pyramid cannot act on full"),
        ("full", "every", "schedule every cannot act on full"),
    ],
)
def test_full_takes_no_parts(spec, schedule, message):
    with pytest.raises(UserError, match=message):
        ag.policy(spec, schedule=schedule)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("head", ["h2o", "scissorhands", "tova", "snapkv", "cake"])
def test_every_wrapper_acts_on_every_scorer_with_rows(head, wrapper):
    scorer = ag.policy(f"{head}+{wrapper}", budget=64).scorer
    assert type(scorer) is WRAPPERS[wrapper]
    assert type(scorer.inner) is SCORERS[head]


# ---- schedules


@pytest.mark.parametrize(
    ("schedule", "block", "steps"),
    [
        ("prefill", None, None),
        ("blocks:128", 128, None),
        ("every", None, 1),
        ("steps:16", None, 16),
        ("blocks:7+every", 7, 1),
        ("every+blocks:7", 7, 1),
        ("blocks:7+steps:3", 7, 3),
        ("prefill+every", None, 1),
    ],
)
def test_schedules(schedule, block, steps):
    policy = ag.policy("h2o", budget=64, schedule=schedule)
    assert (policy.block, policy.steps) == (block, steps)


@pytest.mark.parametrize(
    "schedule", ["", "never", "blocks", "blocks:0", "blocks:-1", "blocks:1.5", "steps:", "every+", "blocks:8,every"]
)
def test_unknown_schedules(schedule):
    with pytest.raises(UserError, match="schedule=.*prefill, blocks:m, every, steps:n"):
        ag.policy("h2o", budget=64, schedule=schedule)


@pytest.mark.parametrize("schedule", ["every+every", "every+steps:2", "blocks:8+blocks:9", "prefill+blocks:8"])
def test_schedules_that_contradict_themselves(schedule):
    with pytest.raises(UserError, match="schedule=.* one part"):
        ag.policy("h2o", budget=64, schedule=schedule)


# ---- budgets


@pytest.mark.parametrize(
    "budget", [0, -1, -0.5, 0.0, 1.0001, 2.5, 64.0, float("nan"), float("inf"), True, False, "0.25", "abc", [1]]
)
def test_budgets_out_of_range(budget):
    with pytest.raises(UserError, match=r"expected tokens \(an int of at least 1\) or a share \(a float in \(0, 1\]\)"):
        ag.policy("snapkv", budget=budget)


@pytest.mark.parametrize("spec", ["h2o", "random", "snapkv+caote", "pyramidkv", "gates@uniform", "gates+caote"])
def test_a_missing_budget(spec):
    with pytest.raises(UserError, match="budget"):
        ag.policy(spec)


def test_gates_that_evict_while_decoding_need_a_budget():
    with pytest.raises(UserError, match="budget"):
        ag.policy("gates", schedule="every")


def test_full_takes_no_budget():
    with pytest.raises(UserError, match="budget=64 "):
        ag.policy("full", budget=64)


def test_gates_with_and_without_a_budget():
    assert ag.policy("gates").budget is None
    assert ag.policy("gates", budget=0.3).scorer == Gates()


@pytest.mark.parametrize(
    ("text", "changes", "parts"),
    [
        ("flags:x", {"budget": 0.3}, "'flags:x' budget=0.3 gates:x"),
        ("flags", {"budget": 64}, "'flags' budget=64 gates"),
        ("flags:x@heads", {}, "'flags:x@heads' @heads gates:x budget"),
        ("flags:x+caote", {"budget": 0.5}, "'flags:x+caote' budget=0.5 gates:x"),
        ("flags+caote", {}, "'flags+caote' +caote gates budget"),
        ("flags", {"schedule": "blocks:8+every"}, "'flags' schedule=blocks:8+every gates budget"),
        ("flags", {"schedule": "steps:4"}, "'flags' schedule=steps:4 gates budget"),
        ("flags", {"recent": 3}, "'flags' recent"),
        ("flags", {"share": 0.3}, "'flags' share=0.3 flags:PATH gates.at(share=0.3)"),
        ("gates:x", {"budget": 0.5, "share": 0.3}, "'gates:x' budget=0.5 share=0.3 flags:x"),
    ],
)
def test_flags_decide_themselves_how_much_stays(text, changes, parts, monkeypatch):
    monkeypatch.setattr(AttentionGates, "from_pretrained", lambda path: None)
    with refuses(UserError, *parts.split()):
        ag.policy(text, **changes)


def test_budgets_in_tokens_and_as_a_share():
    lengths = torch.tensor([1, 3, 7, 100, 1024])
    assert ag.policy("h2o", budget=64).capacity(lengths).tolist() == [64] * 5
    assert ag.policy("h2o", budget=1).capacity(lengths).tolist() == [1] * 5
    assert ag.policy("h2o", budget=1.0).capacity(lengths).tolist() == lengths.tolist()
    assert ag.policy("h2o", budget=0.25).capacity(lengths).tolist() == [1, 1, 1, 25, 256]


def test_shares_are_exact():
    """floor(share x tokens) as a person works it out: 0.29 of 100 tokens are 29, not 28."""
    lengths = torch.arange(1, 400)
    for percent in range(1, 101):
        wanted = [max(1, int(Fraction(percent, 100) * n)) for n in lengths.tolist()]
        assert ag.policy("h2o", budget=percent / 100).capacity(lengths).tolist() == wanted


def decide(policy, scene):
    return Decision(policy, [0]).decide(scene.seen)[0]


@pytest.mark.parametrize(
    ("spec", "options", "least"),
    [
        ("snapkv", {"window": 8}, 8),
        ("cake", {"window": 8}, 8),
        ("snapkv", {"window": 8, "sinks": 3}, 11),
        ("streaming_llm", {}, 4),
        ("streaming_llm", {"recent": 5}, 9),
        ("scissorhands", {}, 10),
        ("tova", {"recent": 6}, 6),
        ("knorm", {"sinks": 2, "recent": 3}, 5),
        ("tova+vatp", {}, 21),
        ("tova+vatp", {"sinks": 5}, 6),
        ("knorm+caote", {"recent": 4}, 4),
    ],
)
@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "preference", "heads"])
def test_a_budget_smaller_than_what_is_protected(spec, options, least, allocator):
    """What is protected stays, and a warning says so; under strict an error, but only when something has to go."""
    scene, short = Scene(lengths=(30,)), Scene(lengths=(least - 1,))
    small, strict = (
        ag.policy(f"{spec}@{allocator}", budget=least - 1, **options, **insists) for insists in ({}, {"strict": True})
    )
    with pytest.warns(BudgetWarning) as told:
        assert decide(small, scene).sum(-1).tolist() == [[least] * 2]
    names(str(told[0].message), repr(small), f"protects {least} tokens per KV head", "strict=True")
    assert len(told) == 1
    with refuses(UserError, f"{least - 1} tokens per KV head are fewer than the {least}", "strict=True"):
        decide(strict, scene)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in (small, strict):
            assert bool(decide(policy, short).all())
        assert decide(replace(strict, budget=least), scene).sum(-1).tolist() == [[least] * 2]


def test_the_sinks_of_vatp_are_counted_inside_the_budget():
    """20 sinks and C // 2 recent: 40 tokens hold them, 39 hold 20 + 19, and 30 are fewer than 20 + 15."""
    scene = Scene(lengths=(100,))
    for budget in (40, 39):
        keep = decide(ag.policy("h2o+vatp", budget=budget), scene)[0, 0].nonzero().flatten().tolist()
        assert len(keep) == budget
        assert keep[:20] == list(range(20))
        assert keep[-(budget // 2) :] == list(range(100 - budget // 2, 100))
    with refuses(UserError, "30 tokens", "35"):
        decide(ag.policy("h2o+vatp", budget=30, strict=True), scene)
    assert int(decide(ag.policy("h2o+vatp", budget=30, sinks=4), scene)[0, 0].sum()) == 30


def test_a_score_that_is_not_finite_names_layer_and_scorer(monkeypatch):
    monkeypatch.setattr(KNorm, "score", lambda self, seen: torch.full(seen.key_valid.shape, float("nan")))
    with refuses(FloatingPointError, "KNorm.score", "ag.policy('knorm', budget=5)", "layer 3", "finite"):
        Decision(ag.policy("knorm", budget=5), [3]).decide(Scene(lengths=(9,), layer=3).seen)


# ---- gates from a folder


def test_gates_are_read_from_a_folder(tiny_llama, tmp_path):
    gates = gates_for(tiny_llama(), seed=3)
    folder = tmp_path / "run@2" / "a+b"  # neither sign is the grammar's here
    gates.save_pretrained(folder)
    ranked = Gates()  # these gates were trained without sinks and recents
    for spec, scorer, kind, budget in [
        (f"gates:{folder}", ranked, "global", None),
        (f"gates:{folder}", ranked, "global", 0.5),
        (f"gates:{folder}@heads", ranked, "heads", 7),
        (f"gates:{folder}+caote@uniform", Caote(inner=ranked), "uniform", 7),
        (f"gates:{folder}+fastcaote@pyramid", FastCaote(inner=ranked), "pyramid", 7),
        (f"flags:{folder}", ranked, "global", None),
    ]:
        policy = ag.policy(spec, budget=budget)
        assert (policy.scorer, policy.allocator, policy.by_gates) == (scorer, ALLOCATORS[kind](), True)
        assert eval(repr(policy)) == policy
        for name, value in policy.gates.state_dict().items():
            assert torch.equal(value, gates.state_dict()[name])
    assert ag.policy("gates").gates is None


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
    assert str(PolicySpec.parse(str(spec))) == str(spec)


@pytest.mark.parametrize(
    ("text", "label", "same"),
    [
        ("mine=gates:a@heads", "mine", "gates:a@heads"),
        ("g-0.5=h2o+vatp", "g-0.5", "h2o+vatp"),
        ("gates=gates:x=y", "gates", "gates:x=y"),
        ("flags=flags:x", "flags", "flags:x"),
        ("gates:x=y", None, "gates:x=y"),
    ],
)
def test_labels(text, label, same):
    spec = PolicySpec.parse(text)
    assert (spec.label, str(spec), spec) == (label, same, PolicySpec.parse(same))


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["a=h2o", "a=tova"], "'a' h2o tova label"),
        (["h2o", "h2o=h2o+vatp"], "'h2o' h2o+vatp label"),
        (["h2o", "h2o"], "'h2o' LABEL=h2o"),
        (["tova=h2o"], "'tova=h2o' 'tova' label"),
        (["flags=gates:x"], "'flags=gates:x' 'flags' label"),
        (["all=full"], "'all=full' full label"),
        (["full=h2o"], "'full=h2o' label"),
        (["=h2o"], "'=h2o' label"),
        (["a b=h2o"], "'a b=h2o' label"),
        (["a=b=h2o"], "'a=b=h2o' label"),
        (["a=h20"], "'h20' h2o?"),
    ],
)
def test_labels_that_cannot_be(texts, parts):
    with refuses(UserError, *parts.split()):
        named(texts)


def test_names_of_paths_are_short_and_differ():
    texts = ["h2o", "gates:/a/b/c/d", "gates:x/y/c/d@heads", "gates:/a/b/c/d@heads", "gates:/r/s/t", "gates:u/v"]
    names = ["h2o", "gates:…/b/c/d", "gates:x/y/c/d@heads", "gates:…/b/c/d@heads", "gates:…/s/t", "gates:u/v"]
    assert list(named(texts)) == names
    assert [str(spec) for spec in named(texts).values()] == texts


@given(NAMES)
def test_a_path_with_a_slash_behind_it_is_that_path(path):
    assert PolicySpec.parse(f"gates:{path}/") == PolicySpec("gates", path=path)
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
    ("text", "path", "wrapper", "allocator"),
    [
        ("gates:a@v1", "a@v1", None, None),
        ("gates:a+b@heads", "a+b", None, "heads"),
        ("gates:runs/gates+lora/export+caote", "runs/gates+lora/export", "caote", None),
        ("gates:runs@heads/", "runs@heads", None, None),
        ("gates:runs@heads/+vatp", "runs@heads", "vatp", None),
        ("gates:/", "/", None, None),
        ("gates:c:d", "c:d", None, None),
    ],
)
def test_signs_in_paths(text, path, wrapper, allocator):
    assert PolicySpec.parse(text) == PolicySpec("gates", wrapper, allocator, path)


def test_a_scorer_whose_name_begins_with_gates_is_not_gates(monkeypatch, tiny_llama):
    @dataclass(frozen=True, kw_only=True)
    class Mean(KNorm):
        """Keys with a small norm."""

    monkeypatch.setitem(SCORERS, "gates_mean", Mean)
    policy = ag.policy("gates_mean", budget=4)
    assert not policy.by_gates
    assert ag.EvictionCache(tiny_llama(), policy).gates is None
    with pytest.raises(UserError, match="budget"):
        ag.policy("gates_mean")
    with pytest.raises(UserError, match="gates_mean .*path"):
        ag.policy("gates_mean:x", budget=4)


def test_a_folder_without_gates(tmp_path):
    with pytest.raises(ag.gates.export.ExportError, match=str(tmp_path / "nothing")):
        ag.policy(f"gates:{tmp_path / 'nothing'}")


# ---- a scorer of one's own


def test_a_scorer_of_ones_own_is_checked_like_the_others(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Middle(Scorer):
        """Tokens near the middle."""

        pull: float = 1.0

        def score(self, seen):
            return -(seen.key_ranks - self.pull * seen.lengths[:, None, None] / 2).abs()

    monkeypatch.setitem(SCORERS, "middle", Middle)
    policy = ag.policy("middle", budget=4, pull=1, sinks=1)
    assert decide(policy, Scene(lengths=(11,)))[0, 0].nonzero().flatten().tolist() == [0, 4, 5, 6]
    assert eval(repr(policy)) == policy
    assert ag.policy("middle+caote", budget=4).scorer == Caote(inner=Middle())
    with pytest.raises(UserError, match="vatp .*middle, .*rows"):
        ag.policy("middle+vatp", budget=4)
    with pytest.raises(UserError, match="Middle: pull='x': .*float"):
        ag.policy("middle", budget=4, pull="x")


def test_a_wrapper_of_ones_own_says_what_it_accepts(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Picky(Wrapper):
        """Acts on rows of a short window, which it needs precisely."""

        inner: RowScorer

        @classmethod
        def accepts(cls, inner, options, spec):
            super().accepts(inner, options, spec)
            if options.setdefault("window", 4) > 8:
                raise UserError(f"Policy '{spec}': window={options['window']}: {spec.wrapper} takes 8 or less.")

        @cached_property
        def needs(self):
            return replace(self.inner.needs, precise=True)

        def score(self, seen):
            return self.inner.score(seen)

    monkeypatch.setitem(WRAPPERS, "picky", Picky)
    scorer = ag.policy("snapkv+picky", budget=16).scorer
    assert scorer.inner.window == 4
    assert scorer.needs == Needs(rows=True, lookback=3, observers=4, precise=True)
    for spec, options, words in (
        ("snapkv+picky", {"window": 9}, ["window=9", "picky"]),
        ("knorm+picky", {}, ["picky", "knorm", "no attention rows"]),
        ("random+picky", {}, ["picky", "random", "its scores are random"]),
    ):
        with refuses(UserError, *words):
            ag.policy(spec, 16, **options)


def test_an_allocator_of_ones_own_is_one_class_and_one_line(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class First(LayerAllocator):
        """One layer keeps more, the others share what it leaves."""

        extra: int = 2

        def share(self, ballot, place, layers):
            return ballot.capacity + (self.extra if place == 0 else -self.extra // (layers - 1))

    monkeypatch.setitem(ALLOCATORS, "first", First)
    policy = ag.policy("knorm@first", budget=5, extra=4)
    decision, scene = Decision(policy, [1, 2, 4]), Scene(lengths=(12,), queries=3)
    kept = []
    for layer in (1, 2, 4):
        seen = scene.seen
        seen.layer = layer
        kept.append(decision.decide(seen)[layer].sum(-1).tolist())
    assert kept == [[[9, 9]], [[3, 3]], [[3, 3]]]
    assert eval(repr(policy)) == policy
    assert PolicySpec.parse("knorm@first").resolved().allocator == "first"
    with pytest.raises(UserError, match="First: extra='x': .*int"):
        ag.policy("knorm@first", budget=5, extra="x")


def test_published_temperatures_are_looked_up_by_model_and_budget():
    found = ag.policy("cake", budget=1024, tau="mistral-0.3-7b-32k")
    assert (found.allocator.tau1, found.allocator.tau2) == (0.8, 0.5)
    assert repr(found) == "ag.policy('cake', budget=1024, tau='mistral-0.3-7b-32k')"
    assert hash(found) == hash(ag.policy("cake", budget=1024, tau="mistral-0.3-7b-32k"))
    for model, budget in (("mistral-0.3-7b-32k", 512), ("mistral-0.3-7b-32k", 0.25), ("gpt", 128)):
        with pytest.raises(UserError, match="tau"):
            ag.policy("cake", budget=budget, tau=model)
    with pytest.raises(UserError, match="Unknown option 'tau'"):
        ag.policy("h2o", budget=128, tau="gpt")
