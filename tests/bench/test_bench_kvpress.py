"""The comparison with kvpress: its table, its turns, our side on a tiny model, and kvpress' side where it is there."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from ag.bench.write import markdown
from ag.errors import UserError
from tests.support import ROOT
from tests.support.bounds import hold, of_nats
from tests.support.refused import names, refuses
from tests.support.warm import started

KVPRESS = Path(os.environ.get("AG_KVPRESS") or ROOT / "build" / "kvpress") / "bin" / "python"
LAYERS, KV_HEADS, HEAD_DIM, FLOAT = 3, 2, 16, 4  # of the tiny model
VOCABULARY = 512
ENTRY = 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT  # bytes of a token's keys and values


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


bench, side = loaded("bench_kvpress"), loaded("kvpress_side")


@pytest.fixture(scope="session")
def base(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """The folder of a tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(vocab_size=VOCABULARY).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def job(method, tokens=None, prompt=160, following=6):
    """Tokens that all differ: in the first layer equal ones have keys of equal norm, and any of them may stay."""
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[: prompt + following].tolist()
    return side.Job(method, tokens, ids[:prompt], ids[prompt:])


def test_both_programs_know_the_same_methods():
    assert tuple(side.OPTIONS) == bench.METHODS
    assert {options.get("window", bench.WINDOW) for options in side.OPTIONS.values()} == {bench.WINDOW}


# ---- the table


def record(contestant, name, place, **measured):
    wide = {"kept": 1.0, "kv_bytes": 100, "all_bytes": 120, "prefill": 1.0, "decode": [9.0] * 3 + [0.5], "nats": [2.0]}
    return {"contestant": contestant, "side": name, "round": place[0], "document": place[1]} | wide | measured


def test_table_of_recorded_measurements():
    """Two documents, two rounds; those of kvpress are stored in another order, and pair by document and round."""
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    full = [record("full", name, place) for name in ("ag", "kvpress") for place in places]
    mine = [
        record(
            "knorm 0.5",
            "ag",
            place,
            prefill=prefill,
            decode=[9.0, 9.0, 9.0, ms / 1000, 3 * ms / 1000],  # the first three are not counted
            kv_bytes=50 + place[1],
            all_bytes=60,
            kept=0.5,
            nats=[1.0, 3.0, 2.0 + 0.75 * place[1]],
        )
        for place, prefill, ms in zip(places, (4.0, 1.0, 2.0, 3.0), (10, 20, 30, 40), strict=True)
    ]
    theirs = [
        record("knorm 0.5", "kvpress", place, prefill=prefill, decode=[0.0] * 3 + [0.02], kept=0.5, nats=[2.5])
        for place, prefill in zip(places, (1.0, 2.0, 4.0, 1.0), strict=True)
    ]
    rows = bench.table(json.loads(json.dumps([*full, *mine, *reversed(theirs)])))
    assert [row["contestant"] for row in rows] == ["full, ag", "full, kvpress", "knorm 0.5, ag", "knorm 0.5, kvpress"]
    assert [rows[0][name] for name in ("prefill over kvpress", "ms/token over kvpress", "nats over full")] == [1, 1, 0]
    ours = rows[2]
    assert ours["prefill s"] == statistics.median([4, 1, 2, 3])
    assert ours["prefill over kvpress"] == statistics.median([4 / 1, 1 / 2, 2 / 4, 3 / 1])
    assert ours["ms/token"] == pytest.approx(statistics.median([20, 40, 60, 80]))
    assert ours["ms/token over kvpress"] == pytest.approx(50 / 20)
    assert (ours["kept"], ours["KV bytes"], ours["all bytes"]) == (0.5, 50, 60)
    assert ours["all bytes over kvpress"] == 60 / 120
    assert ours["nats"] == pytest.approx((2.0 + 2.25) / 2)
    assert ours["nats over full"] == pytest.approx(0.125)
    assert rows[3]["nats over full"] == pytest.approx(0.5)
    text = markdown({"date": "2026-01-01", "command": "c", "machine": {"cpu": "x"}, "rows": rows})
    assert "| knorm 0.5, ag | 50.0% | 2.5 | 1.75 | 50 | 2.5 | 50 | 60 | 0.5 | 2.1250 | 0.1250 |" in text


# ---- what is asked for


def test_contestants_are_the_full_cache_and_each_policy_with_each_share():
    plan = bench.contestants(bench.Config(prompt=400))
    assert [one.name for one in plan] == ["full", *(f"{x} {y}" for y in ("0.5", "0.25") for x in bench.METHODS)]
    assert {one.tokens(400) for one in plan} == {None, 200, 100}
    assert bench.Contestant("knorm", 0.29).tokens(100) == 29  # 0.29 * 100 is a little less


