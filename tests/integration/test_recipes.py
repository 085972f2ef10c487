"""Every recipe of ``ag.fit`` takes a step: on a Llama of three small layers, and on rows that are made up."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from ag import fit
from ag.config import Config
from ag.config.recipes import recipes, resolve
from ag.data import sample_folder
from ag.gates.gate import AttentionGates
from tests.data.test_templates import CASES

#: Other lengths of rows: packed ones take less time, and with a token for each character problems are longer.
LENGTHS = {"packed": "768", "worked": "1024"}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a model, documents, and rows of each task."""
    folder = tmp_path_factory.mktemp("recipes")
    geometry = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    geometry.to_json_file(folder / "tiny.json")
    gates = resolve(Config, {"recipe": "smollm2_remember", "init": "EXPORT"}).gate
    AttentionGates(geometry, gates).save_pretrained(folder / "gates")
    sample_folder.write(folder / "rows")
    for name, (row, _) in CASES.items():
        for split in ("train", "validation"):
            (folder / "rows" / name).mkdir(exist_ok=True)
            (folder / "rows" / name / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 24)
    return folder


@pytest.mark.parametrize("name", recipes("ag.fit"))
def test_a_recipe_takes_a_step(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"init": str(folder / "gates")} if name == "smollm2_remember" else {}
    data = resolve(Config, {"recipe": name} | given).data
    given |= {"model.name": f"random:{folder / 'tiny.json'}", "trainer.accelerator": "cpu", "trainer.devices": "1"}
    given |= {"data.train_samples": "24", "data.val_samples": "4"}
    if (form := getattr(data, "packing", data.kind)) in LENGTHS:
        given["data.max_length"] = LENGTHS[form]
    if data.kind in ("sft", "text"):
        task = folder / "rows" / data.name
        given["data.root"] = str(task if task.is_dir() else folder / "rows" / "corpus")
    assert fit.main([f"recipe={name}", *(f"{key}={value}" for key, value in given.items()), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ready: one training and one validation batch ran")
