"""Launches of the Triton kernels: shapes of tiles. test_triton.py runs this file in another process."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.attention_stats.triton import attention_stats
from ag.kernels.gated_attention import triton as attention
from ag.kernels.gated_attention.masks import Masks
from ag.kernels.gated_prefill.triton import gated_prefill
from ag.kernels.tiles import FARTHEST, ROWS, TALLEST, readable, tuned
from tests.kernels import test_gated_attention as gated


@pytest.fixture
def as_on_a_card(monkeypatch):
    """The kernels of gated attention, timed as on a card; holds one number for each shape that was timed."""
    calls = []

    def bench(call, quantiles):
        calls.append(1)
        call()
        return [1.0 * len(calls)] * 3

    monkeypatch.setattr("ag.kernels.tiles.INTERPRETED", False)
    made = {"FORWARD": (attention._forward, ROWS, 2**15), "QUERIES": (attention._backward_queries, ROWS, 2**15)}
    for name, (kernel, shapes, room) in (made | {"KEYS": (attention._backward_keys, attention.OF_KEYS, 2**14)}).items():
        timed = tuned(attention.KEY, shapes, room, ROWS=16, KEYS=32)(kernel)
        monkeypatch.setitem(vars(timed), "do_bench", bench)
        monkeypatch.setattr(attention, name, timed)
    return calls


def test_the_tuner_calls_three_shapes_of_each_kernel_for_each_class_of_lengths_and_window(as_on_a_card, monkeypatch):
    monkeypatch.setattr("ag.kernels.tiles.CLASSES", (33, 60))
    gated.check(attention.gated_attention, *gated.given(33, 2, 1, 16))
    assert len(as_on_a_card) == 9
    for length, masks, timed in ((20, {}, 9), (34, {}, 12), (20, {"window": 8}, 15)):
        (q, k, v, keep), *options = gated.given(length, 2, 1, 16, **masks)
        attention.gated_attention(q, k, v, keep, *options)
        assert len(as_on_a_card) == timed
    assert attention.FORWARD.best_config.kwargs == {"ROWS": 32}  # the first of the largest that fit float32


def test_the_interpreter_times_nothing():
    assert [x.kwargs for x in attention.FORWARD.configs] == [{"ROWS": 16}]


@pytest.mark.parametrize(
    ("dim", "width", "dtype", "largest"),
    [(128, 128, torch.bfloat16, 128), (64, 256, torch.bfloat16, 64), (128, 64, torch.float32, 32)],
)
def test_tiles_by_the_wider_head(as_on_a_card, dim, width, dtype, largest):
    """A tile takes 2^15 bytes at most in 16 bits; of float32 it has a quarter of the rows. Keys are whole blocks."""
    attention.FORWARD.nargs = {"q": torch.empty(0, dtype=dtype), "D": dim, "E": width}
    found = [x.kwargs["ROWS"] for x in attention.FORWARD.prune_configs({})]
    assert found[0] == max(found) == largest and 1 <= len(found) <= 3
    block = 16 if dtype == torch.float32 else 64 if max(dim, width) <= 128 else 32
    attention.KEYS.nargs = attention.FORWARD.nargs | {"BLOCK": block}
    found = [x.kwargs["KEYS"] for x in attention.KEYS.prune_configs({})]
    assert found and all(keys % block == 0 for keys in found)


def test_a_window_or_a_recent_past_longer_than_the_text_is_all_of_it():
    """Sums of indices and these numbers must not pass 2^31."""
    (q, k, v, keep), _, *options = gated.given(20, 4, 2, 16)
    most = Masks(recent=2**31 - 1, window=2**31 - 1)
    gated.check(attention.gated_attention, (q, k, v, keep), most, *options)
    want = attention.gated_attention(q, k, v, None, Masks(), *options)
    torch.testing.assert_close(gated_prefill(q, k, v, keep.bool(), most, *options), want)
    token_indices = torch.arange(20).expand(2, -1)
    given = q, k, token_indices, token_indices[:, None], 0.25
    found = [attention_stats("sum", *given, window) for window in (None, 2**31 - 1)]
    torch.testing.assert_close(*found)


def test_rows_too_far_apart_for_32_bits_are_brought_together():
    x = torch.empty(FARTHEST + 9, dtype=torch.uint8)
    assert readable(x.as_strided((2, 8), (FARTHEST + 1, 1))).stride() == (8, 1)
    assert readable(x.as_strided((2, 8), (FARTHEST, 1))).stride() == (FARTHEST, 1)
    assert (TALLEST - 1) * FARTHEST + 255 < 2**31
