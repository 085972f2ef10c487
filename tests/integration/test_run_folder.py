"""What a run leaves behind: for everything that can be trained, and every loss."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from peft import PeftModel
from safetensors.torch import load_file

import ag
from ag import data
from ag.callbacks import Figures
from ag.config import Config
from ag.config.recipes import load_config, resolve
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.base import load_base
from ag.run import LAUNCH_VARIABLES
from tests.support.bounds import hold, of_nats
from tests.support.command import EPS, column, free_port, logged, train, weights

STEPS = 4
DRAWING = {when: vars(Figures)[when] for when in ("on_validation_end", "on_train_end")}
BETA = 0.4
GATE = 4 * 32 * 16 - 32 * 16 + 16 * 2  # q, k, v of 2 heads of 8 on hidden states of 32, and a logit for 2 KV heads
LORA = 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16))  # rank 8 on q, k, v, o of 2 layers


@dataclass
class Case:
    """Overrides of a run, and what they make of it; whether its pictures are drawn too."""

    overrides: list[str]
    gates: int = 2 * GATE
    lora: int = 0
    objective: str = "lm_loss"
    choices: bool = True
    extra: set[str] = field(default_factory=set)
    drawn: bool = False


TEXT = ["data.kind=text", "data.name=words"]
PACKED = [*TEXT, "data.packing=packed", "data.max_length=64", "gate.scope=causal"]
SPLIT = [*TEXT, "data.prompt_min=48", "data.prompt_max=64", "data.continuation=16", "data.max_length=80"]
CASES = {
    "lora": Case(["train=lora"], gates=0, lora=LORA),
    "kl": Case(["train=gates+lora", "loss.objective=kl", "data.question=after"], lora=LORA, objective="kl_loss"),
    "warm start": Case(
        ["train=gates+lora", "warmup.regress_steps=2", "gate.estimator=soft", "loss.mean=hard"],
        lora=LORA,
        extra={"train/regress_loss"},
    ),
    "dense prefill, query heads": Case(
        ["gate.prefill=dense", "gate.sink_tokens=2", "gate.recent_tokens=4", "gate.granularity=query_head"],
        gates=2 * (GATE + 16 * 2),
    ),
    "split text, later layers": Case(
        [*SPLIT, "gate.layer_offset=1", "gate.first_layer=1", "gate.shortcut=true"],
        gates=GATE + 32 * 2,
        choices=False,
        drawn=True,
    ),
    "documents of packed text": Case([*PACKED, "data.cross_documents=false"], choices=False),
    "regress": Case(["loss.objective=regress"], objective="regress_loss"),
    "linear": Case(["gate.kind=linear"], gates=2 * 32 * 2),
    "bf16": Case(["train=gates+lora", "trainer.precision=bf16-mixed"], lora=LORA),
}
NIGHTLY = ("documents of packed text", "regress", "linear", "bf16")


def columns(case: Case) -> set[str]:
    """The promised columns of metrics.csv."""
    names = {"step", "epoch", "train/loss", f"train/{case.objective}", "train/tokens_per_second"}
    names |= {"val/loss", "val/lm_loss", "val/perplexity"} | case.extra
    if case.objective == "kl_loss":
        names.add("val/kl_loss")
    if case.choices:
        names |= {"val/accuracy", "val/accuracy_norm"}
    if case.gates:
        gates = ("gate_mean_soft", "gate_mean_hard", "evicted")
        names |= {f"{stage}/{name}" for stage in ("train", "val") for name in gates}
        names |= {"lr-AdamW/gates", "train/grad_norm_gates"}
        if case.objective != "regress_loss":
            names.add("train/eviction_loss")
    if case.lora:
        names |= {"lr-AdamW/lora", "train/grad_norm_lora"}
    return names


def validation_rows(config: Config) -> list[data.module.Row]:
    _, tokenizer = load_base(config.model)
    return [row for group in data.read(config.data, config.seed, tokenizer, 512).validation for row in group]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their pictures."""
    for when, draw in DRAWING.items():
        monkeypatch.setattr(Figures, when, draw, raising=False)


