"""The norm of Llama: every version against float64, and the C++ version where it rounds."""

import logging

import pytest
import torch

from ag.kernels.rms_norm import cpu, reference, rms_norm
from tests.support.bounds import near, right
from tests.support.compiled import needs, versions

EPS = 1e-5


def exact(x, weight):
    return [weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 5, 64), (1, 300, 577)])
@versions("rms_norm", "reference", "cpp")
def test_versions_agree_with_float64(version, shape):
    make = torch.Generator().manual_seed(sum(shape))
    x, weight = (torch.randn(*size, generator=make).bfloat16() for size in (shape, shape[-1:]))
    got = version(x, weight, EPS)
    assert got.dtype == torch.bfloat16 and got.shape == x.shape
    near(got, right(exact, x, weight)[0])


@needs(cpu.KERNEL)
def test_each_rounding_is_where_the_model_has_it():
    """The mean square of ones and minus ones is 1 in any order, so that nothing but the roundings can differ."""
    make = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(3, 50, 1, 80, generator=make) < 0.5, 1.0, -1.0).bfloat16()
    weight = torch.randn(80, generator=make).bfloat16()
    for eps in (0.0, 0.1, 3.0):
        assert torch.equal(cpu.rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps))


@needs(cpu.KERNEL)
def test_infinite_and_undefined_numbers_go_on_and_states_may_have_gaps():
    x = torch.ones(2, 3, 40, 2).bfloat16()
    x[0, 0, 3], x[0, 1, 37] = float("nan"), float("inf")
    weight = torch.ones(40).bfloat16()
    got, want = (f(x[..., 0], weight, EPS) for f in (cpu.rms_norm, reference.rms_norm))
    assert torch.equal(got.isnan(), want.isnan()) and got[0, 0].isnan().all()
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_what_cannot_run_in_c_plus_plus_is_said(fresh, caplog):
    caplog.set_level(logging.INFO)
    assert rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]
    reason = "states of torch.float32 and a weight of torch.float32 are not both bfloat16"
    assert caplog.messages == [f"rms_norm: reference (cpp: {reason})"]
