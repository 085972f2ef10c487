"""What a run trains it exports, also when it died before; what cannot be exported is refused before the first step."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ag import fit, run
from ag.gates import export
from ag.training.module import GatedLM
from tests.support.bounds import hold, of_logits
from tests.support.command import resume, runs, train, weights
from tests.support.refused import names
from tests.support.shapes import shaped

LORA = ["train=gates+lora", "lora.targets=all-linear", "trainer.max_steps=2", "data.val_samples=2"]


@pytest.fixture
def mixture(tmp_path: Path, tiny_tokenizer) -> Path:
    """Folder of a tiny Mixtral, whose experts are stacked in two parameters of a layer."""
    shaped("mixtral", num_hidden_layers=2).save_pretrained(tmp_path / "mixture")
    tiny_tokenizer.save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


@pytest.mark.slow
@pytest.mark.nightly
def test_adapted_experts_are_exported(
    mixture: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that died between its last step and the export, as such runs once did, is exported by resume=."""
    overrides = [*LORA, f"model.name={mixture}", "export.merge=true", f"output={tmp_path / 'runs'}"]

    def die(*_: object) -> None:
        raise AttributeError("died here")

    with monkeypatch.context() as patch:
        patch.setattr(run, "gather", die)
        with pytest.raises(AttributeError, match="died here"):
            fit.main([f"recipe={recipe}", *overrides])
    [died] = runs(tmp_path / "runs")
    assert not (died / "export").exists()
    trained = weights(died)
    resume(died)
    written = load_file(died / "export" / "adapter" / "adapter_model.safetensors")
    lora = {name.removeprefix("model.").replace(".default", ""): x for name, x in trained.items() if "lora_" in name}
    assert written.keys() == lora.keys() and any("experts" in name for name in written)
    assert all(torch.equal(written[name], x) for name, x in lora.items())

    ids = torch.arange(3, 43)[None]
    base = AutoModelForCausalLM.from_pretrained(mixture).eval()
    merged = AutoModelForCausalLM.from_pretrained(died / "merged").eval()
    with torch.no_grad():
        plain = base(ids).logits
        adapted = export.load_adapter(copy.deepcopy(base), died / "export")(ids).logits
        assert (adapted - plain).abs().max() > 1e-2
        alike = copy.deepcopy(merged)
        alike.set_experts_implementation("eager")  # the other way knows no float64
        hold(merged(ids).logits, adapted, of_logits(alike, *ids))
        resume(died, "trainer.max_steps=4")  # and writes the merged model again
        assert not torch.equal(AutoModelForCausalLM.from_pretrained(died / "merged")(ids).logits, merged(ids).logits)


def test_refused_before_the_first_step(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(recipe, tmp_path / "runs", "trainer.max_steps=2", "data.val_samples=2")
    (done / "export" / "notes.txt").write_text("mine")
    monkeypatch.setattr(GatedLM, "training_step", lambda *_: pytest.fail("a step was made"))
    capsys.readouterr()
    assert fit.main([f"resume={done}", "trainer.max_steps=3"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ag.fit: error: ")]
    names(line, str(done / "export"), "notes.txt")
