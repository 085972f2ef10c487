"""The scripts in scripts/examples, run one after the other on a tiny model, and the Python of docs/caches.md."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import ag
from tests.support import ROOT

EXAMPLES = ROOT / "scripts" / "examples"


def test_one_context_many_questions(tmp_path, tiny_llama, tiny_tokenizer, monkeypatch, capsys):
    """Each answer is the one that the question gets alone."""
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    Path("CONTEXT.txt").write_text("a river and a hill, " * 8)
    context, expected = tiny_tokenizer("a river and a hill, " * 8, return_tensors="pt").input_ids, []
    for question in ("Who is it about?", "Where does it happen?"):
        cache = ag.EvictionCache(model, "snapkv@heads", budget=0.25)
        with torch.no_grad():
            model(context, past_key_values=cache)
        ids = torch.cat([context, tiny_tokenizer(f"\n{question}\n", return_tensors="pt").input_ids], 1)
        output = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
        expected.append(tiny_tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    assert expected[0] != expected[1]
    page = (ROOT / "docs" / "caches.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "deepcopy" in block]
    exec(compile(code.replace("smollm2", str(tmp_path / "base")), "caches.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.slow
def test_train_generate_and_compare(no_figures, tmp_path, tiny_llama, tiny_tokenizer, monkeypatch, capsys):
    def run(name, *words):
        """Run a script, and return the lines that it prints."""
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    words = "trainer.max_steps=2 warmup.regress_steps=1 optim.warmup_steps=0 data.batch_size=1 data.train_samples=4"
    words += " data.val_samples=2 data.prompt_min=60 data.prompt_max=80 gate.num_heads=1 gate.head_dim=4"
    printed = run("train.py", tmp_path / "runs", f"model.name={tmp_path / 'base'}", *words.split())
    folder = printed[-1].rpartition("gates: ")[2].strip()
    full, gated = run("generate.py", folder, "Once upon a time there was a river.")
    assert full.startswith("full: 100% of the prompt kept") and gated.startswith("gates: ")
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    texts = [json.dumps({"text": f"{name} went up the hill and saw the river. " * 8}) for name in ("Ann", "Ben")]
    (tmp_path / "data" / "corpus" / "validation.jsonl").write_text("\n".join(texts))
    lines = run("compare.py", tmp_path / "base", tmp_path / "data", tmp_path / "compared")
    kept = [f"{policy} {x}: {100 * x:.0f}% kept" for policy in ("h2o", "streaming_llm") for x in (0.5, 0.25)]
    assert [line.split(",")[0] for line in lines] == ["full: 100% kept", *kept]
