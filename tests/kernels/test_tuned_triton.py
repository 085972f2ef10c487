"""How the kernels are launched: strides, grids, configurations. Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from bounds import bounded, hold
from triton.runtime.errors import OutOfResources

from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.column_sums.triton import triton_column_sums
from ag.kernels.gated_attention import triton as attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_attention.triton import triton_gated_attention
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.gated_prefill.triton import triton_gated_prefill
from ag.kernels.paged_attend.triton import ATTEND
from ag.kernels.paged_decode import triton as paged
from ag.kernels.ragged_decode import triton as decode
from ag.kernels.ragged_decode.reference import reference_ragged_decode
from ag.kernels.tuned import FARTHEST, Tuned, readable


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


def test_column_sums_of_transposed_masks(transposed):
    q, k, _, _, valid = transposed
    queries = turned(torch.rand(*valid.shape) > 0.4)
    want = reference_column_sums(*known(q, k), 0.25, queries, valid)
    hold(triton_column_sums(q, k, 0.25, queries, valid), want)


def test_ragged_decode_of_rows_with_strides():
    keys, values = torch.randn(16, 60).T, torch.randn(60, 2, 16)[:, 1]
    rows = torch.tensor([[0, 20], [30, 25]])  # starts and lengths side by side
    starts, lengths = rows[:, 0], rows[:, 1]
    q = torch.randn(2, 16, 1).mT.expand(2, 1, 16)
    want = reference_ragged_decode(*known(q, keys, values, starts, lengths), 0.3)
    hold(decode.triton_ragged_decode(q, keys, values, starts, lengths, 0.3), want)


def test_a_window_or_a_recent_past_longer_than_the_text_is_all_of_it():
    """Sums of indices and these numbers must not pass 2^31."""
    q, k, v = draw(20, 4), draw(20), draw(20)
    keep, most = (torch.rand(2, 2, 20) > 0.5).float(), 2**31 - 1
    want = reference_gated_attention(*known(q, k, v), None, None, 0.25)
    hold(triton_gated_attention(q, k, v, keep, None, 0.25, most, 0, most), want)
    hold(triton_gated_prefill(q, k, v, keep.bool(), None, 0.25, most, 0, most), want)
    counted = torch.ones(2, 20, dtype=torch.bool)
    want = reference_column_sums(*known(q, k), 0.25, counted)
    hold(triton_column_sums(q, k, 0.25, counted, None, most), want)


def test_rows_too_far_apart_for_32_bits_are_brought_together():
    x = torch.empty(FARTHEST + 9, dtype=torch.uint8)
    assert readable(x.as_strided((2, 8), (FARTHEST + 1, 1))).stride() == (8, 1)
    assert readable(x.as_strided((2, 8), (FARTHEST, 1))).stride() == (FARTHEST, 1)
    largest = max(config.kwargs["ROWS"] for kernel in TUNED for config in kernel.half + kernel.single)
    assert (largest - 1) * FARTHEST + 255 < 2**31


TUNED = [attention.FORWARD, attention.QUERIES, attention.KEYS, decode.SPLIT, paged.SPLIT, ATTEND]


def test_grids_of_many_pairs_stay_within_what_a_card_takes(monkeypatch):
    """A card takes 2^31 - 1 programs along the first axis and 65,535 along the others."""
    seen = []
    monkeypatch.setattr(Tuned, "__call__", lambda self, grid, *_: seen.append(grid({"ROWS": 64, "KEYS": 64})))
    one = torch.randn(1, 1, 1, 16)
    q, k = one.expand(2048, 64, 130, 16).requires_grad_(), one.expand(2048, 32, 130, 16)
    keep, every = torch.ones(1).expand(2048, 32, 130), torch.ones(1, 1, dtype=torch.bool).expand(2048, 130)
    out = torch.zeros(1).expand(2048, 64, 130, 16)
    monkeypatch.setattr(torch, "empty_like", lambda x: out)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.zeros(1, **options).expand(*shape))
    triton_gated_attention(q, k, k, None, None, 0.1).backward(out)
    triton_gated_prefill(q.detach(), k, k, keep.bool(), None, 0.1)
    triton_column_sums(q.detach(), k, 0.1, every)
    queries, keys = 3 * 2048 * 64, 3 * 2048 * 32
    assert seen == [(queries,), (queries,), (keys,), (queries,), (queries,), (queries,)]


def test_the_tuner_drops_what_does_not_fit(monkeypatch):
    """A configuration that asks for too much shared memory is passed over, and another one runs."""
    q, k, v = draw(33), draw(33), draw(33)
    want = reference_gated_attention(*known(q, k, v), None, None, 0.25)
    tuned, tried = attention.FORWARD.tuned, []

    def bench(call, quantiles):
        tried.append(1)
        if len(tried) == 1:
            raise OutOfResources(131072, 101376, "shared memory")
        call()
        return [1.0] * 3

    monkeypatch.setattr("ag.kernels.tuned.interpreting", lambda: False)
    monkeypatch.setitem(vars(tuned), "do_bench", bench)
    tuned.cache.clear()
    hold(triton_gated_attention(q, k, v, None, None, 0.25), want)
    assert len(tried) == 2 and tuned.best_config is attention.FORWARD.single[1]
    tuned.cache.clear()


@pytest.mark.parametrize(
    ("dim", "width", "dtype", "expected"),
    [
        (128, 128, torch.bfloat16, "half"),
        (256, 256, torch.float16, "wide"),
        (64, 256, torch.bfloat16, "wide"),
        (192, 128, torch.bfloat16, "wide"),
        (256, 256, torch.float32, "single"),
    ],
)
def test_configurations_by_the_wider_head(dim, width, dtype, expected):
    kernel = attention.FORWARD
    named = {"q": torch.empty(0, dtype=dtype), "D": dim, "E": width}
    assert kernel._fitting([], named) is getattr(kernel, expected)
    arguments = [named.get(name, 0) for name in kernel.kernel.arg_names if name != "ROWS"]
    assert kernel.first(*arguments) == getattr(kernel, expected)[0].all_kwargs()
