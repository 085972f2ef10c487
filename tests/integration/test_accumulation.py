"""trainer.accumulate=8 with one row against one step of 8 rows.

The eviction part is ``|mean - beta|``, with a mean over a batch of all ranks, not over accumulated ones. So it is the
same only if the parts have equally many gated tokens and lie on the same side of beta.
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


@pytest.mark.slow
def test_accumulated_rows_train_like_one_batch(recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    overrides = ["train=gates+lora", "trainer.max_steps=2", "loss.beta=0", *EQUAL_LENGTHS]
    one, other = (train(recipe, tmp_path, *parts, *overrides) for parts in (ACCUMULATED, WHOLE))
    moved = train(recipe, tmp_path / "moved", *WHOLE, *overrides, f"model.name={moved_base}")
    for name in ("train/grad_norm_gates", "train/grad_norm_lora"):
        same_rows(*([{name: x} for x in column(run, name)] for run in (one, other, moved)))
    same_weights(one, other, moved)
