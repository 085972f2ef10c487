"""Attention under keep flags: the reference against its definition, other versions and gradients against it."""

import itertools
import math

import pytest
import torch

from ag.kernels.gated_attention import chunked, gated_attention, reference
from ag.kernels.gated_attention.masks import Masks
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounds import near, right
from tests.support.compiled import INTERPRETED, versions
from tests.support.hard import HARD, SCALING, hard
from tests.support.memory import Largest

PARTS = ["out", "dq", "dk", "dv", "dkeep", "dsinks"]
SINKS = torch.tensor([0.3, -2.0, 1.7, 4.0, -0.5, 0.9])  # one for each head
CASES = {
    "plain": {},
    "without flags": {"flags": None, "padding": "left", "recent": 4},
    "recent": {"recent": 5},
    "sinks": {"sinks": 3},
    "window": {"window": 17},
    "window-sinks-recent": {"window": 40, "sinks": 4, "recent": 3},
    "dense": {"dense": 1.0},
    "right-padding": {"padding": "right"},
    "evicted alone": {"padding": "right", "flags": "none", "recent": 2},  # in the padding, of evicted tokens
    "left-padding": {"padding": "left", "sinks": 2, "recent": 2},
    "documents": {"documents": True, "sinks": 3, "recent": 4},
    "all": {"documents": True, "padding": "left", "sinks": 2, "recent": 3, "window": 21, "dense": 0.5},
    "sink-logits": {"softmax": Softmax(None, SINKS), "sinks": 2, "recent": 3, "padding": "left", "dense": 0.5},
    "capped": {"softmax": Softmax(1.5), "documents": True, "sinks": 3, "recent": 4},
    "capped-beside-sinks": {"softmax": Softmax(1.5, SINKS), "padding": "left", "window": 33, "dense": 0.5},
}
SHAPES = [(37, 2, 1, 20)] if INTERPRETED else [(63, 4, 4, 20), (131, 6, 2, 60), (257, 3, 1, 16)]
both = versions("gated_attention", "chunked", "triton")
BLOCK = 16 if INTERPRETED else chunked.BLOCK


def given(length, heads, kv_heads, dim, flags="hard", padding=None, dense=0.0, documents=False, softmax=PLAIN, **masks):
    """Draw q, k, v and flags in float32, and make the masks; the softmax has a sink logit for each head."""
    make = torch.Generator().manual_seed(length * 31 + heads)
    q, k, v = (torch.randn(2, n, length, dim, generator=make) for n in (heads, kv_heads, kv_heads))
    keep = torch.rand(2, kv_heads, length, generator=make)
    keep = {"soft": keep, "hard": (keep > 0.6).float(), "none": keep * 0, None: None}[flags]
    if padding:
        valid = torch.arange(length).expand(2, length) < torch.tensor([[length], [length - length // 3]])
        masks["key_valid"] = valid if padding == "right" else valid.flip(1)
    if dense:
        masks["dense_until"] = torch.tensor([int(length * dense), int(length * dense / 2)])
    if documents:
        borders = [0, length // 5, length // 5 + 1, length // 2, length - 2], [0, length // 3]
        first = [[max(b for b in row if b <= t) for t in range(length)] for row in borders]
        masks["first"] = torch.tensor(first)
    return (q, k, v, keep), Masks(**masks), dim**-0.5, softmax.of_heads(slice(heads))


def gradients(version, operands, masks, scaling, softmax, weight):
    """Return the output and the gradient of each operand, of the sink logits too."""
    sinks = None if softmax.sinks is None else softmax.sinks.to(operands[0].dtype)
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (*operands, sinks)]
    out = version(*leaves[:4], masks, scaling, softmax._replace(sinks=leaves[4]))
    found = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, found, weight.to(out.dtype).expand_as(out))]


def check(version, operands, masks, scaling, softmax=PLAIN, dtype=torch.float32):
    """Hold the output and every gradient to the reference in float64."""
    q, k, v, keep = operands
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    make = torch.Generator().manual_seed(5)
    weight = torch.randn(*q.shape[:3], v.shape[-1], generator=make).to(dtype)

    def exactly(q, k, v, weight, *keep):
        return gradients(reference.gated_attention, (q, k, v, *(keep or [None])), masks, scaling, softmax, weight)

    got = gradients(version, (q, k, v, keep), masks, scaling, softmax, weight)
    want = right(exactly, q, k, v, weight, *([] if keep is None else [keep]))
    for name, mine, theirs in zip(PARTS if keep is not None else [*PARTS[:4], PARTS[5]], got, want, strict=False):
        near(mine, theirs, name, dtype)


def by_hand(q, k, v, keep, masks, scaling, softmax):
    """The definition, one pair at a time."""
    valid, recent, sinks, window, dense, first = masks
    out = torch.zeros_like(q)
    for b, h, j in itertools.product(*map(range, q.shape[:3])):
        kv, total = h * k.shape[1] // q.shape[1], 0.0 if softmax.sinks is None else math.exp(softmax.sinks[h])
        for t in range(j + 1):
            start = 0 if first is None else int(first[b, t])
            if (window is not None and j - t >= window) or (first is not None and t < first[b, j]):
                continue
            if valid is not None and not valid[b, t]:
                continue
            place = t - start if valid is None else int(valid[b, start:t].sum())
            protected = j - t < recent or place < sinks or (dense is not None and j < dense[b])
            s = scaling * float(q[b, h, j] @ k[b, kv, t])
            s = s if softmax.cap is None else softmax.cap * math.tanh(s / softmax.cap)
            weight = math.exp(s) * (1.0 if protected or keep is None else float(keep[b, kv, t]))
            total, out[b, h, j] = total + weight, out[b, h, j] + weight * v[b, kv, t]
        out[b, h, j] /= total or 1.0
    return out


@versions("gated_attention", "reference")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_the_definition(version, case):
    operands, *options = given(23, 4, 2, 5, **{"flags": "soft"} | case)
    operands = [None if x is None else x.double() for x in operands]
    torch.testing.assert_close(version(*operands, *options), by_hand(*operands, *options), rtol=1e-12, atol=1e-12)


@versions("gated_attention", "reference", "chunked")
def test_gradients_are_those_of_the_formula(version):
    """Of flags too: by differences, as the reference writes their gradient out on a detached copy."""
    operands, masks, scaling, _ = given(9, 2, 1, 4, "soft", sinks=1, recent=2, padding="left")
    softmax, leaves = Softmax(1.5, SINKS[:2].double()), [x.double() for x in operands]

    def summed(q, k, v, keep, sinks):
        return version(q, k, v, keep, masks, scaling, softmax._replace(sinks=sinks)).sum()

    found = [x.requires_grad_() for x in (*leaves, softmax.sinks)]
    for x, grad in zip(found, torch.autograd.grad(summed(*found), found), strict=True):
        with torch.no_grad():
            for at in itertools.product(*map(range, x.shape)) if x.ndim < 4 else [(0, 0, 5, 2), (1, 0, 8, 3)]:
                sides, here = [], float(x[at])
                for step in (1e-5, -1e-5):
                    x[at] = here + step
                    sides.append(float(summed(*found)))
                x[at] = here
                assert float(grad[at]) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6, abs=1e-9)


