"""Gradient norms, throughput, and numbers of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ag.callbacks.pictures import logical_count
from ag.files import read_metrics
from tests.support.bounds import conditioned, hold
from tests.support.tiny_run import TOKENS, WIDTH, Tiny, fit


def test_gradient_norms_are_those_before_clipping(tmp_path: Path) -> None:
    fit(tmp_path, trainer={"max_steps": 1, "clip": 1e-3})
    (row,) = read_metrics(tmp_path / "metrics.csv")

    oracle = Tiny()
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    assert oracle.gates is not None

    def norms(x: torch.Tensor) -> torch.Tensor:
        oracle.zero_grad()
        gates = torch.stack([layer(x) for layer in oracle.gates.layers.values()]).sigmoid()
        (oracle.model(x).square().mean() + (gates.mean() - 0.3).abs()).backward()
        squares = [
            [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
            for module in (oracle.gates, oracle.model)
        ]
        return torch.stack([sum(each).sqrt() for each in squares])

    found = torch.tensor([row[f"train/grad_norm_{name}"] for name in ("gates", "lora")], dtype=torch.float64)
    hold(found, norms(x), conditioned(norms, x))


@pytest.mark.slow
def test_throughput_counts_real_tokens_and_no_validation_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the clock advances by 2 s in a training batch and by 100 s in a validation batch
    now = 0.0

    def train(module: Tiny, batch: Any, index: int, step: Any = Tiny.training_step) -> Any:
        nonlocal now
        now += 2.0
        return step(module, batch, index)

    def validate(module: Tiny, batch: Any, index: int, step: Any = Tiny.validation_step) -> None:
        nonlocal now
        now += 100.0
        step(module, batch, index)

    monkeypatch.setattr("ag.callbacks.steps.time.perf_counter", lambda: now)
    monkeypatch.setattr(Tiny, "training_step", train)
    monkeypatch.setattr(Tiny, "validation_step", validate)
    fit(tmp_path, trainer={"log_every": 2, "accumulate": 2, "val_every": 1}, batches=8)
    rows = [row for row in read_metrics(tmp_path / "metrics.csv") if "train/tokens_per_second" in row]
    # two rows of 7 real tokens (of 10) each 2 s
    assert TOKENS == 10
    assert [(row["step"], row["train/tokens_per_second"]) for row in rows] == [(2, 7.0), (4, 7.0)]


def test_summary_prints_counts_and_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, trainer={"max_steps": 1})
    # 3 gates of 4 x 2 + 2, one trained and one frozen layer of 4 x 4 + 4
    line = "parameters: gates 30 (150.00%), lora 20 (100.00%), of the base model 20"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_four_bit_weights_count_as_what_they_stand_for(storage: torch.dtype) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False, quant_type="nf4", quant_storage=storage)
    layer.load_state_dict({"weight": torch.randn(32, 64)})
    layer.to("cpu")
    assert layer.weight.numel() < 32 * 64
    assert logical_count(layer.weight) == 32 * 64
    assert logical_count(nn.Parameter(torch.zeros(3, 5))) == 15
