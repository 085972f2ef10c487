"""The scripts in scripts/examples, run one after the other on a tiny model."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import ag
from ag.engine.scorers import SCORERS
from tests.support import ROOT

EXAMPLES = ROOT / "scripts" / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """``run(name, *words)``: run a script, and return the lines that it prints."""

    def call(name, *words):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 40
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return call


def asked(text, model, tokenizer, question, read="snapkv@heads"):
    """The answer when this question is the only one."""
    context = tokenizer(text, return_tensors="pt").input_ids
    cache = ag.EvictionCache(model, read, budget=0.25)
    with torch.no_grad():
        model(context, past_key_values=cache)
        ids = torch.cat([context, tokenizer(f"\n{question}\n", return_tensors="pt").input_ids], 1)
        output = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_one_context_many_questions(run, tmp_path, tiny_llama, tiny_tokenizer, monkeypatch, capsys):
    """Each answer is that of a question that was asked alone; docs/caches.md has the same code."""
    model = tiny_llama().eval()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    text, questions = "a river and a hill, " * 8, ["Who is it about?", "Where does it happen?"]
    monkeypatch.chdir(tmp_path)
    Path("CONTEXT.txt").write_text(text)
    expected = [asked(text, model, tiny_tokenizer, question) for question in questions]
    assert expected[0] != expected[1]
    found = run("questions.py", tmp_path / "base", "CONTEXT.txt", *questions)
    assert found == [f"25% kept: {answer!r}" for answer in expected]
    page = (ROOT / "docs" / "caches.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "deepcopy" in block]
    exec(compile(code.replace("smollm2", str(tmp_path / "base")), "caches.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.slow
def test_train_generate_compare_and_add_a_scorer(run, no_figures, tmp_path, tiny_llama, tiny_tokenizer, monkeypatch):
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    words = "trainer.max_steps=2 warmup.regress_steps=1 optim.warmup_steps=0 data.batch_size=1 data.train_samples=4"
    words += " data.val_samples=2 data.prompt_min=60 data.prompt_max=80 gate.num_heads=1 gate.head_dim=4"
    printed = run("train.py", tmp_path / "runs", f"model.name={tmp_path / 'base'}", *words.split())
    folder = printed[-1].rpartition("gates: ")[2].strip()
    assert (Path(folder) / "gate_config.json").is_file()
    full, gated = run("generate.py", folder, "Once upon a time there was a river.")
    assert full.startswith("full: 100% of the prompt kept") and gated.startswith("gates: ")
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    texts = [json.dumps({"text": f"{name} went up the hill and saw the river. " * 8}) for name in ("Ann", "Ben")]
    (tmp_path / "data" / "corpus" / "validation.jsonl").write_text("\n".join(texts))
    lines = run("compare.py", tmp_path / "base", tmp_path / "data", tmp_path / "compared")
    kept = [
        f"{policy} {share}: {100 * share:.0f}% kept" for policy in ("h2o", "streaming_llm") for share in (0.5, 0.25)
    ]
    assert [line.split(",")[0] for line in lines] == ["full: 100% kept", *kept]
    monkeypatch.setitem(SCORERS, "value_norm", None)  # gone again afterwards
    lines = run("add_a_scorer.py", tmp_path / "base", "Once upon a time there was a river.")
    assert [line.split()[0] for line in lines] == ["value_norm", "knorm", "tova"]
    assert lines[0].split(maxsplit=1)[1] != lines[1].split(maxsplit=1)[1]
