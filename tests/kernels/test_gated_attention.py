import pytest
import torch

from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_attention.chunked import _Problem, chunked_gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.softmax import Softmax
from tests.support.bounds import bounded, hold
from tests.support.hard import PARTS

SINKS = Softmax(sinks=torch.tensor([0.3, -2.0, 1.7, 4.0, -0.5, 0.9]))  # of so many heads
CAPPED = Softmax(cap=1.5)  # of logits with a standard deviation of about 1
CASES = {
    "plain": {},
    "recent": {"recent": 5},
    "sinks": {"sinks": 3},
    "window": {"window": 17},
    "window-sinks-recent": {"window": 40, "sinks": 4, "recent": 3},
    "dense": {"dense": 0.5},
    "dense-beyond-the-first-tiles": {"dense": 1.0},
    "right-padding": {"padding": "right"},
    "left-padding": {"padding": "left", "sinks": 2, "recent": 2},
    "left-padding-window-dense": {"padding": "left", "window": 33, "dense": 0.5},
    "documents": {"documents": True},
    "documents-sinks-recent": {"documents": True, "sinks": 3, "recent": 4},
    "documents-left-padding-sinks-window-dense": {
        "documents": True,
        "padding": "left",
        "sinks": 2,
        "recent": 3,
        "window": 21,
        "dense": 0.5,
    },
    "documents-right-padding-sinks": {"documents": True, "padding": "right", "sinks": 2},
    "sink-logits": {"softmax": SINKS, "sinks": 2, "recent": 3, "padding": "left", "dense": 0.5},
    "sink-logits-window": {"softmax": SINKS, "window": 17},
}


def starts(borders, length):
    """The column where the document of each token begins."""
    return torch.tensor([max(b for b in (0, *borders) if b <= t) for t in range(length)])