def chosen():
    """Each shape under each case: one shape a case by day, in the interpreter three cases that have every mask."""
    for n, shape in enumerate(SHAPES):
        for i, case in enumerate(CASES):
            by_day = case in ("without flags", "all", "sink-logits") if INTERPRETED else i % len(SHAPES) == n
            if not (INTERPRETED and "capped" in case):
                yield pytest.param(shape, case, marks=[] if by_day else pytest.mark.nightly)


@both
@pytest.mark.parametrize(("shape", "case"), list(chosen()), ids=str)
def test_versions_equal_the_reference(version, shape, case):
    check(version, *given(*shape, **{"flags": ("hard", "soft")[len(case) % 2]} | CASES[case]))


@both
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(version, dtype):
    check(version, *given(33, 6, 2, 32, window=40, sinks=4, recent=3), dtype=dtype)


@both
@pytest.mark.parametrize("length", [17, pytest.param(2, marks=pytest.mark.nightly)])
def test_strides_odd_sizes_and_values_of_another_width(version, length):
    """Flags and padding are transposed, as gates and collators give them."""
    (q, k, v, keep), masks, *options = given(length, 6, 2, 5, padding="left", sinks=2, recent=3)
    q, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, torch.cat([v] * 3, -1)[..., 1:14]))
    keep, valid = (x.mT.contiguous().mT for x in (keep, masks.key_valid))
    check(version, (q, k.mT.contiguous().mT, v, keep), masks._replace(key_valid=valid), *options)


@both
@pytest.mark.parametrize("name", HARD if not INTERPRETED else HARD[2:3])
def test_hard_inputs(version, name):
    check(version, hard(name, 40 if INTERPRETED else 300), Masks(recent=4, sinks=1), SCALING)


@both
def test_queries_that_see_nothing_get_zeros_and_give_none(version):
    operands, masks, *options = given(20, 2, 1, 16, "none", padding="right")
    out, dq, *_ = gradients(version, operands, masks, *options, torch.ones(2, 2, 20, 16))
    assert not out[:, 0][~masks.key_valid].any() and not dq[:, 0][~masks.key_valid].any()


@both
def test_queries_that_see_the_sink_logit_alone_move_the_flags(version):
    check(version, *given(20, 2, 1, 16, "none", padding="right", softmax=Softmax(None, SINKS)))


