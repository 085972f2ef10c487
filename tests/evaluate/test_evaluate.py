"""`python -m ag.evaluate`: a run on its validation rows, against ``by_hand`` and plain forward passes."""

import json
import math
import shlex
import statistics

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ag import data
from ag.commands.evaluate import translate
from ag.config import Config, DataConfig, ModelConfig
from ag.config.recipes import dump
from ag.errors import UserError
from ag.evaluate.__main__ import EvaluateConfig, main
from ag.evaluate.comparison.cells import list_cells
from ag.gates import export
from tests.support import by_hand
from tests.support.bounds import of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses


@pytest.fixture(autouse=True)
def wide(monkeypatch, no_charts):
    """Tables in the terminal fold no column."""
    monkeypatch.setenv("COLUMNS", "160")


def lora_on(model):
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj", "v_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped.eval()


@pytest.fixture
def run(tiny_folder, tiny_llama, tmp_path):
    """`run(train)`: the folder of a finished run on facts, its configuration, its gates and its model."""

    def make(train):
        config = Config(train=train, model=ModelConfig(name=str(tiny_folder)), seed=5)
        config.data = DataConfig(prompt_min=20, prompt_max=30, val_samples=3, max_length=400)
        folder = tmp_path / train
        folder.mkdir()
        (folder / "config.yaml").write_text(dump(config))
        model = tiny_llama() if train == "gates" else lora_on(tiny_llama())
        gates = None if train == "lora" else gates_for(tiny_llama(), recent_tokens=2)
        adapter = None if train == "gates" else model
        if gates is None:
            export.save_adapter(folder / "export", adapter)
        else:
            export.save(folder / "export", gates, base_model=str(tiny_folder), adapter=adapter)
        return folder, config, gates, model if train == "gates" else model.merge_and_unload()

    return make


def by_hand_figures(model, gates, config, tokenizer):
    """The figures of the full cache (no gates) or of flags, one row at a time."""
    losses, right, kept, seen = [], [], 0, 0
    for group in data.read(config.data, config.seed, tokenizer, 512).validation:
        sums = []
        for row in group:
            tokens, prompt = torch.tensor(row.tokens, dtype=torch.long), row.prompt_length
            if gates is None:
                with torch.no_grad():
                    logits, flags = model(tokens[None]).logits[0], {}
            else:
                logits, flags = by_hand.forward(model, gates, tokens, prompt)
            nats = -logits[prompt - 1 : -1].log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0]
            sums.append(float(nats.sum()))
            if row.answer.choice == row.answer.target:
                losses.append(float(nats.mean()))
        right.append(sums.index(min(sums)) == group[0].answer.target)
        kept += sum(len(head) for layer in flags.values() for head in by_hand.kept(gates, layer, prompt, prompt))
        seen += 3 * 2 * prompt
    figures = {"accuracy": statistics.fmean(right), "kept": pytest.approx(kept / seen if kept else 1)}
    return figures | {"losses": pytest.approx(losses, abs=of_nats(model))}