@pytest.mark.parametrize(("keep", "prompt"), [(0.25, 259), (1.0, 400), (0.0, 400), (-0.5, 400)])
def test_share_is_refused(keep, prompt):
    with refuses(UserError, f"keep={keep:g}", f"prompt={prompt}", "64"):
        bench.contestants(bench.Config(keep=[0.5, keep], prompt=prompt))
    assert len(bench.contestants(bench.Config(keep=[0.5, 0.25], prompt=260))) == 11


def test_generated_documents(base):
    config = bench.Config(documents=3, prompt=300, continuation=20)
    found = bench.texts(config, str(base))
    assert [(len(prompt), len(following)) for prompt, following in found] == [(300, 20)] * 3
    assert len({tuple(prompt) for prompt, _ in found}) == 3
    assert bench.texts(config, str(base)) == found


def test_documents_of_a_folder_that_are_long_enough(base, tiny_tokenizer, tmp_path):
    lines = [{"text": letter * length} for letter, length in (("a", 100), ("b", 50), ("c", 90))]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = bench.Config(root=str(tmp_path), documents=2, prompt=80, continuation=10)
    found = bench.texts(config, str(base))
    assert [len(prompt) for prompt, _ in found] == [80, 80]
    assert [tiny_tokenizer.decode(following) for _, following in found] == ["a" * 10, "c" * 10]
    config.documents = 3
    with refuses(UserError, "documents=3", str(tmp_path), "2"):
        bench.texts(config, str(base))
    config.prompt = 600
    with refuses(UserError, "610", "512"):
        bench.texts(config, str(base))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["keeps=[0.5]"], ("keeps", "keep?")),
        (["prompt=64"], ("prompt", "64")),
        (["model=./nowhere"], ("./nowhere",)),
        (["model=nobody/nothing"], ("model=nobody/nothing", "save_pretrained")),
        (["keep=[0.5,2]", "model=./nowhere"], ("keep=2",)),
    ],
    ids=lambda words: words[0],
)
def test_bad_input_is_one_line(words, parts, capsys):
    try:
        code = bench.main([*words, "--dry-run"])
    except SystemExit as leaving:
        code = leaving.code
    (error,) = capsys.readouterr().err.splitlines()
    assert code == 2
    names(error, *parts)


# ---- one side


def test_bytes_are_those_of_whole_storages_and_of_each_once():
    x = torch.zeros(100)
    found = types.SimpleNamespace(
        a=x[:3], b=[{"c": (x.view(10, 10), torch.zeros(5).double())}], d=torch.nn.Linear(9, 9)
    )
    found.found = found
    assert side.storage_bytes(found) == 100 * 4 + 5 * 8
    assert side.storage_bytes((None, "x", 3)) == 0


@pytest.mark.parametrize("tokens", [None, 80, 40])
def test_our_side_measures_what_plain_transformers_give(base, tiny_llama, tokens):
    """The smallest keys of each head, chosen and left in transformers' cache by hand."""
    asked = job("full" if tokens is None else "knorm", tokens)
    found = side.measure(side.Ours(str(base)), asked)
    model, cache = tiny_llama(vocab_size=VOCABULARY), DynamicCache()
    with torch.no_grad():
        logits = model(torch.tensor([asked.prompt]), past_key_values=cache).logits[:, -1:]
        for layer in cache.layers if tokens else []:
            best = layer.keys.norm(dim=-1).topk(tokens, largest=False).indices.sort(-1).values[..., None]
            layer.keys, layer.values = (x.take_along_dim(best, 2) for x in (layer.keys, layer.values))
        for place, token in enumerate(asked.following[:-1], len(asked.prompt)):
            given = {"position_ids": torch.tensor([[place]]), "past_key_values": cache}
            logits = torch.cat([logits, model(torch.tensor([[token]]), **given).logits], 1)
    nats = F.cross_entropy(logits[0], torch.tensor(asked.following), reduction="none")
    hold(torch.tensor(found["nats"]), nats, of_nats(model))
    assert found["kept"] == (tokens or 160) / 160
    exact = ENTRY * (tokens or 160)
    assert (
        exact <= found["kv_bytes"] <= 1.5 * exact and found["kv_bytes"] < found["all_bytes"] < 1.2 * found["kv_bytes"]
    )
    assert len(found["decode"]) == 5 and min(found["decode"]) > 0 < found["prefill"]


@pytest.mark.parametrize("method", bench.METHODS)
def test_our_side_keeps_the_budget_under_every_method(base, method):
    found = side.measure(side.Ours(str(base)), job(method, 80))
    assert found["kept"] == 0.5 and len(found["nats"]) == 6


@pytest.mark.slow
def test_a_failing_side_is_named_with_its_last_words(tmp_path):
    with refuses(UserError, "ag", "nowhere", str(tmp_path / "log")):
        bench.Process("ag", started(), tmp_path / "log", {"model": "./nowhere", "threads": None})


