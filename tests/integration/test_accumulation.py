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


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["loss.alpha=0"], ["loss.beta=0", "loss.alpha=100", *EQUAL_LENGTHS]],
    ids=["LM part", "eviction part on one side of beta"],
)
def test_parts_are_the_whole(overrides: list[str], recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    one, other = both(recipe, tmp_path, *overrides)
    moved = train(recipe, tmp_path / "moved", *WHOLE, *STEPS, *overrides, f"model.name={moved_base}")
    for name in ("train/grad_norm_gates", "train/grad_norm_lora"):
        same_rows(*([{name: x} for x in column(run, name)] for run in (one, other, moved)))
    same_weights(one, other, moved)


@pytest.mark.slow
@pytest.mark.nightly
def test_eviction_part_differs_across_beta(recipe: Path, tmp_path: Path) -> None:
    still = ["optim.gate_lr=0", "optim.lora_lr=0", "train=gates+lora", "trainer.max_steps=8", "data.batch_size=1"]
    means = sorted(column(train(recipe, tmp_path, *still, *EQUAL_LENGTHS), "train/gate_mean_soft"))
    beta = (means[1] + means[2]) / 2  # two of the eight parts lie below
    runs = both(recipe, tmp_path, f"loss.beta={beta}", "loss.alpha=100", *EQUAL_LENGTHS)
    one, other = (column(run, "train/grad_norm_gates")[0] for run in runs)
    assert one < 0.9 * other  # parts on both sides pull in opposite directions
