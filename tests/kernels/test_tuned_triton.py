"""How the kernels are launched: strides, grids, configurations. Run by test_triton.py in a process of its own."""

import os
from typing import get_args

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime.errors import InterpreterError, OutOfResources

from ag.kernels.column_sums import triton as columns
from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.column_sums.triton import triton_column_sums
from ag.kernels.configurations import CONFIGURATIONS, Card, Kind, of_card
from ag.kernels.gated_attention import triton as attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_attention.triton import triton_gated_attention
from ag.kernels.gated_prefill import triton as prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.gated_prefill.triton import triton_gated_prefill
from ag.kernels.paged_attend.triton import ATTEND
from ag.kernels.paged_decode import triton as paged
from ag.kernels.tuned import FARTHEST, TALLEST, Tuned, readable
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
    counted = torch.ones(2, 20, dtype=torch.bool)
    want = reference_column_sums(*known(q, k), 0.25, counted)
    hold(triton_column_sums(q, k, 0.25, counted, None, most), want)


def test_rows_too_far_apart_for_32_bits_are_brought_together():
    x = torch.empty(FARTHEST + 9, dtype=torch.uint8)
    assert readable(x.as_strided((2, 8), (FARTHEST + 1, 1))).stride() == (8, 1)
    assert readable(x.as_strided((2, 8), (FARTHEST, 1))).stride() == (FARTHEST, 1)
    assert (TALLEST - 1) * FARTHEST + 255 < 2**31


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


@pytest.fixture
def timed(monkeypatch):
    """Launches as on an sm_89; holds one number for each configuration that was timed."""
    calls = []

    def bench(call, quantiles):
        calls.append(1)
        call()
        return [1.0 * len(calls)] * 3

    monkeypatch.setattr("ag.kernels.tuned.interpreting", lambda: False)
    monkeypatch.setattr("ag.kernels.tuned.of_card", lambda device: 89)
    for kernel in (attention.FORWARD, attention.QUERIES, attention.KEYS):
        monkeypatch.setitem(vars(kernel.timed), "do_bench", bench)
        monkeypatch.setattr(kernel, "fastest", {})
        kernel.timed.cache.clear()
    yield calls
    for kernel in (attention.FORWARD, attention.QUERIES, attention.KEYS):
        kernel.timed.cache.clear()


def test_nothing_is_timed_unless_asked_for(timed, monkeypatch):
    """The first tiles of the entry are taken; in the deterministic mode so they are whatever the environment says."""
    q, k, v = draw(33), draw(33), draw(33)
    want = reference_gated_attention(*known(q, k, v), None, None, 0.25)
    hold(triton_gated_attention(q, k, v, None, None, 0.25), want)
    monkeypatch.setenv("AG_TUNE", "1")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    hold(triton_gated_attention(q, k, v, None, None, 0.25), want)
    assert not timed and not attention.FORWARD.fastest
    launched = []
    monkeypatch.setattr(type(attention.FORWARD.kernel), "__getitem__", lambda *_: lambda *a, **k: launched.append(k))
    triton_gated_attention(q, k, v, None, None, 0.25)
    first = CONFIGURATIONS["_forward"]["32 bits"][89][0]
    assert [(x["ROWS"], x["num_warps"], x["num_stages"]) for x in launched] == [first[:3]]


def test_each_class_of_lengths_is_timed_once_whatever_the_masks(timed, monkeypatch):
    monkeypatch.setenv("AG_TUNE", "1")
    monkeypatch.setattr("ag.kernels.tuned.CLASSES", (40, 60))
    tiles, keep = CONFIGURATIONS["_forward"]["32 bits"][89], (torch.rand(2, 2, 70) > 0.6).float()
    valid = torch.ones(2, 70, dtype=torch.bool)
    asked = []
    for length in (33, 40, 20, 41, 60, 61, 70):
        q, k, v = draw(length), draw(length), draw(length)
        for given in ((None, None), (keep[:, :, :length], None), (keep[:, :, :length], valid[:, :length])):
            triton_gated_attention(q, k, v, *given, 0.25)
        asked.append(len(timed) // len(tiles))
    assert asked == [1, 1, 1, 2, 2, 3, 3]


def test_the_tuner_drops_what_does_not_fit(timed, monkeypatch):
    """A configuration that asks for too much shared memory is passed over, and another one runs."""
    monkeypatch.setenv("AG_TUNE", "1")
    q, k, v = draw(33), draw(33), draw(33)
    want = reference_gated_attention(*known(q, k, v), None, None, 0.25)
    tuned, tried = attention.FORWARD.timed, []

    def bench(call, quantiles):
        tried.append(1)
        if len(tried) == 1:
            raise OutOfResources(131072, 101376, "shared memory")
        call()
        return [1.0] * 3

    monkeypatch.setitem(vars(tuned), "do_bench", bench)
    hold(triton_gated_attention(q, k, v, None, None, 0.25), want)
    second = CONFIGURATIONS["_forward"]["32 bits"][89][1]
    assert len(tried) == 2 and tuned.best_config is attention.FORWARD.configs[second]


@pytest.mark.parametrize(
    ("dim", "width", "dtype", "expected"),
    [
        (128, 128, torch.bfloat16, "16 bits"),
        (256, 256, torch.float16, "16 bits above 128"),
        (64, 256, torch.bfloat16, "16 bits above 128"),
        (192, 128, torch.bfloat16, "16 bits above 128"),
        (128, 64, torch.float32, "32 bits"),
        (256, 256, torch.float32, "32 bits above 128"),
    ],
)
def test_tiles_by_the_wider_head(monkeypatch, dim, width, dtype, expected):
    monkeypatch.setattr("ag.kernels.tuned.of_card", lambda device: 90)
    kernel = attention.FORWARD
    named = {"q": torch.empty(0, dtype=dtype), "D": dim, "E": width}
    arguments = [named.get(name, 0) for name in kernel.kernel.arg_names if name != "ROWS"]
    assert kernel.tiles(arguments) is CONFIGURATIONS["_forward"][expected][90]


@pytest.mark.parametrize(
    ("capability", "card"),
    [((8, 0), 80), ((8, 6), 89), ((8, 7), 80), ((8, 9), 89), ((9, 0), 90), ((10, 3), 90), ((12, 0), 89), ((7, 5), 89)],
)
def test_tiles_by_the_shared_memory_of_a_card(monkeypatch, capability, card):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert of_card.__wrapped__(torch.device("cuda")) == card


def test_the_table_is_complete():
    """Each tuned kernel has an entry for each type and card, and for codes where it reads pages; tiles of keys fit."""
    kernels = [attention.FORWARD, attention.QUERIES, attention.KEYS, prefill.PREFILL, paged.SPLIT]
    kernels += [columns.ROW_SUMS, columns.COLUMNS, ATTEND]
    assert {kernel.kernel.__name__ for kernel in kernels} == set(CONFIGURATIONS)
    for name, table in CONFIGURATIONS.items():
        kinds = {kind for kind in get_args(Kind) if name in ("_split", "_attend") or not kind.startswith("codes")}
        assert set(table) == kinds and all(set(cards) == set(get_args(Card)) for cards in table.values())
        for kind, cards in table.items():
            block = {"16 bits": 64, "16 bits above 128": 32}.get(kind, 16)
            for tiles in (tiles for entry in cards.values() for tiles in entry):
                assert (tiles.keys > 0) == (name == "_backward_keys") and tiles.keys % block == 0
                assert max(tiles.rows, tiles.keys) <= TALLEST