# ---- both sides

STAND_IN = """\
import json, sys

sys.stdin.readline()
print(json.dumps({{"torch": {torch!r}, "transformers": "5.2.0", "kvpress": "0.5.5", "threads": 1}}), flush=True)
for line in sys.stdin:
    with open({log!r}, "a") as log:
        log.write(line)
    found = {{"prefill": 2.0, "decode": [0.1] * 5, "kept": 0.5, "kv_bytes": 7, "all_bytes": 8, "nats": [1.5] * 6}}
    print(json.dumps(found), flush=True)
"""


def stand_in(folder, torch_version):
    """An environment whose Python answers as kvpress' side would, and keeps what it was asked."""
    folder.mkdir()
    (folder / "side.py").write_text(STAND_IN.format(log=str(folder / "asked"), torch=torch_version))
    executable(folder / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "{folder / "side.py"}"\n')
    return folder


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def processes(monkeypatch):
    """The processes that were started, ours from a warm Python."""
    made, popen = [], subprocess.Popen

    def start(*arguments, **options):
        made.append(popen(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(sys, "executable", started())
    monkeypatch.setattr(subprocess, "Popen", start)
    return made


def test_sides_take_turns_over_the_same_tokens(base, tmp_path, monkeypatch, capsys):
    environment = stand_in(tmp_path / "env", version("torch"))
    monkeypatch.setattr(sys, "executable", started())
    words = ["prompt=160", "continuation=6", "keep=[0.5]", "documents=2", "rounds=2", "threads=1", f"model={base}"]
    assert bench.main([*words, f"environment={environment}", f"output={tmp_path / 'out'}"]) == 0
    results = json.loads((tmp_path / "out" / "kvpress.json").read_text())
    assert (tmp_path / "out" / "kvpress.md").read_text() in capsys.readouterr().out
    assert results["machine"]["threads"] == 1 and results["machine"]["kvpress"] == "0.5.5 (transformers 5.2.0)"
    plan = ["full", *(f"{method} 0.5" for method in bench.METHODS)]
    turns = [("ag", "kvpress"), ("kvpress", "ag")] * 2
    assert [(x["contestant"], x["side"], x["round"], x["document"]) for x in results["records"]] == [
        (one, name, turn // 2, turn % 2) for turn, order in enumerate(turns) for one in plan for name in order
    ]
    asked = [json.loads(line) for line in (environment / "asked").read_text().splitlines()]
    methods = ["full", *bench.METHODS]
    assert [x["method"] for x in asked] == methods * 5  # once to warm up
    assert [x["tokens"] for x in asked] == [None, *[65] * 5] + [None, *[80] * 5] * 4
    documents = bench.texts(bench.Config(prompt=160, continuation=6, documents=2), str(base))
    assert [(x["prompt"], x["following"]) for x in asked[6::6]] == documents * 2
    rows = {row["contestant"]: row for row in results["rows"]}
    assert (rows["knorm 0.5, kvpress"]["prefill s"], rows["knorm 0.5, kvpress"]["ms/token"]) == (2, 100)
    assert rows["knorm 0.5, ag"]["kept"] == 0.5 and rows["knorm 0.5, ag"]["nats over full"] != 0


@pytest.mark.parametrize(
    ("torch_version", "parts"), [(None, ("scripts/bench_kvpress.sh",)), ("2.0.1", ("2.0.1", version("torch")))]
)
def test_environment_is_refused(base, tmp_path, processes, torch_version, parts):
    environment = tmp_path / "env" if torch_version is None else stand_in(tmp_path / "env", torch_version)
    config = bench.Config(environment=str(environment), output=str(tmp_path))
    with refuses(UserError, f"environment={environment}", *parts), bench.both(config, str(base)):
        pass
    assert len(processes) == (0 if torch_version is None else 2)
    assert all(process.poll() is not None for process in processes)


def test_no_process_outlives_an_error(base, tmp_path, monkeypatch, processes):
    def fails(device):
        assert [process.poll() for process in processes] == [None, None]
        raise OSError("no /proc here")

    monkeypatch.setattr("ag.bench.measure.machine", fails)
    environment = stand_in(tmp_path / "env", version("torch"))
    words = {"model": str(base), "prompt": 160, "continuation": 6, "documents": 1, "keep": [0.5]}
    with pytest.raises(OSError, match="no /proc"):
        bench.compare(bench.Config(environment=str(environment), output=str(tmp_path), **words), "")
    assert [process.poll() is not None for process in processes] == [True, True]


@pytest.mark.slow
@pytest.mark.skipif(not KVPRESS.is_file(), reason="no environment of kvpress: bash scripts/bench_kvpress.sh makes it")
def test_kvpress_has_the_same_losses_shares_and_bytes(base, tmp_path):
    """Under the same hyper-parameters, and Ada-KV frees nothing."""
    theirs = bench.Process("kvpress", str(KVPRESS), tmp_path / "log", {"model": str(base), "threads": 1})
    try:
        assert theirs.versions["kvpress"] == "0.5.5"
        ours = side.Ours(str(base))
        for method, tokens in [("full", None), *((method, 80) for method in bench.METHODS)]:
            asked = job(method, tokens)
            mine, other = side.measure(ours, asked), theirs.ask(vars(asked))
            assert other["nats"] == pytest.approx(mine["nats"], abs=1e-3), method
            assert mine["kept"] == other["kept"] == (tokens or 160) / 160
            freed = tokens is not None and not method.endswith("@heads")
            assert other["kv_bytes"] == ENTRY * (tokens if freed else 160)
            masked = LAYERS * KV_HEADS * 80 * 3 * 8 if method.endswith("@heads") else 0  # three int64 an entry
            assert other["all_bytes"] == other["kv_bytes"] + masked
    finally:
        theirs.close()


# ---- the shell script, with a stand-in for python that keeps a record

PYTHON = """\
#!/bin/bash
echo "${0#"$PWD/"} $*" >>"$CALLS"
case "$*" in
    *--dry-run) exit "${WRONG:-0}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-c "*) echo 2.13.0+cpu ;;
esac
"""
RUN, PIP = "-m scripts.bench_kvpress", "-m pip install --quiet kvpress==0.5.5 transformers<5.3 torch==2.13.0+cpu"


@pytest.fixture
def shell(tmp_path):
    """``shell(*words, **environment)``: the script's exit code, error, and the calls of python but the question."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "bench_kvpress.sh").write_bytes((ROOT / "scripts" / "bench_kvpress.sh").read_bytes())
    (tmp_path / "scripts" / "setup.sh").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    executable(tmp_path / ".venv" / "bin" / "python", PYTHON)
    calls = tmp_path / "calls"

    def run(*words, **environment):
        calls.write_text("")
        done = subprocess.run(
            ["bash", "scripts/bench_kvpress.sh", *words],
            cwd=tmp_path,
            env=os.environ | {"CALLS": str(calls)} | environment,
            capture_output=True,
            text=True,
        )
        lines = calls.read_text().splitlines()
        return done.returncode, done.stderr, [line for line in lines if " -c " not in line]

    return run


def test_environment_is_made_once(shell, tmp_path):
    mine, words = ".venv/bin/python", "environment=build/kvpress prompt=512"
    dry, go = f"{mine} {RUN} {words} --dry-run", f"{mine} {RUN} {words}"
    made = [f"{mine} -m venv build/kvpress", f"build/kvpress/bin/python {PIP}"]
    assert shell("prompt=512") == (0, "", [dry, *made, go])
    assert shell("prompt=512") == (0, "", [dry, go])
    (tmp_path / "build" / "kvpress" / "installed").write_text("kvpress==0.5.4")
    assert shell("prompt=512") == (0, "", [dry, *made, go])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("elsewhere rounds=2", "environment=elsewhere rounds=2"),
        ("environment=elsewhere rounds=2", "environment=build/kvpress environment=elsewhere rounds=2"),
        ("rounds=2 environment=elsewhere", "environment=build/kvpress rounds=2 environment=elsewhere"),
        ("first environment=then environment=elsewhere", "environment=first environment=then environment=elsewhere"),
    ],
)
def test_environment_lies_where_it_is_told(shell, tmp_path, capsys, words, told):
    code, _, calls = shell(*words.split())
    assert code == 0 and [path.parent.name for path in tmp_path.rglob("installed")] == ["elsewhere"]
    assert calls[1:] == [
        ".venv/bin/python -m venv elsewhere",
        f"elsewhere/bin/python {PIP}",
        f".venv/bin/python {RUN} {told}",
    ]
    with pytest.raises(SystemExit):
        bench.main([*told.split(), "--print"])
    assert "environment: elsewhere\n" in capsys.readouterr().out


def test_a_folder_of_something_else_is_left_alone(shell, tmp_path):
    (tmp_path / "docs").mkdir()
    code, error, calls = shell("docs")
    assert code == 2 and len(calls) == 1 and not list((tmp_path / "docs").iterdir())
    names(error, "docs", "virtual environment")


def test_nothing_is_installed_for_wrong_words_and_for_help(shell, tmp_path):
    assert shell("keeps=1", WRONG="2")[0] == 2
    for word in ("-h", "--help", "--print", "--dry-run"):
        assert shell(word)[2] == [f".venv/bin/python {RUN} environment=build/kvpress {word}"]
    assert not (tmp_path / "build").exists()
