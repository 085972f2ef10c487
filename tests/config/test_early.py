"""What needs neither torch nor a model is refused before either is loaded, by every command."""

import json
import shlex
import subprocess
import sys

import pytest

from ag import hardware
from ag.commands.bench import BenchConfig
from ag.commands.compare import CompareConfig
from ag.commands.explain import ExplainConfig
from ag.commands.plan import PlanConfig
from ag.commands.serve import ServeConfig
from ag.config import Config, early
from ag.config.command_line import parse
from ag.config.exports import export_folder, missing_export_error, on_hub
from ag.errors import UserError
from tests.project.test_quiet import HEAVY
from tests.support.refused import names, refuses

TOO_LONG = "name" * 100  # of a file: systems refuse to look for it
#: Commands in a folder with rows/train.jsonl of two rows, lines.jsonl, and nothing in empty/; and what they say.
REFUSED = {
    "generate policy=h2o prompt=x budget=30%": ("budget='30%'", "0.3"),
    "generate policy=h2o prompt=x budget=1.5": ("budget=1.5", "share", "tokens"),
    "generate policy=h2o prompt=x": ("h2o", "needs a budget", "0.25"),
    "generate policy=full prompt=x budget=0.5": ("budget=0.5", "full", "leave it out"),
    "generate policy=h2p prompt=x budget=0.3": ("'h2p'", "did you mean h2o?"),
    "generate policy=mine prompt=x budget=0.3": ("'mine'", "plugins=[MODULE]"),
    "compare policies=[full,h2o@mine] budgets=[0.3]": ("'mine'", "plugins=[MODULE]"),
    "generate policy=gates:GONE prompt=x": ("GONE", "no such folder"),
    f"generate policy=gates:{TOO_LONG} prompt=x": ("no such folder",),
    f"generate policy=full file={TOO_LONG}": ("no such file",),
    "generate policy=h2o prompt=x budget=0.3 options.windw=4": ("'windw'", "did you mean window?"),
    "generate policy=h2o prompt=x budget=0.3 schedule=later": ("schedule='later'", "prefill"),
    "generate policy=full": ("prompt=TEXT", "file=PATH", "messages=FILE.json"),
    "generate policy=full messages=lines.jsonl": ("lines.jsonl", "JSON lines", "expected"),
    "generate policy=full prompt=x protect=end": ("protect=end", "0-40"),
    "generate policy=full prompt=x device=cuda": ("device=cuda", "driver", "device=cpu"),
    "generate policy=full prompt=x device=CPU": ("device=CPU", "expected cpu"),
    "serve policy=h2o": ("h2o", "needs a budget"),
    "serve policy=h2o budget=0": ("budget=0", "at least 1"),
    "serve policy=h2o budget=0.3 options.windw=4": ("'windw'", "did you mean window?"),
    "serve memory=3000GiB": ("memory=3000GiB", "this machine has", "expected less"),
    "serve memory=3e": ("memory=3e", "2GiB"),
    "serve device=cuda:1": ("device=cuda:1", "driver"),
    "compare policies=[full,h2o] budgets=[30%]": ("budget='30%'", "0.3"),
    "compare policies=[full,h2o]": ("h2o", "budgets=[...]", "0.25"),
    "compare policies=[full,h2o+coate] budgets=[0.3]": ("'coate'", "did you mean caote?"),
    "compare policies=[full,h2o] budgets=[0.3] policy_options.h2o.windw=4": ("'windw'", "did you mean window?"),
    "compare policies=[full] device=cuda": ("device=cuda", "driver"),
    "evaluate root=rows policies=[full,h2o]": ("h2o", "budgets=[...]"),
    "evaluate root=rows policies=[h2p] budgets=[0.3]": ("'h2p'", "did you mean h2o?"),
    "evaluate root=rows policies=[h2o] budgets=[1.5]": ("budget=1.5", "share"),
    "evaluate root=rows device=cuda": ("device=cuda", "driver"),
    "explain budget=30%": ("budget='30%'", "0.3"),
    "explain policies=[h2o] budget=null": ("h2o", "needs a budget"),
    "explain policies=[h2p]": ("'h2p'", "did you mean h2o?"),
    "explain device=cuda": ("device=cuda", "driver"),
    "bench decode policy=[h2p]": ("'h2p'", "did you mean h2o?"),
    "bench decode keep=[1.5]": ("keep=1.5", "up to 1"),
    "bench decode device=cuda": ("device=cuda", "driver"),
    "fit recipe=quickstart trainer.accelerator=gpu": ("trainer.accelerator=gpu", "driver", "trainer.accelerator=cpu"),
    "fit data.kind=sft data.root=rows data.val_samples=2": ("data.val_samples=2", "2 rows", "fewer than 2"),
    "fit data.kind=text data.name=./rows data.val_samples=3": ("data.val_samples=3", "2 rows", "fewer than 2"),
    "fit data.kind=sft data.root=rows": ("validation.jsonl", "data.val_samples=N"),
    "fit data.kind=sft data.root=empty data.name=own": ("data.root=empty", "train.jsonl"),
    "fit support.yaml": ("'support.yaml'", "recipe=support.yaml"),
    "fit quickstart": ("'quickstart'", "recipe=quickstart"),
    "fit something": ("'something'", "key=value", "--help"),
    "serve recipe=quickstart": ("'recipe'", "takes no recipe", "--help"),
    "serve support.yaml": ("'support.yaml'", "write config=support.yaml"),
    "serve quickstart": ("'quickstart'", "takes no recipe"),
    "plan data.kind=text data.name=mine data.root=GONE": ("data.root=GONE", "no such folder"),
}


