"""Gates trained by replay with the command: costs, steps, export, and two ranks as one."""

import random
from pathlib import Path

import pytest
import torch

import ag
from ag import fit
from ag.callbacks.checkpoint_files import checkpoints
from ag.config import ModelConfig
from ag.gates.export import read_info
from ag.gates.gate import AttentionGates
from ag.model.base import load_base
from ag.training.module import GatedLM
from tests.integration.conftest import write_rows
from tests.integration.test_resuming import equal, interrupted
from tests.support.command import column, logged, resume, runs, same_rows, same_weights, start, train

pytestmark = pytest.mark.slow

RECIPE = """\
train: gates
model: {{name: {model}}}
data:
  kind: text
  name: books
  root: {data}
  packing: responses
  responses: [again, next]
  contexts: [192, 240]
  max_length: 400
  batch_size: 2
  val_batch_size: 1
  val_samples: 3
gate: {{kind: mlp, hidden: 8, covers: all, prefill: sparse, bias: 0.0, sink_tokens: 2, recent_tokens: 8}}
loss: {{objective: kl, replay: true, share_low: 0.1, share_high: 0.6}}
optim: {{gate_lr: 1e-2}}
trainer: {{accelerator: cpu, max_steps: 2}}
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_base: Path) -> Path:
    draw = random.Random(0)
    for split in ("train", "validation"):
        words = [" ".join(draw.choices(["ash", "birch", "elm", "oak"], k=200)) for _ in range(4)]
        write_rows(tmp_path / "data" / "books" / f"{split}.jsonl", [{"text": text} for text in words])
    path = tmp_path / "replay.yaml"
    path.write_text(RECIPE.format(model=tiny_base, data=tmp_path / "data"))
    return path


def test_a_run_with_regression_and_measured_costs(recipe: Path, tiny_base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "contexts"
    warm = ["warmup.regress_steps=1", "warmup.target=reread", "warmup.rows=5", "warmup.rounds=2"]
    run = train(recipe, tmp_path / "runs", *warm, f"loss.contexts={folder}")
    rows = logged(run)
    for step, name in enumerate(("regress", "kl")):
        [value] = [row[f"train/{name}_loss"] for row in rows if row.get(f"train/{name}_loss")]
        assert float(value) > 0, (step, name)
    shares = [float(rows[-1][f"val/kl_at_{share}"]) for share in ("0.5", "0.3", "0.2", "0.1")]
    assert all(value > 0 for value in shares) and list(folder.glob("*.safetensors"))
    biases = torch.cat([x.outer.bias for x in AttentionGates.from_pretrained(run / "export").layers.values()])
    assert float(biases.detach().abs().max()) > 0.03  # two steps at 1e-2 move less
    model = load_base(ModelConfig(name=str(tiny_base)), "cpu")[0]
    cache = ag.EvictionCache(model, f"gates:{run / 'export'}", 0.25)
    with torch.no_grad():
        model(torch.arange(3, 43)[None], past_key_values=cache)
    assert cache.kept_share() == 0.25


def test_the_recipe_trains_another_model_from_nothing(recipe: Path, tiny_base: Path, tmp_path: Path) -> None:
    """Its three stages, one step and a few rows of each."""
    words = [f"model.name={tiny_base}", f"data.root={tmp_path / 'data' / 'books'}", "trainer.accelerator=cpu"]
    words += ["data.contexts=[192,240]", "data.max_length=400", "data.responses=[again,next]", "data.val_samples=1"]
    words += ["warmup.regress_steps=1", "warmup.rows=2", "trainer.max_steps=2", "trainer.accumulate=1"]
    run = train(Path("remember"), tmp_path / "runs", *words, "optim.warmup_steps=0", "trainer.val_every=2")
    assert len(column(run, "train/regress_loss")) == len(column(run, "train/kl_loss")) == 1
    assert read_info(run / "export")["weights"] == "int8"


def test_a_run_stopped_between_regression_and_replay_goes_on_as_if_it_had_not(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are measured once, by the run that goes on."""
    warm = ["warmup.regress_steps=1", "warmup.target=reread", "warmup.rows=5", "warmup.rounds=1"]
    whole = train(recipe, tmp_path / "whole", *warm)
    interrupted(monkeypatch, "training_step", 0, f"recipe={recipe}", f"output={tmp_path / 'cut'}", *warm)
    [run] = runs(tmp_path / "cut")
    assert checkpoints(run)[0].name == "step=000001.ckpt"
    resume(run)
    equal(run, whole)


def test_a_run_that_fails_right_after_its_biases_are_set_does_not_set_them_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = ["warmup.regress_steps=1", "warmup.target=reread", "warmup.rows=5", "warmup.rounds=1"]
    whole = train(recipe, tmp_path / "whole", *warm)

    def fails(self: GatedLM, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step:
            raise torch.OutOfMemoryError("no room for the first backward pass")
        return training_step(self, batch, batch_idx)

    training_step = GatedLM.training_step
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(GatedLM, "training_step", fails)
        fit.main([f"recipe={recipe}", f"output={tmp_path / 'cut'}", *warm])
    [run] = runs(tmp_path / "cut")
    assert checkpoints(run)[0].name == "step=000001.ckpt"
    resume(run)
    equal(run, whole)


def test_two_ranks_are_one_with_twice_the_rows(recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    warm = ["warmup.regress_steps=1", "warmup.target=reread", "warmup.rows=5", "warmup.rounds=2"]
    overrides = ["loss.share_low=0.3", "loss.share_high=0.3", *warm]  # draws of shares depend on the rank
    ranks = ["trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=1"]
    process = start(f"recipe={recipe}", *overrides, *ranks, f"output={tmp_path / 'two'}")
    one = train(recipe, tmp_path / "one", *overrides)
    moved = train(recipe, tmp_path / "moved", *overrides, f"model.name={moved_base}")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    [two] = runs(tmp_path / "two")
    same_rows(*map(logged, (two, one, moved)))
    same_weights(two, one, moved)