@both
def test_evicted_sinks_get_a_finite_gradient(version):
    (q, k, v, keep), *options = given(32, 2, 1, 8)
    q, k, keep = q.abs(), k.clone(), torch.ones_like(keep)
    k[:, :, 0], keep[:, :, 0] = 200.0, 0  # an attention sink with enormous logits
    grad = gradients(version, (q, k, v, keep), *options, torch.randn(2, 2, 32, 8))[4]
    assert grad[:, 0, 0].abs().min() > 0 and grad.abs().max() < 1e3


@versions("gated_attention", "chunked")
def test_products_beyond_float16_are_scaled_first(version):
    """As of key biases in Qwen2: every query pays the first key alone, by a product of 100,000."""
    q, k, v = (torch.zeros(1, 2, 150, 16, dtype=torch.float16) for _ in range(3))
    q[..., 0], k[:, :, 0, 0], v[:] = 100.0, 1000.0, torch.randn(1, 2, 150, 16)
    out, *grads = gradients(version, (q, k, v, torch.ones(1, 2, 150)), Masks(), 0.1, PLAIN, torch.ones(1))
    assert torch.equal(out, v[:, :, :1].expand_as(v)) and all(x.isfinite().all() for x in grads)


@both
def test_other_documents_and_evicted_blocks_are_not_read(version):
    """What lies there is no number; Triton leaves out blocks of evicted keys too."""
    (q, k, v, keep), masks, *options = given(6 * BLOCK, 2, 1, 16, sinks=1, recent=3)
    first = (torch.arange(6 * BLOCK) >= 2 * BLOCK).long().expand(2, -1) * 2 * BLOCK
    poison = torch.zeros_like(k)
    poison[:, :, : 2 * BLOCK] = torch.nan
    weight, later = torch.ones_like(q), slice(2 * BLOCK, None)
    found = gradients(version, (q, k + poison, v + poison, keep), masks._replace(first=first), *options, weight)
    assert all(x[:, :, later].isfinite().all() for x in found[:4])
    assert not found[0][:, :, : 2 * BLOCK].isfinite().any()
    if INTERPRETED:
        keep[:, :, BLOCK : 3 * BLOCK], poison = 0, torch.zeros_like(k)
        poison[:, :, BLOCK : 3 * BLOCK] = torch.nan
        flags = lambda q, k, v, *rest: version(q, k, v, keep, *rest[1:])  # noqa: E731  without a gradient of the flags
        out, dq, dk, dv = gradients(flags, (q, k + poison, v + poison, None), masks, *options, weight)
        near_them = slice(BLOCK, 4 * BLOCK)  # the blocks that are, or meet them as recent ones
        assert all(x[:, :, 4 * BLOCK :].isfinite().all() and x[:, :, :BLOCK].isfinite().all() for x in (out, dq))
        assert dk[:, :, 4 * BLOCK :].isfinite().all() and dv[:, :, 4 * BLOCK :].isfinite().all()
        assert not out[:, :, near_them].isfinite().all()


@both
def test_a_tile_of_queries_before_the_first_token(version):
    """Left padding beside Llama 4's chunks: the first column that each query may see lies after the tile."""
    operands, masks, *options = given(3 * BLOCK, 2, 1, 16, sinks=2, recent=3)
    columns, start = torch.arange(3 * BLOCK).expand(2, -1), BLOCK + 5
    first = start + (columns - start).clamp_min(0) // BLOCK * BLOCK
    check(version, operands, masks._replace(key_valid=columns >= start, first=first), *options)


@both
def test_memory_is_linear_in_the_length(version):
    """Of what Triton saves; of the largest tensor that PyTorch makes."""
    sizes = []
    for length in (32, 64) if INTERPRETED else (512, 1024):
        operands, *rest = given(length, 2, 1, 8, "soft")
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x.numel()) or x, lambda x: x)
        with hooks, Largest() as largest:
            gradients(version, operands, *rest, torch.ones(1))
        sizes.append(sum(saved) if INTERPRETED else largest.size)
    assert sizes[1] <= 2.05 * sizes[0]


@versions("gated_attention", "triton")
def test_the_operation_chooses_triton_and_compiled_models_keep_working(version, monkeypatch):
    (q, k, v, keep), *rest = given(20, 2, 1, 16)
    monkeypatch.setenv("AG_KERNELS", "triton")
    want = version(q, k, v, keep, *rest)
    for function in (gated_attention, torch.compile(gated_attention, backend="aot_eager")):
        assert torch.equal(function(q, k, v, keep), want)


def test_wrong_shapes_are_named():
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 3, 8, 16)
    with pytest.raises(ValueError, match="Hkv"):
        gated_attention(q, k, k)
    with pytest.raises(ValueError, match=r"keep \(1, 4, 8\): .*\(1, 2, 8\)"):
        gated_attention(q, q[:, :2], q[:, :2], keep=torch.ones(1, 4, 8))
    with pytest.raises(ValueError, match="recent=0"):
        gated_attention(q, q, q, recent=0)
    with pytest.raises(ValueError, match=r"first \(8,\): .*\(1, 8\)"):
        gated_attention(q, q, q, first=torch.zeros(8, dtype=torch.long))
