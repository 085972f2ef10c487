"""Commands and Python that the pages show are run here, reduced, or checked to be what they say."""

import functools
import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
from transformers import LlamaConfig

import ag
from ag import completion, fit, generate, models
from ag.choose import ChooseConfig
from ag.commands.bench import BenchConfig
from ag.commands.doctor import DoctorConfig
from ag.commands.serve import ServeConfig
from ag.compare import CompareConfig
from ag.config import Config
from ag.config.choice import Choice
from ag.config.command_line import parse
from ag.data.__main__ import main as data_command
from ag.evaluate.__main__ import EvaluateConfig
from ag.evaluate.__main__ import main as evaluate
from ag.evaluate.comparison.cells import list_cells
from ag.explain import ExplainConfig
from ag.gates.calibration import Calibration
from ag.generate import GenerateConfig
from ag.plan import PlanConfig
from ag.report import main as report
from ag.vllm.settings import Settings
from ag.wheels import Source
from tests.support import ROOT
from tests.support.gates_for import gates_for

RUNS = {"ag.fit": Config, "ag.plan": PlanConfig}
SCHEMAS = {
    "ag.generate": GenerateConfig,
    "ag.serve": ServeConfig,
    "ag.evaluate": EvaluateConfig,
    "ag.choose": ChooseConfig,
    "ag.explain": ExplainConfig,
    "ag.bench": BenchConfig,
    "ag.doctor": DoctorConfig,
}
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("kernels/*/*.md")})
README = " ".join((ROOT / "README.md").read_text().split())
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
SMALL = [
    "data.val_samples=2",
    "data.prompt_min=60",
    "data.prompt_max=80",
    "data.batch_size=1",
    "data.val_batch_size=2",
    "trainer.max_steps=1",
    "trainer.val_every=0",
    "warmup.regress_steps=1",
    "optim.warmup_steps=0",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
]


def commands(page):
    """The shell commands of a page, comments dropped and variables put in."""
    variables = {}
    for language, block in BLOCK.findall(page.read_text()):
        if language != "sh":
            continue
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            words = [part for word in words for part in (shlex.split(variables[word]) if word in variables else [word])]
            if len(words) == 1 and re.match(r"^[A-Z]+=", words[0]):
                name, _, value = words[0].partition("=")
                variables[f"${name}"] = value
            while words and re.match(r"^[A-Z_]+=", words[0]):  # environment of the command
                words = words[1:]
            if words:
                yield ["python", "-m", f"ag.{words[1]}", *words[2:]] if words[0] == "ag" else words


LOADED = functools.cache(ag.AttentionGates.from_pretrained)  # the shipped gates, or those of `small_export`


@pytest.fixture(scope="module")
def small_export(tmp_path_factory):
    """Gates of one layer, which are read much faster than the shipped ones."""
    gates = ag.AttentionGates(LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2), ag.GateConfig())
    gates.calibration = Calibration((0.05, 0.95), (3.0, -3.0))
    folder = tmp_path_factory.mktemp("gates") / "export"
    gates.save_pretrained(folder)
    return folder


ALL = [
    pytest.param(
        words, id=f"{page.name}: {' '.join(words)[:90]}", marks=[pytest.mark.slow] * (page.parent.name == "results")
    )
    for page in PAGES
    for words in commands(page)
]


