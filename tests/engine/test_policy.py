"""The grammar of policies: what a text means, and what is refused with which reason."""

import warnings
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ag
import ag.gates.export
from ag.config.policies import ALIASES, FLAGS
from ag.engine.allocators import ALLOCATORS
from ag.engine.allocators.heads import Heads
from ag.engine.allocators.pyramid import Pyramid
from ag.engine.allocators.uniform import Uniform
from ag.engine.decide import Decision
from ag.engine.scorers import SCORERS
from ag.engine.scorers.controls import KNorm
from ag.engine.scorers.gates import Gates
from ag.engine.scorers.h2o import H2O
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.spec import PolicySpec, named
from ag.engine.wrappers import WRAPPERS
from ag.engine.wrappers.caote import Caote, FastCaote
from ag.engine.wrappers.obcache import OBCacheKey
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


@pytest.mark.parametrize("allocator", [None, *ALLOCATORS])
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_text_names_its_parts(scorer, allocator):
    text = scorer if allocator is None else f"{scorer}@{allocator}"
    policy = ag.policy(text, budget=64)
    assert policy.scorer == SCORERS[scorer]()
    assert str(policy.spec) == text
    assert policy.by_gates == (scorer == "gates")
    assert eval(repr(policy)) == policy
    if allocator is not None:
        window = {"observers": 8} if text == "rkv@preference" else {}  # as wide as its own
        assert policy.allocator == ALLOCATORS[allocator](**window)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("scorer", ["full", *SCORERS])
def test_wrappers_act_on_scorers_or_are_refused_with_the_reason(scorer, wrapper):
    if scorer in ALONE or (scorer in WITHOUT_ROWS and wrapper not in ROWLESS):
        with refuses(UserError, wrapper, scorer, ALONE.get(scorer, "no attention rows")):
            ag.policy(f"{scorer}+{wrapper}", budget=None if scorer == "full" else 64)
    else:
        made = ag.policy(f"{scorer}+{wrapper}", budget=64)
        assert (type(made.scorer), type(made.scorer.inner)) == (WRAPPERS[wrapper], SCORERS[scorer])
        assert eval(repr(made)) == made


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


GIVEN = [
    ("full", {}),
    ("gates", {}),
    ("gates", {"budget": 0.5, "recent": 3}),
    ("snapkv+caote@preference", {"budget": 0.25, "window": 16, "tau1": 1.6, "tau2": 0.4}),
    ("h2o+vatp", {"budget": 256, "norm": "inf", "sinks": 4, "window": 16, "recent": 0.25}),
    ("tova", {"budget": 1, "scope": "kv_head", "recent": 0}),
    ("cake@heads", {"budget": 99, "gamma": 3.5, "floor": 0.0}),
    ("cake", {"budget": 1024, "tau": "mistral-0.3-7b-32k"}),
    ("pyramidkv", {"budget": 99, "beta": 7, "pooling": "avg", "schedule": "blocks:128+every"}),
    ("random", {"budget": 9, "seed": -3, "schedule": "steps:16"}),
    ("h2o", {"budget": 9, "window": None}),
    ("h2o", {"budget": 9}),
    ("h2o", {"budget": 10}),
]


def test_a_repr_makes_the_policy_again_and_no_two_are_equal():
    policies = [ag.policy(spec, **given) for spec, given in GIVEN]
    for i, policy in enumerate(policies):
        again = eval(repr(policy))
        assert (again.scorer, again.allocator, repr(again)) == (policy.scorer, policy.allocator, repr(policy))
        assert hash(again) == hash(policy)
        assert [again == other for other in policies] == [i == j for j in range(len(policies))]
    assert repr(policies[0]) == "ag.policy('full')"
    assert repr(ag.policy("h2o", 0.5, "every", window=8)) == "ag.policy('h2o', budget=0.5, schedule='every', window=8)"


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
    made = ag.policy("snapkv+obcache_key", 64, group="pre", obc_window=16, window=8).scorer
    assert made == OBCacheKey(group="pre", obc_window=16, inner=SnapKV(window=8)) and made.needs.lookback == 15
    fast = ag.policy("h2o+fastcaote", 64, greedy=True, pool_stage="final").scorer
    assert fast == FastCaote(inner=H2O(), greedy=True, pool_stage="final")
    assert ag.policy("cake@uniform", budget=64).allocator == Uniform()
    assert ag.policy("cake", budget=64, gamma=3).scorer.gamma == 3  # a whole number stands for a float
    assert ag.policy("expected_attention+caote", 0.5).scorer.inner.values is False  # which the wrapper weighs


def test_one_window_observes_for_scores_and_preferences():
    assert ag.policy("cake", budget=64, window=16).allocator.observers == 16
    assert ag.policy("snapkv+caote@preference", budget=64, window=16).allocator.observers == 16
    assert ag.policy("cake", budget=64, window=16, observers=8).allocator.observers == 8
    assert ag.policy("cake", budget=64).allocator.observers == 32
    assert ag.policy("h2o@preference", budget=64, window=16).allocator.observers == 32


