"""The scripts in scripts/examples, run one after the other on a tiny model."""

import json
import subprocess
from pathlib import Path

import pytest
from warm import started

ROOT = Path(__file__).resolve().parents[1]
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
