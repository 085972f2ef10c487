"""Run by test_triton.py in a process of its own."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("elsewhere: test_triton.py runs this file under Triton's interpreter", allow_module_level=True)

from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_attention import triton as kernels
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_attention.triton import triton_gated_attention
from ag.kernels.tiles import ROWS, tuned
from tests.kernels.test_gated_attention import CASES, PARTS, TOGETHER, exactly, inputs, packed_and_alone, run
from tests.support.bounds import hold
from tests.support.hard import HARD, check_gated_attention

BLOCK = 16  # keys and queries of a tile under the interpreter


def single(tensors):
    return [x.detach().float() for x in tensors]


def compare(tensors, options, dtype=torch.float32):
    """Hold the output and every gradient to the oracle in float64, on the same rounded arguments."""
    q, k, v, keep = tensors
    rounded = [x.detach().to(dtype) for x in (q, k, v)] + [keep.detach().float()]
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(*q.shape[:3], v.shape[-1], dtype=torch.float64, generator=generator).to(dtype)
    expected, expected_grads = run(reference_gated_attention, exactly(rounded, dtype), options, weight.double())
    out, grads = run(triton_gated_attention, rounded, options, weight)
    assert out.dtype == dtype and [x.dtype for x in grads] == [dtype] * 3 + [torch.float32]
    for name, got, want in zip(PARTS, [out, *grads], [expected, *expected_grads], strict=True):
        hold(got, want, name=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case):
    compare(*inputs(37, 2, 1, 20, **CASES[case]))


@pytest.mark.parametrize("case", ["plain", "window-sinks-recent", "left-padding-window-dense"])
def test_soft_flags(case):
    compare(*inputs(33, 2, 2, 12, soft=True, **CASES[case]))


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim"),
    [(63, 4, 2, 60), (48, 1, 1, 16), (17, 3, 1, 5), (1, 2, 1, 8)],
    ids=["B2-T63-H4-D60", "B2-T48-H1-D16", "B2-T17-H3-D5", "B2-T1-H2-D8"],
)
def test_odd_shapes(length, heads, kv_heads, dim):
    compare(*inputs(length, heads, kv_heads, dim, padding="left", sinks=2, recent=3, window=29, dense=0.5))


def test_half_precision():  # the interpreter has no bfloat16 products
    compare(*inputs(33, 2, 1, 32, sinks=2, recent=3), dtype=torch.float16)


def test_values_of_another_width():
    (q, k, _, keep), options = inputs(33, 2, 1, 12)
    v = torch.randn(2, 1, 33, 20, dtype=torch.float64)
    compare([q, k, v, keep], options)


def test_transposed_arguments_and_an_expanded_gradient():
    tensors, options = inputs(33, 4, 2, 12, recent=2)
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:3])
    k = k.mT.contiguous().mT
    given = single([q, k, v, tensors[3]])
    expected, expected_grads = run(reference_gated_attention, exactly(given, torch.float32), options, 1.0)
    out, grads = run(triton_gated_attention, given, options, 1.0)
    for name, got, want in zip(PARTS, [out, *grads], [expected, *expected_grads], strict=True):
        hold(got, want, name=name)


@pytest.mark.parametrize("padding", [None, "left"])
def test_without_flags(padding):
    (q, k, v, _), options = inputs(33, 2, 1, 20, padding=padding, sinks=2, recent=4, dense=0.5)
    call = lambda function: lambda *x: function(*x, None, **options)  # noqa: E731
    given, weight = single([q, k, v]), torch.randn_like(q).float()
    expected, expected_grads = run(call(reference_gated_attention), exactly(given, torch.float32), {}, weight.double())
    out, grads = run(call(triton_gated_attention), given, {}, weight)
    for name, got, want in zip(PARTS, [out, *grads], [expected, *expected_grads], strict=False):
        hold(got, want, name=name)


def test_queries_that_see_nothing_get_zeros_and_give_none():
    (q, k, v, keep), options = inputs(20, 2, 1, 16, padding="right")
    keep = torch.zeros_like(keep)  # queries in the padding see real tokens alone, all of them evicted
    out, grads = run(triton_gated_attention, single([q, k, v, keep]), options, 1.0)
    hidden = ~options["key_valid"]
    assert hidden.any() and out[:, 0][hidden].abs().sum() == 0
    assert grads[0][:, 0][hidden].abs().sum() == 0
    compare([q, k, v, keep], options)


def evicted_blocks(length=88):
    """Every key of the blocks 1, 2 and 4 is evicted, and half of the others."""
    (q, k, v, keep), options = inputs(length, 2, 1, 16, recent=3, sinks=1)
    q, k, v, keep = (x.detach()[:1].clone() for x in (q, k, v, keep))
    keep[:, :, BLOCK : 3 * BLOCK] = 0
    keep[:, :, 4 * BLOCK : 5 * BLOCK] = 0
    return [q, k, v, keep], options


def test_blocks_of_evicted_keys_change_nothing():
    tensors, options = evicted_blocks()
    compare(tensors, options)
    q, k, v, keep = single(tensors)
    weight = torch.randn_like(q)
    exact = exactly((q, k, v), torch.float32)
    want = run(lambda *x: reference_gated_attention(*x, keep, **options), exact, {}, weight.double())[1]
    got = run(lambda *x: triton_gated_attention(*x, keep, **options), (q, k, v), {}, weight)[1]  # no flag gradient
    for mine, theirs in zip(got, want, strict=True):
        hold(mine, theirs)


def test_blocks_of_evicted_keys_are_not_read():
    tensors, options = evicted_blocks()
    q, k, v, keep = single(tensors)
    k[:, :, BLOCK : 3 * BLOCK], v[:, :, BLOCK : 3 * BLOCK] = float("nan"), float("nan")
    out, (dq, dk, dv) = run(lambda *x: triton_gated_attention(*x, keep, **options), (q, k, v), {}, 1.0)
    poisoned = torch.zeros(88, dtype=torch.bool)
    poisoned[BLOCK : 4 * BLOCK] = True  # the blocks that are or, by `recent`, meet them
    for grad in (out, dq):
        assert torch.isfinite(grad[:, :, ~poisoned]).all() and not torch.isfinite(grad[:, :, poisoned]).all()
    assert torch.isfinite(dk[:, :, 4 * BLOCK :]).all() and torch.isfinite(dv[:, :, 4 * BLOCK :]).all()


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_a_packed_document_is_what_it_is_alone(case):
    packed, alone = packed_and_alone(triton_gated_attention, (16, 1, 3, 19), torch.float32, **TOGETHER[case])
    for name, got, want in zip(PARTS, packed, alone, strict=True):
        hold(got, want, name=name)


def test_blocks_of_other_documents_are_not_read():
    tensors, options = inputs(5 * BLOCK, 2, 1, 16)
    options["first"] = (torch.arange(5 * BLOCK) >= 2 * BLOCK).long().expand(2, -1) * 2 * BLOCK
    q, k, v, keep = single(tensors)
    k[:, :, : 2 * BLOCK] = v[:, :, : 2 * BLOCK] = q[:, :, 2 * BLOCK :] = float("nan")
    earlier, later = slice(0, 2 * BLOCK), slice(2 * BLOCK, None)
    for poisoned, names, kept in (((k, v), (0, 1, 2, 3), later), ((q,), (2, 3, 4), earlier)):
        given = [x if any(x is y for y in poisoned) else x.nan_to_num(0.5) for x in (q, k, v, keep)]
        out, grads = run(triton_gated_attention, given, options, 1.0)
        results = [out, *grads]
        assert all(torch.isfinite(results[i][:, :, kept]).all() for i in names)
        assert not any(torch.isfinite(results[i]).all() for i in names)


def test_tables_list_the_blocks_with_a_kept_key():
    keep = torch.zeros(1, 2, 70)
    keep[0, 0, 37], keep[0, 1, 69], keep[0, 1, 20] = 1, 0.5, 1
    valid = torch.ones(1, 70, dtype=torch.bool)
    valid[0, :18] = False  # so that the sink is in the second block
    gate, padding, listing, before = kernels._tables(keep, valid, 1, BLOCK)
    assert before.tolist() == [[[0, 0, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2]]]
    assert listing[0, 0, :2].tolist() == [1, 2] and listing[0, 1, :2].tolist() == [1, 4]
    assert gate[0, 1, 69] == -1 and gate[0, 0, 18] == 0 and gate[0, 0, 17] == padding[0, 17] == float("-inf")


def test_evicted_sinks_get_a_finite_gradient():
    (q, k, v, _), options = inputs(32, 2, 1, 8)
    q, k = q.detach().abs(), k.detach()
    k[:, :, 0] = 200.0
    keep = torch.ones(2, 1, 32)
    keep[:, :, 0] = 0
    _, grads = run(triton_gated_attention, single([q, k, v, keep]), options, torch.randn(2, 2, 32, 8))
    assert torch.isfinite(grads[3]).all()
    assert grads[3][:, 0, 0].abs().min() > 0 and grads[3].abs().max() < 1e3


def test_what_is_saved_is_linear_in_length():
    sizes = []
    for length in (32, 64, 128):
        q, k, v, keep = [x.requires_grad_() for x in single(inputs(length, 2, 1, 1)[0])]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x.numel()) or x, lambda x: x):
            triton_gated_attention(q, k, v, keep, None, 1.0, window=1)
        sizes.append(sum(saved))
    assert sizes[1] <= 2.05 * sizes[0] and sizes[2] <= 2.05 * sizes[1]


def test_the_tuner_can_call_every_shape(monkeypatch):
    called = []

    def bench(call, quantiles):
        call()
        called.append(1)
        return [1.0] * 3

    (q, k, v, keep), options = inputs(33, 2, 1, 16)
    given = single([q, k, v, keep])
    expected, expected_grads = run(reference_gated_attention, exactly(given, torch.float32), options, 1.0)
    monkeypatch.setattr("ag.kernels.tiles.interpreting", lambda: False)
    shapes = {"FORWARD": (kernels._forward, ROWS, 2**15), "QUERIES": (kernels._backward_queries, ROWS, 2**15)}
    for name, (kernel, some, room) in (shapes | {"KEYS": (kernels._backward_keys, kernels.OF_KEYS, 2**14)}).items():
        timed = tuned(kernels.KEY, some, room, ROWS=16, KEYS=32)(kernel)
        monkeypatch.setitem(vars(timed), "do_bench", bench)
        monkeypatch.setattr(kernels, name, timed)
    out, grads = run(triton_gated_attention, given, options, 1.0)
    assert len(called) == 9
    for name, got, want in zip(PARTS, [out, *grads], [expected, *expected_grads], strict=True):
        hold(got, want, name=name)


def test_the_operation_chooses_triton_and_compiled_models_keep_working(monkeypatch):
    tensors, options = inputs(20, 2, 1, 16)
    monkeypatch.setenv("AG_KERNELS", "triton")
    compiled = torch.compile(gated_attention, backend="aot_eager")
    want = run(triton_gated_attention, single(tensors), options, 1.0)
    for function in (gated_attention, compiled):
        got = run(function, single(tensors), options, 1.0)
        assert torch.equal(got[0], want[0])
        for mine, theirs in zip(got[1], want[1], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(name):
    check_gated_attention(triton_gated_attention, reference_gated_attention, name, 40)