@pytest.mark.parametrize("wrapper", ["vatp", "caote", "fastcaote", "obcache_value", "obcache_key", "obcache_joint"])
def test_the_scope_of_tova_under_a_wrapper(wrapper):
    scope = "layer" if wrapper == "vatp" else "kv_head"
    assert ag.policy(f"tova+{wrapper}", budget=64).scorer.inner.scope == scope
    if wrapper != "vatp":
        with refuses(UserError, "scope=layer", wrapper):
            ag.policy(f"tova+{wrapper}", budget=64, scope="layer")


BUDGET = {"budget": 64}
#: What is given, and what the error names.
REFUSED = [
    # options that a policy has not
    ("h2o", {"widnow": 3} | BUDGET, "'widnow' 'h2o' group, window?"),
    ("h2o", {"postions": "slot"} | BUDGET, "'postions' positions?"),
    ("snapkv", {"beta": 3} | BUDGET, "'beta' 'snapkv'"),
    ("snapkv@pyramid", {"tau1": 3} | BUDGET, "'tau1' beta, kernel,"),
    ("cake", {"taus": "x"} | BUDGET, "'taus' tau?"),
    ("snapkv+caote", {"norm": 2} | BUDGET, "'norm'"),
    ("h2o+vatp", {"inner": 2} | BUDGET, "'inner' 'h2o+vatp'"),
    ("cake", {"kind": "uniform"} | BUDGET, "'kind'"),
    ("h2o", {"tau": "gpt"} | BUDGET, "'tau'"),
    ("full", {"window": 3}, "'window' 'full' positions"),
    ("full", {"strict": False}, "'full' strict"),
    ("gates", {"recent": 5}, "recent flags"),
    # values
    ("snapkv", {"window": 0} | BUDGET, "SnapKV: window=0"),
    ("snapkv", {"kernel": 4} | BUDGET, "SnapKV: kernel=4 odd"),
    ("snapkv", {"kernel": -1} | BUDGET, "SnapKV: kernel=-1 odd"),
    ("cake", {"pooling": "mean"} | BUDGET, "Cake: pooling='mean' max avg"),
    ("snapkv", {"window": "32"} | BUDGET, "SnapKV: window='32' int"),
    ("snapkv", {"window": 32.0} | BUDGET, "SnapKV: window=32.0 int"),
    ("snapkv", {"window": True} | BUDGET, "SnapKV: window=True int"),
    ("h2o", {"window": 0} | BUDGET, "H2O: window=0 None"),
    ("h2o", {"recent": -1} | BUDGET, "H2O: recent=-1"),
    ("h2o", {"recent": 1.5} | BUDGET, "H2O: recent=1.5 share"),
    ("h2o", {"recent": "all"} | BUDGET, "H2O: recent='all' float"),
    ("scissorhands", {"window": 0} | BUDGET, "Scissorhands: window=0"),
    ("scissorhands", {"count": 1} | BUDGET, "Scissorhands: count=1 bool"),
    ("tova", {"scope": "head"} | BUDGET, "Tova: scope='head' layer kv_head"),
    ("tova", {"group": "sum"} | BUDGET, "Tova: group='sum' mean scope=kv_head"),
    ("tova+obcache_key", {"obc_window": 16} | BUDGET, "obc_window=16 Tova"),
    ("streaming_llm", {"sinks": -1} | BUDGET, "StreamingLLM: sinks=-1"),
    ("h2o+vatp", {"norm": 3} | BUDGET, "Vatp: norm=3 inf"),
    ("snapkv@pyramid", {"beta": 0} | BUDGET, "Pyramid: beta=0"),
    ("snapkv@preference", {"tau1": 0} | BUDGET, "Preference: tau1=0"),
    ("snapkv@preference", {"tau2": float("nan")} | BUDGET, "Preference: tau2=nan"),
    ("snapkv@preference", {"observers": 0} | BUDGET, "Preference: observers=0"),
    ("snapkv@heads", {"floor": 1.1} | BUDGET, "Heads: floor=1.1 share"),
    ("knorm@global", {"floor": 1.5} | BUDGET, "Global: floor=1.5 share"),
    ("cake", {"tau": "mistral-0.3-7b-32k", "budget": 0.25}, "tau"),
    ("cake", {"tau": "gpt", "budget": 128}, "tau"),
    ("expected_attention", {"future": 0} | BUDGET, "future=0"),
    ("expected_attention", {"eps": -1.0} | BUDGET, "eps=-1.0"),
    ("expected_attention", {"mixture": True, "covariance": False} | BUDGET, "mixture covariance"),
    ("expected_attention+caote", {"values": True} | BUDGET, "values=True caote"),
    ("kvzip", {"schedule": "every"} | BUDGET, "schedule='every' prefill"),
    ("kvzip", {"schedule": "blocks:8"} | BUDGET, "schedule='blocks:8' prefill"),
    ("kvzip", {"chunk": 0} | BUDGET, "chunk=0"),
    ("kvzip", {"ask": "seven"} | BUDGET, "ask='seven' ids"),
    ("kvzip+criticalkv", {"normalize": True} | BUDGET, "normalize=True criticalkv"),
    ("gates", {"sinks": -1} | BUDGET, "Gates: sinks=-1"),
    ("gates", {"recent_share": 1.5} | BUDGET, "Gates: recent_share=1.5"),
    ("gates", {"recent": 3, "recent_share": 0.5} | BUDGET, "recent_share=0.5 recent=3"),
    # names
    ("gate", BUDGET, "'gate' full, gates?"),
    ("ful", BUDGET, "full?"),
    ("pyramidv", BUDGET, "pyramidkv?"),
    ("gates_:x", BUDGET, "'gates_' gates?"),
    ("", BUDGET, "''"),
    ("h2o+caot", BUDGET, "'caot' 'h2o+caot' vatp, caote?"),
    ("h2o@pyramd", BUDGET, "'pyramd' 'h2o@pyramd' uniform, pyramid?"),
    ("gates:runs/x@head", BUDGET, "'head' 'gates:runs/x@head' heads?"),
    ("gates:runs/x+vapt@heads", BUDGET, "'vapt' vatp?"),
    ("pyramidkv@heads", BUDGET, "pyramidkv snapkv@pyramid"),
    # schedules
    ("full@pyramid", {}, "pyramid full"),
    ("full", {"schedule": "every"}, "every full"),
    *(
        ("h2o", {"schedule": x} | BUDGET, "prefill, blocks:m, every, steps:n")
        for x in ("", "never", "blocks:0", "every+")
    ),
    *(
        ("h2o", {"schedule": x} | BUDGET, "one part")
        for x in ("every+steps:2", "blocks:8+blocks:9", "prefill+blocks:8")
    ),
    # budgets
    *(("snapkv", {"budget": x}, "tokens share") for x in (0, -0.5, 1.0001, 64.0, float("nan"), True, "0.25", [1])),
    *((x, {}, "budget") for x in ("h2o", "random", "snapkv+caote", "pyramidkv", "gates@uniform", "gates+caote")),
    ("gates", {"schedule": "every"}, "budget"),
    ("full", BUDGET, "budget=64"),
    # flags decide themselves how much stays
    ("flags:x", {"budget": 0.3}, "'flags:x' budget=0.3 gates:x"),
    ("flags:x@heads", {}, "'flags:x@heads' @heads gates:x budget"),
    ("flags+caote", {}, "'flags+caote' +caote gates budget"),
    ("flags", {"schedule": "blocks:8+every"}, "'flags' schedule=blocks:8+every gates budget"),
    ("flags", {"recent": 3}, "'flags' recent"),
    ("flags", {"share": 0.3}, "'flags' share=0.3 flags:PATH gates.at(share=0.3)"),
    ("gates:x", {"budget": 0.5, "share": 0.3}, "'gates:x' budget=0.5 share=0.3 flags:x"),
]


