"""NaN and infinity stop a run before they reach the weights."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ag.callbacks import NonFiniteError
from ag.callbacks.checkpoint_files import newest_valid
from ag.callbacks.guards import FiniteGuard
from tests.support import tiny_run
from tests.support.refused import refuses
from tests.support.tiny_run import Tiny, command, fit


@pytest.mark.parametrize(
    ("part", "parts"),
    [
        ("eviction", ("step 5", "eviction loss is nan", "gates is nan")),
        ("detached", ("step 5", "LM loss is nan")),
        ("gradient", ("step 5", "gradient norm", "LoRA", "inf")),
    ],
)
def test_raises_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, parts: tuple[str, ...]
) -> None:
    made: list[Tiny] = []

    def make(**options: Any) -> Tiny:
        made.append(Tiny(**options))
        return made[-1]

    monkeypatch.setattr(tiny_run, "Tiny", make)
    with refuses(NonFiniteError, *parts) as raised:
        fit(tmp_path, module={"nan_batch": 4, "nan_part": part}, checkpoint={"every_steps": 4})
    last = tmp_path / "checkpoints/step=000004.ckpt"
    assert str(last) in str(raised.value) and newest_valid(tmp_path) == last
    saved, [module] = torch.load(last, weights_only=True)["state_dict"], made
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    assert trained and all(torch.equal(value, saved[name]) for name, value in trained.items())


def test_every_accumulated_batch_counts(tmp_path: Path) -> None:
    module = {"nan_batch": 3, "nan_part": "detached"}
    with refuses(NonFiniteError, "step 2"):
        fit(tmp_path, module=module, trainer={"accumulate": 3})


def test_scaler_handles_infinite_gradients_but_not_a_nan_loss(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([torch.inf])
    guard = FiniteGuard(tmp_path)
    trainer: Any = SimpleNamespace(
        precision_plugin=SimpleNamespace(scaler=object()),
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision: decision),
        callback_metrics={"train/lm_loss": torch.tensor(torch.nan)},
        global_step=0,
    )
    module: Any = SimpleNamespace(trainable=lambda: {"gates": [weight]}, log_dict=dict)
    guard.on_before_backward(trainer, module, torch.tensor(torch.inf))
    guard.on_before_optimizer_step(trainer, module, module)
    guard.on_before_backward(trainer, module, torch.tensor(torch.nan))
    with refuses(NonFiniteError, "step 1", "LM loss", "nan"):
        guard.on_before_optimizer_step(trainer, module, module)


@pytest.mark.slow
@pytest.mark.nightly
def test_all_ranks_stop_when_one_loss_is_nan(tmp_path: Path) -> None:
    module = {"nan_batch": 3, "nan_rank": 1, "nan_part": "detached"}
    words = command(tmp_path, module=module, trainer={"devices": 2, "strategy": "ddp"}, checkpoint={"every_steps": 2})
    result = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert result.returncode == 3, result.stderr
    assert "step 4: LM loss is nan" in result.stderr
    assert "step 4: the loss is not finite on another rank" in result.stderr
    assert newest_valid(tmp_path).name == "step=000002.ckpt"