@pytest.mark.parametrize("words", ALL)
def test_command_is_one_that_the_tests_cover(words, capsys, monkeypatch, tmp_path, small_export):
    program = words[2] if words[:2] == ["python", "-m"] else words[0]
    if "choice.json" in " ".join(words):
        monkeypatch.chdir(tmp_path)
        chosen = asdict(Choice("smollm2", "gates:smollm2", 0.3))
        (tmp_path / "choice.json").write_text(json.dumps({"choice": chosen}))
    if program in RUNS:
        stop = [] if {"--help", "--recipes"} & set(words) else ["--print"]
        with pytest.raises(SystemExit) as done:
            parse([*words[3:], *stop], RUNS[program], program)
        assert done.value.code == 0
        expected = "recipe: " if stop else {"--help": "loss.alpha=", "--recipes": "quickstart"}[words[3]]
        assert expected in capsys.readouterr().out
    elif program == "ag.compare" and not {"--help", "--recipes"} & set(words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(ag.AttentionGates, "from_pretrained", LOADED)
        for export in re.findall(r"(?:gates:|flags:|adapter=)([A-Z][\w/]*)", " ".join(words)):
            shutil.copytree(small_export, export, dirs_exist_ok=True)
        assert list_cells(parse(words[3:], CompareConfig, program).config)
    elif program == "ag.compare":
        with pytest.raises(SystemExit, match="0"):
            parse(words[3:], CompareConfig, program)
        assert {"--help": "policies=", "--recipes": "compare_small"}[words[3]] in capsys.readouterr().out
    elif program == "ag.report":
        assert report(words[3:]) == 2 and f"folders={words[3]}: it has no results" in capsys.readouterr().err
    elif program in SCHEMAS:
        config = parse(words[3:], SCHEMAS[program], program, "mode" if program == "ag.bench" else "").config
        policies = getattr(config, "policies", None) or getattr(config, "policy", None) or []
        for text in [policies] if isinstance(policies, str) else policies:
            assert ag.engine.PolicySpec.parse(text)
    elif program in ("ag.evaluate.lm_eval", "lm_eval"):
        harness = pytest.importorskip("lm_eval._cli", reason="needs lm_eval: .venv/bin/pip install -e '.[lm_eval]'")
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words[3 if words[0] == "python" else 1 :]])
        told = harness.HarnessCLI().parse_args()
        if words[0] == "lm_eval":
            assert told.model == "local-completions" and "base_url" in told.model_args
            return
        assert told.model == "ag"
        options = {name: value for name, value in told.model_args.items() if name not in ("pretrained", "policy")}
        assert ag.policy(told.model_args["policy"], **options)
    elif program == "ag.data":
        assert data_command([*words[3:-1], str(tmp_path / words[-1])]) == 0
    elif program == "ag.models":
        monkeypatch.setattr(Source, "get", lambda source, accepted=None: tmp_path / source.name)
        assert models.main(words[3:]) == 0
        assert capsys.readouterr().out == f"{tmp_path / words[3]}\n"
    elif program == "curl":
        protocol = pytest.importorskip(
            "ag.serve.protocol", reason="needs the server's libraries: pip install 'ag[serve]'"
        )
        kind = protocol.ChatCompletionRequest if "/chat/" in words[1] else protocol.CompletionRequest
        assert kind.model_validate_json(words[words.index("-d") + 1]).model == "smollm2"
    elif program == "vllm":
        assert Settings.parse(json.loads(words[words.index("--additional-config") + 1]), {}) is not None
    elif program == "docker":
        built = {words[i + 1] for i in range(len(words) - 1) if words[i] == "-f"}
        assert all((ROOT / file).is_file() for file in built)
        assert built or parse(words[words.index("ag") + 1 :], ServeConfig, "ag.serve")
    elif program == "source":
        assert words[1:3] == ["<(ag", "completion"] and completion.main([words[3].rstrip(")")]) == 0
    elif program in ("bash", "python"):
        assert (ROOT / words[1]).is_file()
    else:
        assert program in ("venv", "pip", "git"), f"{words}: no test knows this command"


def test_what_pages_link_and_run_is_there_and_lines_are_short():
    for page in PAGES:
        check_page(page)


def check_page(page):
    text = BLOCK.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    assert [x for x in targets if "://" not in x and not (page.parent / x).exists()] == []
    long = [
        line for line in page.read_text().splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "!["))
    ]
    assert long == []
    scripts = re.findall(r"`(?:\w+=\S+ )*(?:bash|python) ([\w./]+\.(?:sh|py))", text)
    assert [x for x in scripts if not (ROOT / x).is_file()] == []