MARKS = {name: [pytest.mark.slow, *([pytest.mark.nightly] if name in NIGHTLY else [])] for name in CASES}


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=MARKS[name]) for name, case in CASES.items()])
def test_run_folder(case: Case, recipe: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if case.drawn:
        request.getfixturevalue("drawn")
    overrides = [*case.overrides, f"trainer.max_steps={STEPS}", "trainer.val_every=2"]
    run = train(recipe, tmp_path, *overrides)

    given = dict(word.split("=") for word in overrides)
    config = resolve(Config, {"recipe": str(recipe), "output": str(tmp_path)} | given)
    assert load_config(run / "config.yaml", Config) == config

    rows = logged(run)
    assert (run / "metrics.csv").read_text().split("\n")[0].split(",")[0] == "step"
    assert {name for row in rows for name in row} == columns(case) - {"train/tokens_per_second"}
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for row in rows:
        check_sums(row, config)

    state = weights(run)
    gates = {name: tensor for name, tensor in state.items() if name.startswith("gates.")}
    lora = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    assert state.keys() == gates.keys() | lora.keys()
    assert sum(tensor.numel() for tensor in gates.values()) == case.gates
    assert sum(tensor.numel() for tensor in lora.values()) == case.lora
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["best.ckpt", "step=000002.ckpt", "step=000004.ckpt"]

    if case.drawn:
        check_figures(run / "figures", case)
    check_export(run, config, gates, lora)


def check_figures(folder: Path, case: Case) -> None:
    found = sorted(path.name for path in folder.iterdir())
    pictures = ["evicted", "keep-0", "keep-1"] if case.gates else []  # a batch has two questions or two texts
    expected = [f"{name}-{step:06d}.png" for name in pictures for step in (2, STEPS)]
    assert found == sorted([*expected, f"curves-{STEPS:06d}.png"])
    assert all(imread(folder / name).std() > 0 for name in found)


def check_sums(row: dict[str, float], config: Config) -> None:
    """Each loss is what the formulas make of its parts."""
    gated, gate_mean = config.train != "lora", f"gate_mean_{config.loss.mean}"
    if "train/eviction_loss" in row:
        hold(row["train/eviction_loss"], abs(row[f"train/{gate_mean}"] - BETA), 2 * EPS)
    parts = [row.get(f"train/{name}", 0.0) for name in ("lm_loss", "kl_loss", "regress_loss", "eviction_loss")]
    hold(row["train/loss"], sum(parts), 4 * EPS * sum(parts))
    if "val/loss" in row:
        eviction = abs(row[f"val/{gate_mean}"] - BETA) if gated else 0.0
        wanted = row.get("val/kl_loss", row["val/lm_loss"]) + eviction
        hold(row["val/loss"], wanted, 4 * EPS * wanted)
        if gated and config.gate.first_layer == 0 and config.gate.sink_tokens == 0:
            hold(row["val/evicted"], 1 - row["val/gate_mean_hard"], 4 * EPS)


def check_export(run: Path, config: Config, gates: dict[str, torch.Tensor], lora: dict[str, torch.Tensor]) -> None:
    """The export holds the last weights, and gives the last validation loss with tokens really evicted."""
    base, _ = load_base(config.model)
    model = base
    if lora:
        model = PeftModel.from_pretrained(base, str(run / "export" / "adapter")).eval()
        adapter = load_file(run / "export" / "adapter" / "adapter_model.safetensors")
        trained = {name.removeprefix("model.").replace(".default", ""): tensor for name, tensor in lora.items()}
        torch.testing.assert_close(adapter, trained, rtol=0, atol=0)
    assert (run / "export" / "adapter").is_dir() == bool(lora)
    assert (run / "export" / "gate_config.json").is_file() == bool(gates)
    if gates:
        exported = ag.AttentionGates.from_pretrained(run / "export")
        assert exported.config == config.gate
        trained = {name.removeprefix("gates."): tensor for name, tensor in gates.items()}
        torch.testing.assert_close(dict(exported.state_dict()), trained, rtol=0, atol=0)
    if "packed" in getattr(config.data, "packing", "") or config.trainer.precision != "32-true":
        return  # packed text has no response; bfloat16 rounds differently

    last = logged(run)[-1]
    losses: list[list[float]] = []
    held, seen = 0.0, 0
    for row in validation_rows(config):
        if row.answer is not None and row.answer.choice != row.answer.target:
            continue
        ids, length = torch.from_numpy(row.tokens).long()[None], row.prompt_length
        cache = ag.EvictionCache(model, f"gates:{run / 'export'}" if gates else "full")
        with torch.no_grad():
            start = model(ids[:, :length], past_key_values=cache)
            if config.gate.recent_tokens == 1:  # then nothing is held for a while only
                held, seen = held + length * cache.kept_share(), seen + length
            rest = model(ids[:, length:], past_key_values=cache)
        logits = torch.cat([start.logits[:, -1:], rest.logits[:, :-1]], 1)
        nats = torch.nn.functional.cross_entropy(logits[0], ids[0, length:], reduction="none").tolist()
        losses.append(nats[row.response_start - length :])  # a question behind the prompt carries no loss
    hold(last["val/lm_loss"], mean(map(mean, losses)), of_nats(model))
    perplexity = math.exp(mean(itertools.chain(*losses)))
    hold(last["val/perplexity"], perplexity, (of_nats(model) + 10 * EPS) * perplexity)  # of exp, 10 roundings
    if gates and seen:
        hold(last["val/evicted"], 1 - held / seen, 2 * EPS)


@pytest.mark.slow
@pytest.mark.nightly
def test_gradient_checkpointing_changes_no_number(recipe: Path, tmp_path: Path) -> None:
    overrides = ["train=gates+lora", "gate.estimator=soft", "lora.dropout=0.2", "trainer.max_steps=3"]
    plain, saving = (
        logged(train(recipe, tmp_path, *overrides, f"model.gradient_checkpointing={value}"))
        for value in ("false", "true")
    )
    assert plain == saving


@pytest.mark.slow
@pytest.mark.nightly
def test_early_stopping_exports_the_best_weights_with_their_metrics(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(figures: Any, trainer: Any, module: Any) -> None:
        path = figures._run_dir / "figures" / f"keep-0-{trainer.global_step:06d}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(trainer.global_step))

    monkeypatch.setattr(Figures, "on_validation_end", draw)
    # rates that make it worse from the second validation on
    overrides = ["train=gates+lora", "optim.lora_lr=0.3", "optim.schedule=constant", "checkpoint.patience=2"]
    run = train(recipe, tmp_path, *overrides, "trainer.max_steps=40", "trainer.val_every=1")
    losses = column(run, "val/loss")
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2 < 40
    state = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert state["global_step"] == best
    gates = {name.removeprefix("gates."): tensor for name, tensor in state["state_dict"].items() if "gates." in name}
    torch.testing.assert_close(load_file(run / "export" / "gates.safetensors"), gates, rtol=0, atol=0)
    info = json.loads((run / "export" / "gate_config.json").read_text())
    assert info["metrics"]["loss"] == min(losses)
    assert info["calibration"] == state["calibration"]
    assert (run / "export" / "figure.png").read_text() == str(best)


@pytest.mark.slow
def test_a_last_step_that_is_better_than_the_best_checkpoint_is_exported(recipe: Path, tmp_path: Path) -> None:
    """The run ends between two validations, and the one of its last step is not in a checkpoint."""
    overrides = ["train=gates+lora", "optim.lora_lr=3e-3", "optim.schedule=constant", "loss.alpha=0"]
    overrides += ["checkpoint.monitor=val/lm_loss", "checkpoint.patience=3", "trainer.val_every=3"]
    run = train(recipe, tmp_path, *overrides, "trainer.max_steps=5")
    at_3, at_5 = column(run, "val/lm_loss")
    assert at_5 < at_3
    state = torch.load(run / "checkpoints" / "step=000005.ckpt", weights_only=True)["state_dict"]
    gates = {name.removeprefix("gates."): tensor for name, tensor in state.items() if "gates." in name}
    torch.testing.assert_close(load_file(run / "export" / "gates.safetensors"), gates, rtol=0, atol=0)
    assert json.loads((run / "export" / "gate_config.json").read_text())["metrics"]["lm_loss"] == at_5


@pytest.mark.slow
@pytest.mark.parametrize("recipe_keys", [[], ["train=gates+lora", "loss.anneal_steps=2"]])
def test_an_export_is_calibrated_by_a_step_of_0(recipe: Path, tmp_path: Path, recipe_keys: list[str]) -> None:
    """The keys are those of the message to users whose gates have no table."""
    merge = ["export.merge=true"] if recipe_keys else []
    first = train(recipe, tmp_path, "trainer.max_steps=2", *recipe_keys, *merge)
    gates = AttentionGates.from_pretrained(first / "export")
    gates.calibration = None
    with pytest.raises(UserError, match="no table of shares") as refusal:
        gates.at(share=0.5)
    keys = re.findall(r"[a-z_.]+=[a-z0-9]+", str(refusal.value).partition("init=EXPORT")[2].partition(" (")[0])
    base = [f"model.name={first / 'merged'}"] if merge else []
    again = train(recipe, tmp_path, *recipe_keys, f"init={first / 'export'}", *keys, *base)
    weights = [load_file(run / "export" / "gates.safetensors") for run in (first, again)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    tables = [json.loads((run / "export" / "gate_config.json").read_text())["calibration"] for run in (first, again)]
    assert tables[0] == tables[1] and len(tables[0]["shares"]) == 19


@pytest.mark.slow
def test_metrics_of_the_export_are_those_of_the_last_step(recipe: Path, tmp_path: Path) -> None:
    run = train(recipe, tmp_path, "trainer.max_steps=3", "trainer.val_every=2")  # an epoch has 12
    first, last = [row for row in logged(run) if "val/loss" in row]
    metrics = json.loads((run / "export" / "gate_config.json").read_text())["metrics"]
    assert (first["step"], last["step"], last["val/loss"]) == (2, 3, metrics["loss"])
    assert first["val/loss"] != last["val/loss"]


def test_a_run_by_ddp_leaves_no_rank_in_the_environment(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run would take this process for a rank that another one has started, and wait for it."""
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    before = dict(os.environ)
    train(recipe, tmp_path, "trainer.strategy=ddp", "trainer.max_steps=1")
    assert {name: os.environ.get(name) for name in LAUNCH_VARIABLES} == {
        name: before.get(name) for name in LAUNCH_VARIABLES
    }