@pytest.mark.slow
def test_flags_beside_the_full_cache(run, tiny_tokenizer, capsys, monkeypatch):
    folder, config, gates, model = run("gates+lora")
    assert main([f"run={folder}"]) == 0
    out = capsys.readouterr().out
    found = json.loads((folder / "evaluation.json").read_text())
    assert list(found) == ["full cache", "flags"] and "3 held-out responses, left out: 0" in out
    for name, which in (("full cache", None), ("flags", gates)):
        expected = by_hand_figures(model, which, config, tiny_tokenizer)
        assert {key: found[name][key] for key in expected} == expected
    assert 0.2 < found["flags"]["kept"] < 0.95
    losses = [found[name]["losses"] for name in found]
    differences = [mine - theirs for theirs, mine in zip(*losses, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(3)
    full, flags = (next(line for line in out.splitlines() if name in line) for name in ("full cache ", "flags "))
    names(full, f"{statistics.fmean(losses[0]):.4f}", f"{found['full cache']['accuracy']:.1%}", " 0.0%")
    names(flags, f"{statistics.fmean(differences):+.4f} +- {error:.4f}", f"{1 - found['flags']['kept']:.1%}")
    names(flags, f"{statistics.fmean(losses[1]):.4f}", f"{found['flags']['kv_bytes']:,}")
    # a second time nothing is computed
    assert {"results.jsonl", "report.html", "table.md"} <= {path.name for path in (folder / "evaluation").iterdir()}
    monkeypatch.setattr("ag.model.base.load_base", None)
    assert main([f"run={folder}"]) == 0
    names(capsys.readouterr().out, full, flags)
    assert json.loads((folder / "evaluation.json").read_text()) == found


@pytest.mark.slow
def test_budgets_samples_and_another_place(run, tmp_path, capsys):
    """Gates are ranked at a budget, and flags take none."""
    folder, *_ = run("gates")
    output = tmp_path / "mine.json"
    words = [f"run={folder}", "policies=[full,flags,gates]", "budgets=[0.5]", "samples=2", f"output={output}"]
    assert main([*words, "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 and not output.exists()
    assert main(words) == 0
    found = json.loads(output.read_text())
    assert list(found) == ["full cache", "flags", "gates 0.5"]
    assert "2 held-out responses" in capsys.readouterr().out
    assert 0.5 - 0.5 / 20 <= found["gates 0.5"]["kept"] <= 0.5  # half a token less, of 20 or more
    assert (tmp_path / "mine" / "table.md").is_file() and not (folder / "evaluation").exists()
    commands = {json.loads(line)["command"] for line in (tmp_path / "mine" / "results.jsonl").read_text().splitlines()}
    assert [shlex.split(command) for command in commands] == [["python", "-m", "ag.evaluate", *words]]


def test_a_single_sample_has_a_difference_without_an_error(run, capsys):
    folder, *_ = run("gates")
    assert main([f"run={folder}", "samples=1"]) == 0
    out = capsys.readouterr().out
    assert "nan" not in out and "+-" not in out


def test_a_run_is_evaluated_on_its_own_model(run):
    folder, *_ = run("gates")
    with refuses(UserError, "model=smollm2", f"run={folder}", "leave model out"):
        translate(EvaluateConfig(run=str(folder), model="smollm2"))


def test_names_are_those_that_were_given(run):
    folder, *_ = run("gates")
    listed = ["full", "flags", "gates", "mine=gates@heads", "gates+criticalkv"]
    preset = translate(EvaluateConfig(run=str(folder), policies=listed, budgets=[0.5]))
    assert [*preset.names.values()] == ["full cache", "flags", "gates", "mine", "gates+criticalkv"]
    assert [cell.label for cell in list_cells(preset.config)] == [*preset.names]


def test_each_form_of_keys_and_values_has_a_name(tiny_folder, tmp_path):
    rows = "".join(json.dumps({"text": text * 12}) + "\n" for text in ("abc def ", "hello you "))
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    words = [f"model={tiny_folder}", f"root={tmp_path}", "prompt=60", "continuation=8", f"output={tmp_path / 'o.json'}"]
    assert main([*words, "policies=[full,mine=tova]", "budgets=[0.5]", "kv_dtypes=[float,int8]"]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert list(found) == ["full cache", "full cache int8", "mine 0.5", "mine int8 0.5"]
    assert found["full cache int8"]["kv_bytes"] < found["full cache"]["kv_bytes"]


@pytest.mark.parametrize(
    ("train", "budgets", "expected"),
    [
        ("gates", [], ["full cache", "flags"]),
        ("gates", [0.5, 24], ["full cache", "flags", "gates 0.5", "gates 24"]),
        ("lora", [0.5], ["full cache"]),
    ],
)
def test_policies_by_default(run, train, budgets, expected):
    folder, *_ = run(train)
    preset = translate(EvaluateConfig(run=str(folder), budgets=budgets))
    cells = list_cells(preset.config)
    assert [f"{preset.names[cell.label]} {cell.policy.budget or ''}".rstrip() for cell in cells] == expected


def test_plain_documents_without_a_run(tiny_folder, tmp_path, capsys):
    documents = [{"text": text * 12} for text in ("abc def ", "hello you ", "one two ")]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    words = [f"model={tiny_folder}", f"root={tmp_path}", "prompt=60", "continuation=8", f"output={tmp_path / 'o.json'}"]
    assert main([*words, "policies=[full,tova,snapkv]", "budgets=[0.5]"]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert {name: (len(row["losses"]), row["tokens"], row["kept"], row["accuracy"]) for name, row in found.items()} == {
        "full cache": (3, [8] * 3, 1.0, None),
        "tova 0.5": (3, [8] * 3, 0.5, None),
        "snapkv 0.5": (3, [8] * 3, pytest.approx(32 / 60), None),  # its window of 32
    }
    assert "over budget: snapkv 0.5 in 3 of 3 samples" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_policy_that_fails_is_named_and_tried_again(run, capsys, monkeypatch):
    folder, *_ = run("gates")

    def fail(*arguments):
        raise KeyError("x")

    with monkeypatch.context() as patch:
        patch.setattr("ag.evaluate.tasks.responses.Responses.answer", fail)
        assert main([f"run={folder}", "policies=[full]"]) == 2
    assert "ag.evaluate: error: full cache: KeyError: 'x' (" in capsys.readouterr().err
    assert json.loads((folder / "evaluation.json").read_text()) == {}
    assert main([f"run={folder}", "policies=[full]"]) == 0
    assert len(json.loads((folder / "evaluation.json").read_text())["full cache"]["losses"]) == 3


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["policies=[full]"], ("run=RUN", "root=FOLDER")),
        (["run=nowhere"], ("nowhere",)),
        (["root=.", "policies=[]"], ("policies=[]",)),
        (["root=.", "policies=[h2]"], ("'h2'", "h2o?")),
        (["root=.", "policies=[h2o]"], ("'h2o'", "budgets=[...]")),
        (["root=.", "output=here"], ("output=here", "here.json")),
    ],
)
def test_mistakes(words, parts, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    names(error, *parts)
