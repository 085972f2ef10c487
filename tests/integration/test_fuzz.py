"""Anything at all as a policy and as rows of data: it works, or the documented error says why.

Recipes and overrides have theirs in tests/config/test_any_input.py, exports in tests/gates. Seeds are fixed.
"""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ag
from ag.config import Config
from ag.config.data import SftConfig, SplitConfig
from ag.data import DataError, build
from ag.engine.policy import Policy
from ag.errors import UserError

anything = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
any_file = settings(anything, max_examples=20)  # a case reads and writes files


WORDS = """
full streaming_llm h2o tova snapkv scissorhands cake knorm random gates gates: flags flags: vatp caote fastcaote
obcache_value uniform pyramid preference heads pyramidkv + @ : prefill every blocks:16 blocks: 0 -1
"""
words = st.sampled_from(WORDS.split())
specs = st.lists(words | st.text(max_size=3), max_size=6).map("".join)
budgets = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4)
options = st.dictionaries(
    st.sampled_from(["sinks", "recent", "window", "kernel", "beta", "dtype"]) | st.text(max_size=5),
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | specs,
    max_size=3,
)
schedules = st.just("prefill") | specs


@anything
@given(spec=specs, budget=budgets, schedule=schedules, given=options)
def test_any_policy(spec, budget, schedule, given):
    try:
        policy = ag.policy(spec, **{"budget": budget, "schedule": schedule} | given)
    except UserError as error:
        assert str(error)
    else:
        assert isinstance(policy, Policy) and eval(repr(policy), {"ag": ag, "policy": ag.policy}) == policy


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
rows = st.dictionaries(
    st.sampled_from(["passage", "question", "answer", "label", "text"]) | st.text(max_size=4), values, max_size=4
)
lines = st.lists(rows.map(json.dumps) | st.text(max_size=30) | values.map(json.dumps), max_size=4)


@any_file
@given(lines=lines, tail=st.binary(max_size=8), kind=st.sampled_from(["boolq", "words"]))
def test_any_rows_of_a_dataset(lines, tail, kind, tmp_path_factory, tiny_tokenizer):
    root = tmp_path_factory.mktemp("rows")
    for split in ("train", "validation"):
        (root / f"{split}.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + tail)
    config = Config()
    config.data = (SftConfig if kind == "boolq" else SplitConfig)(
        name=kind, root=str(root), batch_size=1, prompt_min=2, prompt_max=8, continuation=1
    )
    try:
        module = build(config.data, config.seed, tiny_tokenizer, 64)
        assert len(next(iter(module.train_dataloader()))["input_ids"]) == 1
    except DataError as error:
        assert str(error)