@pytest.mark.parametrize(("spec", "given", "parts"), REFUSED, ids=str)
def test_what_is_refused(spec, given, parts, monkeypatch):
    monkeypatch.setattr(AttentionGates, "from_pretrained", lambda path: None)
    with refuses(UserError, *parts.split()):
        ag.policy(spec, **given)


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("+caote", 1),
        (":x", 1),
        ("full:x", 5),
        ("h2o:x", 4),
        ("gates:", 7),
        ("gates:+caote", 7),
        ("h2o+", 5),
        ("h2o@+vatp", 5),
        ("h2o+vatp+caote", 9),
        ("h2o@heads+vatp", 10),
        ("gates:runs/a+b@", 16),
        ("gates:runs/a@heads+vatp", 19),
        ("gates:runs/a+vatp+caote", 18),
    ],
)
def test_a_sign_out_of_place_is_pointed_at(text, character):
    with refuses(UserError, f"at character {character}:"):
        ag.policy(text, budget=64)


@pytest.mark.parametrize(
    ("schedule", "block", "steps"),
    [
        ("prefill", None, None),
        ("blocks:128", 128, None),
        ("steps:16", None, 16),
        ("every+blocks:7", 7, 1),
        ("blocks:7+steps:3", 7, 3),
        ("prefill+every", None, 1),
    ],
)
def test_schedules(schedule, block, steps):
    policy = ag.policy("h2o", budget=64, schedule=schedule)
    assert (policy.block, policy.steps) == (block, steps)


# ---- budgets


def test_budgets_in_tokens_and_as_a_share():
    """floor(share x tokens) as a person works it out: 0.29 of 100 tokens are 29, not 28."""
    lengths = torch.arange(1, 400)
    assert ag.policy("h2o", budget=64).capacity(lengths).tolist() == [64] * 399
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
    """What is protected stays, and a warning says so, but only when something has to go; it may be made an error."""
    scene, short = Scene(lengths=(30,)), Scene(lengths=(least - 1,))
    small = ag.policy(f"{spec}@{allocator}", budget=least - 1, **options)
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


# ---- gates from a folder, texts


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
