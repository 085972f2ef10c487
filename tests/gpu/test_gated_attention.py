"""Gated attention on a card: output and every gradient against the formula in float64."""

import functools

import pytest
import torch

from ag.kernels.gated_attention import gated_attention
from tests.gpu.cases import (
    DEVICE,
    FLAGS,
    OPTIONS,
    arguments,
    covering,
    draw,
    exact,
    formula,
    here,
    name,
    plain_torch,
    run,
)
from tests.support.bounds import near, right

pytestmark = pytest.mark.gpu
NAMES = ["out", "dq", "dk", "dv", "dkeep"]


def compare(function, tensors, keep, options):
    tensors = tensors if keep is None else [*tensors, keep]
    rest = options if keep is not None else {"keep": None, **options}
    weight = torch.randn(tensors[0].shape, device=DEVICE).to(tensors[0].dtype)
    got = run(function, tensors, weight, rest)
    want = exact(formula, tensors, weight, rest)
    beside = cancelled(tensors, weight, rest)
    for what, mine, theirs in zip(NAMES, got, want, strict=keep is not None):
        theirs = theirs._replace(moved=theirs.moved + beside.get(what, 0.0))
        near(mine, theirs, f"{what} of {tuple(tensors[0].shape)}", tensors[0].dtype)
    again = run(function, tensors, weight, rest)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, again, strict=True))


def cancelled(tensors, weight, options):
    """Norms of what a relative change of 1 of the gradients of attention weights would do to dq and dk.

    A logit's gradient is its weight times a difference of two products, which are equal where a query sees one key.
    Their roundings are left, and no change of the operands shows them.
    """
    (q, k, v, *keep), size = tensors, lambda x: x.double().norm(dim=-1, keepdim=True)
    mean, _, _, paid, *_ = exact(formula, [q, k, size(k) * size(v), *keep], size(weight) * size(q), options)
    dq, dk = size(weight) * mean.value, size(v) * paid.value
    return {"dq": options["scaling"] * float(dq.norm()), "dk": options["scaling"] * float(dk.norm())}


@pytest.mark.parametrize(("dim", "dtype", "sizes", "case", "flags"), covering(tuple(OPTIONS), FLAGS), ids=name)
def test_output_and_gradients(triton_only, dim, dtype, sizes, case, flags):
    for length, group in sizes:
        tensors, keep, options = arguments(
            length=here(length), group=group, dim=dim, dtype=dtype, flags=flags, **OPTIONS[case]
        )
        compare(gated_attention, tensors, keep, options)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_plain_torch(dtype, case):
    """The version without Triton; torch's default leaves TF32 out of float32 products."""
    tensors, keep, options = arguments(length=here(301), group=4, dim=64, dtype=dtype, flags="soft", **OPTIONS[case])
    weight = torch.randn(tensors[0].shape, device=DEVICE)
    got = run(plain_torch, [*tensors, keep], weight, options)
    want = exact(formula, [*tensors, keep], weight.to(tensors[0].dtype), options)
    for what, mine, theirs in zip(NAMES, got, want, strict=True):
        near(mine, theirs, what, tensors[0].dtype)


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_products_of_float32_err_as_float32_does(triton_only, dim):
    """The bound of ag.kernels.tiles.FLOAT32; a product of TF32 numbers alone errs by some 2^-11 of the same sum."""
    from tests.gpu.products import product

    torch.manual_seed(dim)
    scale = torch.exp2(torch.randint(-9, 10, (32, dim), device=DEVICE).float())
    a, b = draw(32, dim) * scale, draw(32, dim) / scale
    exact, terms = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    assert bool(((product(a, b).double() - exact).abs() <= (6 + dim) * 2.0**-23 * terms).all())


def test_dense_attention(triton_only):
    """Without flags it is that of PyTorch."""
    length = here(2048)
    q, k, v = (draw(1, heads, length, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    plain = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    (want,) = right(lambda *x: [plain(*x)], q, k, v)
    near(gated_attention(q, k, v), want, "out", q.dtype)


def test_a_tensor_of_more_than_2_31_elements(triton_only, card):
    """Offsets of sequences and rows are 64 bits wide."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free memory")
    length, dim, far = 130, 64, 2**31 + 2**20
    flat = torch.empty(far + length * dim, dtype=torch.bfloat16, device=DEVICE)
    two = flat.as_strided((2, 1, length, dim), (far, length * dim, dim, 1))
    two.copy_(draw(2, 1, length, dim, dtype=torch.bfloat16))
    out = gated_attention(two, two, two)
    assert torch.equal(out, gated_attention(*[two.contiguous()] * 3))
    assert float(out[1].abs().sum()) > 0


def test_memory_is_linear_in_the_length(triton_only, card):
    def peak(length):
        q = draw(1, 8, length, 64, dtype=torch.bfloat16).requires_grad_()
        k, v = (draw(1, 2, length, 64, dtype=torch.bfloat16) for _ in range(2))
        keep = (torch.rand(1, 2, length, device=DEVICE) > 0.7).float().requires_grad_()
        gated_attention(q, k, v, keep).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gated_attention(q, k, v, keep).sum().backward()
        return (torch.cuda.max_memory_allocated() - before) / (q.numel() * q.element_size())

    assert peak(8192) < 10 and peak(32768) < 10
