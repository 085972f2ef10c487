"""The scripts in scripts/examples, run one after the other on a tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ag
from tests.support import ROOT
from tests.support.warm import started

EXAMPLES = ROOT / "scripts" / "examples"


def run(name, *words):
    done = subprocess.run(
        [started(), EXAMPLES / name, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_length(path):
    assert len(path.read_text().splitlines()) <= 40


def asked(text, model, tokenizer, question, read="snapkv@heads"):
    """The answer when this question is the only one."""
    context = tokenizer(text, return_tensors="pt").input_ids
    cache = ag.EvictionCache(model, read, budget=0.25)
    with torch.no_grad():
        model(context, past_key_values=cache)
        ids = torch.cat([context, tokenizer(f"\n{question}\n", return_tensors="pt").input_ids], 1)
        output = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("place", ["scripts/examples/questions.py", "docs/caches.md"])
def test_one_context_many_questions(place, tmp_path, tiny_llama, tiny_tokenizer, monkeypatch, capsys):
    """Each answer is that of a question that was asked alone."""
    model = tiny_llama().eval()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    text, questions = "a river and a hill, " * 8, ["Who is it about?", "Where does it happen?"]
    (tmp_path / "CONTEXT.txt").write_text(text)
    code = (ROOT / place).read_text()
    if place.endswith(".md"):
        [code] = [block for block in re.findall(r"```python\n(.*?)```", code, re.DOTALL) if "deepcopy" in block]
        code = code.replace("smollm2", str(tmp_path / "base"))
    assert len(code.strip().splitlines()) <= 21
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["questions.py", str(tmp_path / "base"), "CONTEXT.txt", *questions])
    exec(compile(code, place, "exec"), {"__name__": "__main__"})
    found = capsys.readouterr().out.splitlines()
    expected = [asked(text, model, tiny_tokenizer, question) for question in questions]
    assert expected[0] != expected[1]
    if place.endswith(".py"):
        expected = [f"25% kept: {answer!r}" for answer in expected]
    assert found == expected


@pytest.mark.slow
def test_train_generate_compare_and_add_a_scorer(tmp_path, tiny_llama, tiny_tokenizer):
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    words = "trainer.max_steps=2 warmup.regress_steps=1 optim.warmup_steps=0 data.batch_size=1 data.train_samples=4"
    words += " data.val_samples=2 data.prompt_min=60 data.prompt_max=80 gate.num_heads=1 gate.head_dim=4"
    printed = run("train.py", tmp_path / "runs", f"model.name={tmp_path / 'base'}", *words.split())
    folder = printed.rpartition("gates: ")[2].strip()
    assert (Path(folder) / "gate_config.json").is_file()
    full, gated = run("generate.py", folder, "Once upon a time there was a river.").splitlines()
    assert full.startswith("full: 100% of the prompt kept") and gated.startswith("gates: ")
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    texts = [json.dumps({"text": f"{name} went up the hill and saw the river. " * 8}) for name in ("Ann", "Ben")]
    (tmp_path / "data" / "corpus" / "validation.jsonl").write_text("\n".join(texts))
    lines = run("compare.py", tmp_path / "base", tmp_path / "data", tmp_path / "compared").splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "full: 100% kept",
        "h2o 0.5: 50% kept",
        "h2o 0.25: 25% kept",
        "streaming_llm 0.5: 50% kept",
        "streaming_llm 0.25: 25% kept",
    ]
    lines = run("add_a_scorer.py", tmp_path / "base", "Once upon a time there was a river.").splitlines()
    assert [line.split()[0] for line in lines] == ["value_norm", "knorm", "tova"]
    assert lines[0].split(maxsplit=1)[1] != lines[1].split(maxsplit=1)[1]
