"""Anything at all as arguments or as a file: success, or exit code 2 with one line."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ag.config import Config
from ag.config.command_line import Invocation, parse
from tests.support.schemas import KEYS

anything = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(max_size=40) | st.sampled_from(["${seed}", "[", "!!timestamp x", "&a *a", "<<: 1", "0b", "1:30"])
arguments = st.one_of(
    texts,
    st.builds("{}={}".format, st.sampled_from(list(KEYS)) | texts, texts),
    st.sampled_from(["-m", "--dry-run", "--print"]),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
trees = st.dictionaries(
    st.sampled_from([*KEYS, *{name.split(".")[0] for name in KEYS}, *{name.split(".")[-1] for name in KEYS}, "base"])
    | texts,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
    ),
    max_size=4,
)


def outcome(argv, capsys):
    capsys.readouterr()
    try:
        assert isinstance(parse(argv, Config, "ag.fit"), Invocation)
    except SystemExit as stopped:
        assert stopped.code in (0, 2)
        if stopped.code == 2:
            err = capsys.readouterr().err
            assert err.splitlines()[-1].startswith("ag.fit: error: ")
            assert err.count("\n") == len(err.splitlines())


@pytest.mark.slow
@anything
@given(argv=st.lists(arguments, max_size=4), content=texts | st.binary(max_size=60) | trees.map(repr))
def test_any_arguments_and_any_file(argv, content, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("ag.config.command_line.sweep", lambda *_: 0)
    outcome(argv, capsys)
    path = tmp_path / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    outcome([f"recipe={path}"], capsys)
