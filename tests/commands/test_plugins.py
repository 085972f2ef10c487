"""Extensions: modules of plugins=, and entry points."""

import sys
import textwrap

import pytest
import torch

import ag
from ag import data, plugins
from ag.compare import CompareConfig
from ag.config import Config, DataConfig
from ag.continuation import generate
from ag.engine.allocators import ALLOCATORS
from ag.engine.scorers import SCORERS
from ag.engine.wrappers import WRAPPERS
from ag.errors import UserError
from ag.evaluate.__main__ import EvaluateConfig
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.tasks import TASKS, make
from ag.evaluate.tasks.perplexity import Continuation
from ag.explain import ExplainConfig
from ag.gates.gate import KINDS, gate_kind
from ag.generate import GenerateConfig
from ag.training.objectives import OBJECTIVES, objective
from tests.support.refused import refuses

MODULE = """
from dataclasses import dataclass
from ag.engine.scorer_inputs import Needs
from ag.engine.scorers import SCORERS, Scorer
from ag.engine.scorers.controls import KNorm
from ag.evaluate.tasks.perplexity import Continuation

@dataclass(frozen=True, kw_only=True)
class Oldest(Scorer):
    needs = Needs(key_indices=True)

    def score(self, inputs):
        return -inputs.key_indices.float()

@dataclass(frozen=True, kw_only=True)
class Flat(Scorer):
    needs = Needs(key_indices=True)

    def score(self, inputs):
        return inputs.key_indices.float()[:, 0]

class Mine(Continuation):
    pass
"""
REGISTER = "SCORERS['oldest'] = Oldest\nSCORERS['flat'] = Flat\n"


@pytest.fixture(autouse=True)
def tables():
    """Restore the tables after each test, and search entry points again."""
    known = (SCORERS, WRAPPERS, ALLOCATORS, TASKS, KINDS, data.KINDS, OBJECTIVES)
    before = [dict(table) for table in known]
    plugins.discover.cache_clear()
    yield
    for table, entries in zip(known, before, strict=True):
        table.clear()
        table.update(entries)
    plugins.discover.cache_clear()
    for name in [name for name in sys.modules if name.startswith("my_parts")]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`package(code, **points)`: an installed package my_parts, with entry points by group."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(code, **points):
        (tmp_path / "my_parts").mkdir()
        (tmp_path / "my_parts" / "__init__.py").write_text("")
        (tmp_path / "my_parts" / "parts.py").write_text(textwrap.dedent(code))
        info = tmp_path / "my_parts-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
        lines = [f"[ag.{group}]\n" + "\n".join(entries) for group, entries in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))

    return make


def test_a_named_module_works_in_every_command(package, tiny_llama, tiny_tokenizer, tmp_path):
    package(MODULE + REGISTER)
    named = {"plugins": ["my_parts.parts"]}
    for config in (EvaluateConfig, ExplainConfig, Config, CompareConfig):
        SCORERS.pop("oldest", None)
        sys.modules.pop("my_parts.parts", None)
        config(**named)
        assert "oldest" in SCORERS, config
    cells = list_cells(CompareConfig(**named, policies=["full", "oldest"], budgets=[0.5], root=str(tmp_path)))
    assert [cell.label for cell in cells] == ["full", "oldest"]
    tiny_llama().save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    found = GenerateConfig(
        **named, model=str(tmp_path / "base"), policy="oldest", budget=5, prompt="abcdefghijk", max_new_tokens=2
    )
    [made] = generate(found).values()
    assert made.evicted == pytest.approx(6 / 11)


def test_an_unknown_name_lists_the_known_ones():
    for make_part, parts in (
        (lambda: objective("km"), "loss.objective=km lm kl"),
        (lambda: data.check(DataConfig(kind="sfd")), "data.kind=sfd sft text facts worked"),
        (lambda: gate_kind("qqq"), "gate.kind=qqq attention linear mlp plugins=[MODULE]"),
    ):
        with refuses(UserError, *parts.split()):
            make_part()


def test_a_wrong_shape_names_the_scorer(package, tiny_llama):
    package(MODULE + REGISTER)
    plugins.load(["my_parts.parts"])
    model = tiny_llama()
    with refuses(UserError, "Flat.score", "'flat'", "[1, 12]", "[B, Hkv, N]", "[1, 2, 12]"), torch.no_grad():
        model(torch.arange(12)[None], past_key_values=ag.EvictionCache(model, "flat", 5))


PARTS = """
from ag.engine.allocators import ALLOCATORS
from ag.engine.scorers import SCORERS
from ag.evaluate.tasks import TASKS, Task

class Half:
    pass

class Run(Task):
    def read(self, tokenizer, max_tokens): ...

SCORERS |= {"text": "Fine"}
ALLOCATORS |= {"half": Half}
TASKS |= {"run": (Run, {})}
"""


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("h2o@half", ["Half", "'half'", "ag.engine.allocators.base.Allocator"]),
        ("text", ["'text'", "'Fine'", "ag.engine.scorers.base.Scorer"]),
    ],
)
def test_parts_that_cannot_be_used(package, spec, parts):
    """Refused when the policy is made, before a model is loaded."""
    package(PARTS)
    plugins.load(["my_parts.parts"])
    with refuses(UserError, *parts):
        ag.policy(spec, 5)
    with refuses(UserError, "Run", "'run'", "lacks"):
        make("run")


@pytest.mark.parametrize(
    ("code", "name", "parts"),
    [
        ("", "my_parts.absent", "plugins=[my_parts.absent] no such module"),
        ("import absent_thing", "my_parts.parts", "plugins=[my_parts.parts] ModuleNotFoundError absent_thing"),
        ("1 / 0", "my_parts.parts", "plugins=[my_parts.parts] ZeroDivisionError"),
    ],
)
def test_modules_that_cannot_be_imported(package, code, name, parts):
    package(code)
    with refuses(UserError, *parts.split()):
        CompareConfig(plugins=[name])


def test_entry_points(package, tiny_llama):
    package(
        MODULE,
        scorers=["oldest = my_parts.parts:Oldest"],
        allocators=["same = ag.engine.allocators.uniform:Uniform"],
        wrappers=["again = ag.engine.wrappers.vatp:Vatp"],
        tasks=["mine = my_parts.parts:Mine"],
    )
    model = tiny_llama()
    cache = ag.EvictionCache(model, "oldest", 5)
    with torch.no_grad():
        model(torch.arange(12)[None], past_key_values=cache)
    assert [head.tolist() for head in cache.kept_positions(0)[0]] == [[0, 1, 2, 3, 4]] * 2
    assert repr(ag.policy("h2o+again@same", 5)) == "ag.policy('h2o+again@same', budget=5)"
    task = make("mine", "x")
    assert isinstance(task, Continuation) and type(task).__name__ == "Mine"


@pytest.mark.parametrize(
    ("points", "parts"),
    [
        (["oldest = my_parts.parts:Absent"], "ag.scorers oldest my-parts AttributeError"),
        (["h2o = my_parts.parts:Oldest"], "ag.scorers h2o my-parts another"),
    ],
)
def test_entry_points_that_fail(package, points, parts):
    package(MODULE, scorers=points)
    with refuses(UserError, *parts.split()):
        ag.policy("h2o", 5)