def inputs(
    length, heads, kv_heads, dim, dtype=torch.float64, soft=False, padding=None, dense=0.0, documents=False, **options
):
    """Draw q, k, v and flags, and make the options; of sink logits as many as there are heads."""
    generator = torch.Generator().manual_seed(length * 31 + heads)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(2, heads, length, dim), draw(2, kv_heads, length, dim), draw(2, kv_heads, length, dim)
    keep = torch.rand(2, kv_heads, length, generator=generator, dtype=torch.float64)
    keep = keep if soft else (keep > 0.6).double()
    options["key_valid"] = None
    if padding:
        valid = torch.arange(length).expand(2, length) < torch.tensor([[length], [length - length // 3]])
        options["key_valid"] = valid if padding == "right" else valid.flip(1)
    options["dense_until"] = torch.tensor([int(length * dense), int(length * dense / 2)]) if dense else None
    if documents:
        borders = (length // 5, length // 5 + 1, length // 2, length - 2), (length // 3,)
        options["first"] = torch.stack([starts(row, length) for row in borders])
    options["scaling"] = dim**-0.5
    if "softmax" in options:
        options["softmax"] = options["softmax"].of_heads(slice(heads))
    return [x.to(dtype).requires_grad_() for x in (q, k, v, keep)], options


def exactly(tensors, dtype=torch.float64):
    """The tensors as operands of a computation in a type."""
    return [bounded(x, dtype) for x in tensors]


def run(function, tensors, options, weight):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*tensors, **options)
    (out * weight).sum().backward()
    return out.detach(), [x.grad for x in tensors]


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("length", "heads", "kv_heads", "dim"), [(63, 4, 4, 20), (131, 6, 2, 60), (257, 3, 1, 16)])
def test_chunked_equals_reference(length, heads, kv_heads, dim, case, soft):
    check_chunked(length, heads, kv_heads, dim, CASES[case], soft)


def check_chunked(length, heads, kv_heads, dim, case, soft):
    """Hold the output and every gradient to the reference."""
    tensors, options = inputs(length, heads, kv_heads, dim, soft=soft, **case)
    weight = torch.randn(2, heads, length, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    expected, expected_grads = run(reference_gated_attention, exactly(tensors), options, weight)
    out, grads = run(chunked_gated_attention, tensors, options, weight)
    for name, got, want in zip(PARTS, [out, *grads], [expected, *expected_grads], strict=True):
        hold(got, want, name=name)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("sinks", [None, SINKS.sinks], ids=["cap", "cap-and-sink-logits"])
@pytest.mark.parametrize("case", ["plain", "left-padding-window-dense", "documents-sinks-recent"])
def test_chunked_equals_reference_where_logits_are_capped(case, sinks, soft):
    options = CASES[case] | {"softmax": CAPPED._replace(sinks=sinks)}
    check_chunked(67, 4, 2, 20, options, soft)


def test_queries_that_see_evicted_keys_alone():
    (q, k, v, keep), options = inputs(37, 4, 2, 16, padding="right")
    tensors = [q, k, v, torch.zeros_like(keep)]  # queries in the padding see real tokens, all of them evicted
    expected, expected_grads = run(reference_gated_attention, exactly(tensors), options, 1.0)
    out, grads = run(chunked_gated_attention, tensors, options, 1.0)
    hidden = ~options["key_valid"]
    assert hidden.any() and out[:, 0][hidden].abs().sum() == grads[0][:, 0][hidden].abs().sum() == 0
    for got, want in zip([out, *grads], [expected, *expected_grads], strict=True):
        hold(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_in_lower_precision(dtype):
    tensors, options = inputs(131, 6, 2, 32, **CASES["window-sinks-recent"])
    weight = torch.randn(2, 6, 131, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rounded = [x.detach().to(dtype) for x in tensors[:3]] + [tensors[3].detach().float()]
    weight = weight.to(dtype)
    expected, expected_grads = run(reference_gated_attention, exactly(rounded, dtype), options, weight.double())
    out, grads = run(chunked_gated_attention, rounded, options, weight)
    assert out.dtype == dtype
    assert grads[3].dtype == torch.float32
    for name, got, want in zip(PARTS, [out, *grads], [expected, *expected_grads], strict=True):
        hold(got, want, name=name)


DOCUMENTS = (64, 1, 7, 130, 16)  # in Triton's interpreter and on a CPU some begin where a tile does
TOGETHER = {
    "plain": {},
    "sinks-recent": {"sinks": 3, "recent": 4},
    "window-sinks": {"window": 17, "sinks": 2},
    "left-padding-sinks": {"padding": "left", "sinks": 3},
    "right-padding-sinks": {"padding": "right", "sinks": 3, "recent": 2},
}


def packed_and_alone(function, lengths=DOCUMENTS, dtype=torch.float64, **case):
    """Output and gradients of documents in one row, and by the reference of each by itself, joined."""
    tensors, options = inputs(sum(lengths), 4, 2, 12, dtype, soft=True, **case)
    borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
    first = starts(borders[:-1], sum(lengths)).expand(2, -1)
    weight = torch.randn(2, 4, sum(lengths), 12, generator=torch.Generator().manual_seed(5), dtype=dtype)
    out, grads = run(function, tensors, options | {"first": first}, weight)
    parts = []
    for start, stop in zip(borders, borders[1:], strict=False):
        own = [x[:, :, start:stop] for x in tensors]
        valid = options["key_valid"] if options["key_valid"] is None else options["key_valid"][:, start:stop]
        alone = options | {"key_valid": valid}
        own_out, own_grads = run(
            reference_gated_attention, exactly(own, dtype), alone, weight[:, :, start:stop].double()
        )
        parts.append([own_out, *own_grads])
    return [out, *grads], [torch.cat(x, 2) for x in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", TOGETHER, ids=str)
@pytest.mark.parametrize("function", [chunked_gated_attention, reference_gated_attention])
def test_a_packed_document_is_what_it_is_alone(function, case):
    packed, alone = packed_and_alone(function, **TOGETHER[case])
    for name, got, want in zip(PARTS, packed, alone, strict=True):
        hold(got, want, name=name)


def test_tiles_end_at_documents():
    (q, k, v, keep), options = inputs(512, 1, 1, 8)
    first = torch.arange(512).expand(2, -1) // 128 * 128  # documents of two tiles
    problem = _Problem(q, k, v, keep, None, 1.0, 1, 0, None, None, first)
    tiles = [(t.rows.start, t.columns.start, t.near) for t in problem.tiles()]
    assert tiles == [(start, start // 128 * 128, start % 128) for start in range(0, 512, 64)]


@pytest.mark.parametrize("function", [chunked_gated_attention, reference_gated_attention])
def test_gradcheck_for_soft_flags(function):
    tensors, options = inputs(9, 2, 1, 4, soft=True, sinks=1, recent=2)
    if function is chunked_gated_attention:  # the reference writes the flags' gradient out on a detached copy
        assert torch.autograd.gradcheck(lambda *x: function(*x, **options), tensors)
    q, k, v, keep = (x.detach() for x in tensors)
    grads = run(function, (q, k, v, keep), options, torch.ones_like(q))[1]
    exact = exactly((q, k, v))

    def slope(token, step):
        """A difference quotient, with the rounding of its numerator."""
        moved = [keep.clone(), keep.clone()]
        moved[0][0, 0, token] += step
        moved[1][0, 0, token] -= step
        up, down = (reference_gated_attention(*exact, flags, **options).sum() for flags in moved)
        return (up - down) / (2 * step)

    for token in range(9):
        narrow, wide = slope(token, 1e-5), slope(token, 2e-5)
        truncated = (wide - narrow).exact.abs()  # three times the error of the narrow one
        hold(grads[3][0, 0, token], narrow.exact, truncated + narrow.error)


def test_evicted_tokens_get_a_finite_gradient_even_when_they_are_sinks():
    (q, k, v, _), options = inputs(32, 2, 1, 8, dtype=torch.float32)
    q = q.detach().abs().requires_grad_()
    k = k.detach()
    k[:, :, 0] = 200.0  # an attention sink with enormous logits
    keep = torch.ones(2, 1, 32)
    keep[:, :, 0] = 0
    _, grads = run(chunked_gated_attention, (q, k, v, keep), options, torch.randn(2, 2, 32, 8))
    assert torch.isfinite(grads[3]).all()
    assert (grads[3][:, 0, 0] != 0).all()
    assert grads[3].abs().max() < 1e3


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
