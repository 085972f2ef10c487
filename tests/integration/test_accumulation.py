"""trainer.accumulate=8 with one row against one step of 8 rows.

The LM part is the same: every row weighs the same. The eviction part is ``|mean - beta|``, and its mean is taken over a
batch of all ranks, not over accumulated ones. It is the same when the parts have equally many gated tokens and lie on
the same side of beta, and differs otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import column, same_rows, same_weights, train

ACCUMULATED = ["data.batch_size=1", "trainer.accumulate=8"]
WHOLE = ["data.batch_size=8", "trainer.accumulate=1"]
# text: prompts of one length; the default data have prompts of many lengths
EQUAL_LENGTHS = [
    *("data.kind=text", "data.name=words", "data.max_length=80"),
    *("data.prompt_min=64", "data.prompt_max=64", "data.continuation=16"),
]


STEPS = ("train=gates+lora", "trainer.max_steps=2")


def both(recipe: Path, folder: Path, *overrides: str) -> tuple[Path, Path]:
    return tuple(train(recipe, folder, *parts, *STEPS, *overrides) for parts in (ACCUMULATED, WHOLE))


def gate_gradient(run: Path) -> float:
    """Gradient norm of the gates in the first step."""
    return column(run, "train/grad_norm_gates")[0]


def equal(recipe: Path, folder: Path, moved_base: Path, *overrides: str) -> None:
    """Assert that runs of both kinds are one but for rounding."""
    one, other = both(recipe, folder, *overrides)
    moved = train(recipe, folder / "moved", *WHOLE, *STEPS, *overrides, f"model.name={moved_base}")
    for name in ("train/grad_norm_gates", "train/grad_norm_lora"):
        same_rows(*([{name: x} for x in column(run, name)] for run in (one, other, moved)))
    same_weights(one, other, moved)


@pytest.mark.parametrize(
    "lengths", [[], pytest.param(EQUAL_LENGTHS, marks=pytest.mark.slow)], ids=["many lengths", "one length"]
)
def test_lm_part_is_the_same(lengths: list[str], recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    equal(recipe, tmp_path, moved_base, "loss.alpha=0", *lengths)


@pytest.mark.slow
def test_eviction_part_is_the_same_on_one_side_of_beta(recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    equal(recipe, tmp_path, moved_base, "loss.beta=0", "loss.alpha=100", *EQUAL_LENGTHS)


@pytest.mark.slow
def test_eviction_part_differs_across_beta(recipe: Path, tmp_path: Path) -> None:
    still = ["optim.gate_lr=0", "optim.lora_lr=0", "train=gates+lora", "trainer.max_steps=8", "data.batch_size=1"]
    means = sorted(column(train(recipe, tmp_path, *still, *EQUAL_LENGTHS), "train/gate_mean_soft"))
    beta = (means[1] + means[2]) / 2  # two of the eight parts lie below
    one, other = both(recipe, tmp_path, f"loss.beta={beta}", "loss.alpha=100", *EQUAL_LENGTHS)
    assert gate_gradient(one) < 0.9 * gate_gradient(other)  # parts on both sides pull in opposite directions


@pytest.mark.slow
def test_eviction_part_differs_between_lengths(recipe: Path, tmp_path: Path) -> None:
    one, other = both(recipe, tmp_path, "loss.beta=0", "loss.alpha=100")
    assert abs(gate_gradient(one) / gate_gradient(other) - 1) > 1e-3  # each row weighs the same, or each token