def test_a_missing_file_is_an_error_without_loading_torch():
    words = [sys.executable, "-X", "importtime", "-m", "ag.generate", "policy=h2o", "file=GONE.txt"]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    [said] = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 2 and "file=GONE.txt: no such file" in said
    assert not HEAVY & {line.rpartition("|")[2].strip() for line in lines}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each command of REFUSED says, and the modules that a process has after all of them.

    No library of a driver can be loaded in it, as on a machine without a GPU.
    """
    folder = tmp_path_factory.mktemp("refused")
    for name in ("rows", "empty"):
        (folder / name).mkdir()
    rows = [{"prompt": "a", "response": "b", "text": "a b"}, {"prompt": "c", "response": "d", "text": "c d"}]
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [{"messages": [{"role": "user", "content": text}]} for text in "ab"]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    code = """
import io, json, sys
from contextlib import redirect_stderr
from importlib import import_module
from ag.config import early
early.has_driver = lambda: False
out = {}
for line, (name, *words) in json.load(sys.stdin).items():
    with redirect_stderr(io.StringIO()) as told:
        try:
            code = import_module(f"ag.commands.{name}").main(words)
        except SystemExit as done:
            code = done.code
    out[line] = [code, told.getvalue()]
print(json.dumps([out, [*sys.modules]]))
"""
    words = json.dumps({line: shlex.split(line) for line in REFUSED})
    done = subprocess.run([sys.executable, "-c", code], input=words, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_before_torch_is_loaded(line, said):
    lines, modules = said
    code, told = lines[line]
    assert code == 2 and told.startswith(f"ag.{line.partition(' ')[0]}: error: ") and told.count("\n") == 1
    names(told, *REFUSED[line])
    assert ("did you mean" in told) == any(part.startswith("did you mean") for part in REFUSED[line])
    assert not HEAVY & set(modules)


def test_a_gpu_elsewhere(monkeypatch):
    """The devices of other machines are not asked for here, nor those of a run that is only planned."""
    monkeypatch.setattr(early, "has_driver", lambda: False)
    config = CompareConfig(device="cuda", cluster="auto")
    early.check(config)
    config.cluster = "local"
    with refuses(UserError, "device=cuda", "device=cpu"):
        early.check(config)
    config = PlanConfig()
    config.trainer.accelerator = "gpu"
    early.check(config, elsewhere=True)
    monkeypatch.setattr(early, "has_driver", lambda: True)
    early.check(config)
    early.check(BenchConfig(device="cuda:1"))


def test_memory_is_that_of_the_machine_or_of_its_container(tmp_path, monkeypatch):
    whole = hardware.main_memory()
    limits = tmp_path / "max", tmp_path / "limit", tmp_path / "none"
    monkeypatch.setattr(hardware, "LIMITS", limits)
    limits[0].write_text("max\n")
    assert hardware.main_memory() >= whole
    limits[1].write_text(f"{3 * 2**20}\n")
    assert hardware.main_memory() == 3 * 2**20
    monkeypatch.setattr("ag.commands.serve.main_memory", hardware.main_memory)
    ServeConfig(policy="full", memory="3MiB").check()
    with refuses(UserError, "memory=4 MB", "3.1MB"):
        ServeConfig(policy="full", memory="4 MB").check()
    with refuses(UserError, "memory=4000000", "3,145,728 bytes"):
        ServeConfig(policy="full", memory="4000000").check()


def test_missing_folders_and_exports():
    """Unless machines of a cluster read them, or a checkpoint has the weights."""
    with refuses(UserError, "smollm3", "did you mean smollm2?"):
        early.check(ExplainConfig(gates="smollm3"))
    config = parse(["tasks=[ppl]", "roots.ppl=GONE", "cluster=ray://head:10001"], CompareConfig, "ag.compare").config
    early.check(config)
    config.cluster = "local"
    with refuses(UserError, "roots=GONE", "no such folder"):
        early.check(config)
    with refuses(UserError, "GONE: no such folder"):
        early.check(Config(init="./GONE"))
    early.check(Config(init="./GONE", resume="."))


def test_where_an_export_may_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = on_hub("org/name:v1")
    assert found is not None and (found["repository"], found["revision"]) == ("org/name", "v1")
    (tmp_path / "org").mkdir()
    assert on_hub("org/name:v1") is None  # a misspelt folder, not a download
    assert missing_export_error(export_folder("smollm2")) is None
    assert missing_export_error(export_folder("smollm2/")) is None
    (tmp_path / "smollm2").mkdir()
    assert export_folder("smollm2").resolve() == tmp_path / "smollm2"
    (tmp_path / ".gates.ag-old").mkdir()
    assert ".gates.ag-old" in str(missing_export_error(export_folder("gates")))
