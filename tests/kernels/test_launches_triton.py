"""How the kernels are launched: strides, grids, shapes of tiles. Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError

from ag.kernels.attention_stats.reference import reference_attention_stats
from ag.kernels.attention_stats.triton import triton_attention_stats
from ag.kernels.gated_attention import triton as attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_attention.triton import triton_gated_attention
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.gated_prefill.triton import triton_gated_prefill
from ag.kernels.tiles import FARTHEST, ROWS, TALLEST, readable, tuned
from tests.support.bounds import bounded, hold


@triton.jit
def _with(out, number, SIGN: tl.constexpr):
    x = tl.load(out + tl.arange(0, 2))
    tl.store(out + tl.arange(0, 2), x + number if SIGN > 0 else x - number)


@pytest.mark.parametrize(("number", "fitting", "too_far"), [(7, 2**31 - 8, 2**31 - 7), (-7, 7 - 2**31, 6 - 2**31)])
def test_the_interpreter_refuses_sums_that_overflow(number, fitting, too_far):
    """A card would go on with another number, and the index would be one of somewhere else."""
    for sign in (1, -1):
        fits, over = (torch.tensor([0, x], dtype=torch.int32) for x in (fitting, too_far))
        _with[(1,)](fits, sign * number, sign)
        assert fits.tolist() == [number, fitting + number]
        with pytest.raises(InterpreterError, match="int32 overflow detected"):
            _with[(1,)](over, sign * number, sign)


def known(*tensors):
    """Numbers as operands, everything else as it is."""
    return [bounded(x) if x.is_floating_point() else x for x in tensors]


def turned(x):
    """The same numbers with the last two dimensions exchanged in memory."""
    return x.mT.contiguous().mT


def draw(length, heads=2, batch=2, dim=16):
    torch.manual_seed(length)
    return torch.randn(batch, heads, length, dim)


@pytest.fixture(params=[37, 64], ids=["T37", "T64"])
def transposed(request):
    """q, k, v, keep flags and a mask of padding, the latter two not contiguous, as gates and collators give them."""
    length = request.param
    keep, valid = (torch.rand(2, 2, length) > 0.6).float(), torch.ones(2, length, dtype=torch.bool)
    keep[:, 1, : length // 2] = 0
    valid[1, : length // 3] = False
    return draw(length, 4), draw(length + 1)[:, :, 1:], draw(length), turned(keep), turned(valid)


def test_gated_attention_of_transposed_flags_and_masks(transposed):
    *tensors, keep, valid = transposed

    def run(function, tensors):
        given = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
        out = function(*given, valid, 0.25, 3, 1)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in given)]

    given = *tensors, keep
    found, wanted = run(triton_gated_attention, given), run(reference_gated_attention, known(*given))
    for got, want in zip(found, wanted, strict=True):
        hold(got, want)


def test_gated_prefill_of_transposed_flags_and_masks(transposed):
    q, k, v, keep, valid = transposed
    want = reference_gated_prefill(*known(q, k, v), keep.bool(), valid, 0.25)
    hold(triton_gated_prefill(q, k, v, keep.bool(), valid, 0.25), want)


def test_a_window_or_a_recent_past_longer_than_the_text_is_all_of_it():
    """Sums of indices and these numbers must not pass 2^31."""
    q, k, v = draw(20, 4), draw(20), draw(20)
    keep, most = (torch.rand(2, 2, 20) > 0.5).float(), 2**31 - 1
    want = reference_gated_attention(*known(q, k, v), None, None, 0.25)
    hold(triton_gated_attention(q, k, v, keep, None, 0.25, most, 0, most), want)
    hold(triton_gated_prefill(q, k, v, keep.bool(), None, 0.25, most, 0, most), want)
    ranks = torch.arange(20).expand(2, -1)
    want = reference_attention_stats("sum", *known(q, k), ranks, ranks[:, None], 0.25)
    hold(triton_attention_stats("sum", q, k, ranks, ranks[:, None], 0.25, most), want)


def test_rows_too_far_apart_for_32_bits_are_brought_together():
    x = torch.empty(FARTHEST + 9, dtype=torch.uint8)
    assert readable(x.as_strided((2, 8), (FARTHEST + 1, 1))).stride() == (8, 1)
    assert readable(x.as_strided((2, 8), (FARTHEST, 1))).stride() == (FARTHEST, 1)
    assert (TALLEST - 1) * FARTHEST + 255 < 2**31


def test_grids_of_many_pairs_stay_within_what_a_card_takes(monkeypatch):
    """A card takes 2^31 - 1 programs along the first axis and 65,535 along the others."""
    seen = []

    def launched(self, *arguments, grid, **_):
        seen.append(grid({"ROWS": 64, "KEYS": 64}))

    monkeypatch.setattr(Autotuner, "run", launched)
    monkeypatch.setattr("ag.kernels.attention_stats.triton.key_block", lambda q: 64)
    one = torch.randn(1, 1, 1, 16)
    q, k = one.expand(2048, 64, 130, 16).requires_grad_(), one.expand(2048, 32, 130, 16)
    keep, ranks = torch.ones(1).expand(2048, 32, 130), torch.zeros(1, 1, dtype=torch.long).expand(2048, 130)
    out = torch.zeros(1).expand(2048, 64, 130, 16)
    monkeypatch.setattr(torch, "empty_like", lambda x: out)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.zeros(1, **options).expand(*shape))
    triton_gated_attention(q, k, k, None, None, 0.1).backward(out)
    triton_gated_prefill(q.detach(), k, k, keep.bool(), None, 0.1)
    triton_attention_stats("sum", q.detach(), k, ranks, ranks[:, None], 0.1)
    queries, keys = 3 * 2048 * 64, 3 * 2048 * 32
    assert seen == [(queries,), (queries,), (keys,), (queries,), (queries,), (queries,)]


@pytest.fixture
def timed(monkeypatch):
    """The forward kernel of gated attention as on a card; holds one number for each shape that was timed."""
    calls = []

    def bench(call, quantiles):
        calls.append(1)
        call()
        return [1.0 * len(calls)] * 3

    monkeypatch.setattr("ag.kernels.tiles.interpreting", lambda: False)
    kernel = tuned(attention.KEY, ROWS, 2**15, ROWS=16)(attention._forward)
    monkeypatch.setitem(vars(kernel), "do_bench", bench)
    monkeypatch.setattr(attention, "FORWARD", kernel)
    return calls


def test_each_class_of_lengths_is_timed_once_under_each_set_of_masks(timed, monkeypatch):
    monkeypatch.setattr("ag.kernels.tiles.CLASSES", (40, 60))
    keep, valid = (torch.rand(2, 2, 70) > 0.6).float(), torch.ones(2, 70, dtype=torch.bool)
    asked = []
    for length in (33, 40, 20, 41, 60, 61, 70):
        q, k, v = draw(length), draw(length), draw(length)
        want = reference_gated_attention(*known(q, k, v), keep[:, :, :length], None, 0.25)
        hold(triton_gated_attention(q, k, v, keep[:, :, :length], None, 0.25), want)
        asked.append(len(timed))
    assert asked == [3, 3, 3, 6, 6, 9, 9]
    triton_gated_attention(q, k, v, keep, valid, 0.25)
    assert len(timed) == 12
    best = attention.FORWARD.best_config  # of the three largest shapes for float32; the first was the fastest
    assert (best.kwargs, best.num_warps) == ({"ROWS": 32}, 4)


def test_the_interpreter_times_nothing():
    assert [x.kwargs for x in attention.FORWARD.configs] == [{"ROWS": 16}]


@pytest.mark.parametrize(
    ("dim", "width", "dtype", "largest"),
    [
        (128, 128, torch.bfloat16, 128),
        (256, 256, torch.float16, 64),
        (64, 256, torch.bfloat16, 64),
        (192, 128, torch.bfloat16, 64),
        (128, 64, torch.float32, 32),
        (256, 256, torch.float32, 16),
    ],
)
def test_tiles_by_the_wider_head(monkeypatch, dim, width, dtype, largest):
    """A tile takes 2^15 bytes at most in 16 bits; of float32 it has a quarter of the rows."""
    monkeypatch.setattr("ag.kernels.tiles.interpreting", lambda: False)
    kernel = tuned(["D"], ROWS, 2**15, ROWS=16)(attention._forward)
    kernel.nargs = {"q": torch.empty(0, dtype=dtype), "D": dim, "E": width}
    found = [x.kwargs["ROWS"] for x in kernel.prune_configs({})]
    assert found[0] == max(found) == largest and 1 <= len(found) <= 3


@pytest.mark.parametrize(("dim", "dtype", "block"), [(64, torch.bfloat16, 64), (256, torch.float16, 32)])
@pytest.mark.parametrize("double", [False, True])
def test_tiles_of_keys_are_whole_blocks(monkeypatch, dim, dtype, block, double):
    monkeypatch.setattr("ag.kernels.tiles.interpreting", lambda: False)
    kernel = tuned(["D"], attention.OF_KEYS, 2**14, ROWS=16, KEYS=32)(attention._backward_keys)
    given = (torch.float32, 16) if double else (dtype, block)
    kernel.nargs = {"q": torch.empty(0, dtype=given[0]), "D": dim, "E": dim, "BLOCK": given[1]}
    found = [x.kwargs["KEYS"] for x in kernel.prune_configs({})]
    assert found and all(keys % given[1] == 0 for keys in found)