#: Python of the pages that no other test runs: what is put for its names of folders and sizes.
PYTHON = {
    "policies.md": {},
    "caches.md": {},
    "internals.md": {},
    "exported_format.md": {},
    "gates.md": {"PATH": "EXPORT"},
    "tasks.md": {"[1024, 4096]": "[300]", "8192": "900", "[0, 0.5, 1]": "[1]"},
}
ELSEWHERE = ("deepcopy", "What do you like?", "rewind")  # test_examples, tests/engine: test_every_token, test_rewind


@pytest.mark.parametrize("page", PYTHON)
def test_python_of_a_page_runs(page, tiny_llama, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tiny_llama(max_position_embeddings=1024).eval()
    gates = gates_for(model)
    gates.calibration = Calibration((0.2, 0.4), (1.0, -1.0))
    gates.save_pretrained("EXPORT")
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, "h2o", budget=8, schedule="every")
    names = {"ag": ag, "model": model, "tokenizer": tiny_tokenizer, "gates": gates, "ids": ids, "cache": cache}
    blocks = [block for language, block in BLOCK.findall((ROOT / "docs" / page).read_text()) if language == "python"]
    ran = [block for block in blocks if not any(mark in block for mark in ELSEWHERE)]
    for block in ran:
        for old, new in PYTHON[page].items():
            assert old in block
            block = block.replace(old, new)
        with torch.no_grad():
            exec(compile(block, page, "exec"), names | {"token": ids[:, -1:]})
    assert ran
    if page == "internals.md":
        assert cache.seen_tokens == 220 and [len(head) for head in cache.kept_positions(0)[0]] == [8, 8]
    if page == "tasks.md":
        assert len(capsys.readouterr().out.splitlines()) == 2 * 5  # policies and samples


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_the_quickstart_and_the_python_example(smollm2, tmp_path, monkeypatch, capsys):
    """The commands of the README, which scripts/quickstart.sh runs too, at a reduced size, and its Python block."""
    script = (ROOT / "scripts" / "quickstart.sh").read_text()
    words = {words[2]: words[3:] for words in commands(ROOT / "README.md") if "quickstart" in " ".join(words[3:4])}
    assert words["ag.fit"] == ["recipe=quickstart"] and "-m ag.fit recipe=quickstart " in script
    assert words["ag.evaluate"] == ["run=runs/quickstart/TIME"] and '-m ag.evaluate run="$run"' in script
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert fit.main([*words["ag.fit"], *SMALL]) == 0
    (folder,) = (tmp_path / "runs" / "quickstart").iterdir()
    assert evaluate([f"run={folder}"]) == 0
    assert {"config.yaml", "metrics.csv", "export", "evaluation.json"} <= {path.name for path in folder.iterdir()}
    scores = json.loads((folder / "evaluation.json").read_text())
    assert len(scores["full cache"]["losses"]) == 2
    assert scores["flags"]["kept"] < 1 and scores["flags"]["kv_bytes"] < scores["full cache"]["kv_bytes"]
    assert "2 held-out responses" in capsys.readouterr().out
    prompt = (ROOT / "scripts" / "quickstart.txt").read_text().rstrip()  # as a shell reads it
    asked = [word.replace("runs/quickstart/TIME", str(folder)) for word in words["ag.generate"]]
    assert generate.main([*asked[:-1], f"prompt={prompt}", "max_new_tokens=12", "compare=true"]) == 0
    out = capsys.readouterr().out
    assert out.partition("--- full cache ---\n")[2].startswith(" the weaver has a ticket to Helsinki.")
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    asking, example = (block for language, block in blocks if language == "python")
    assert max(len(asking.strip().splitlines()), len(example.strip().splitlines())) <= 11
    exec(compile(asking, "README.md", "exec"), {})
    (answers,) = (block for language, block in blocks if language == "text")
    assert capsys.readouterr().out == answers
    exec(compile(example, "README.md", "exec"), {})
    *text, kept, size = capsys.readouterr().out.splitlines()
    assert "Once upon a time" in text[0] and f"print {float(kept):.2f} and {float(size):.1f};" in README
