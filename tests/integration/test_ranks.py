"""Two gloo processes with b rows each are one process with 2 b."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.support import ROOT
from tests.support.bounds import conditioned, hold
from tests.support.command import column, logged, runs, same_rows, same_weights, start, train
from tests.support.two_ranks import LENGTHS, Losses, hidden_states, values_and_gradients
from tests.support.warm import started

TWO_RANKS = ["trainer.devices=2", "trainer.strategy=ddp"]


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_the_global_batch(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import two_ranks; two_ranks.work"
    words = [[started(), "-c", f"{code}({rank}, {str(tmp_path)!r})"] for rank in (0, 1)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in words]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    whole = values_and_gradients(Losses(), hidden_states().flatten(0, 1), LENGTHS.flatten())
    parts = [values_and_gradients(Losses(), hidden_states()[rank], LENGTHS[rank]) for rank in (0, 1)]
    for name, expected in whole.items():

        def loss(hidden: torch.Tensor, name: str = name) -> torch.Tensor:
            return values_and_gradients(Losses(), hidden.flatten(0, 1), LENGTHS.flatten())[name]

        bound = 2 * conditioned(loss, hidden_states())  # of two that round apart
        hold(first[name][1:], expected[1:], bound[1:])  # gradients
        torch.testing.assert_close(second[name][1:], first[name][1:], rtol=0, atol=0)
        if name in ("soft", "hard"):
            assert first[name][0] == second[name][0]
        hold((first[name][0] + second[name][0]) / 2, expected[0], bound[0])
        naive = (parts[0][name] + parts[1][name]) / 2
        assert (naive - expected).abs().max() > 1e-3 or name == "samples"


@pytest.mark.slow
def test_two_ranks_train_like_one_with_twice_the_rows(recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    # two steps of regression, four of the losses; 5 questions, so that one rank gets a filler row
    overrides = ["train=gates+lora", "warmup.regress_steps=2", "trainer.max_steps=6", "data.val_samples=5"]
    arguments = [f"recipe={recipe}", *overrides, *TWO_RANKS, f"output={tmp_path / 'two'}"]
    process = start(*arguments, "data.batch_size=2", "data.val_batch_size=1")
    overrides += ["data.batch_size=4", "data.val_batch_size=2"]
    one = train(recipe, tmp_path / "one", *overrides)
    moved = train(recipe, tmp_path / "moved", *overrides, f"model.name={moved_base}")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    [two] = runs(tmp_path / "two")
    assert len(column(two, "train/eviction_loss")) == 4
    same_rows(*map(logged, (two, one, moved)))
    same_weights(two, one, moved)
