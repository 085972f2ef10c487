"""Products of few tokens: every version against float64."""

import logging

import pytest
import torch

from ag.kernels.linear import cpu, linear
from tests.support.bounds import near, right
from tests.support.compiled import needs, versions

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 1537), (4, 7), (577, 64)])
@versions("linear", "reference", "cpp")
def test_versions_agree_with_float64(version, rows, size, tokens, dtype, threads):
    threads(2)
    make = torch.Generator().manual_seed(rows * size)
    x, weight, bias = (
        torch.randn(*shape, generator=make).to(dtype) for shape in ((1, tokens, size), (rows, size), (rows,))
    )
    for b in ([], [bias]):
        got = version(x, weight, *b)
        assert got.dtype == dtype
        near(got, right(lambda x, weight, *b: [torch.nn.functional.linear(x, weight, *b)], x, weight, *b)[0])


@needs(cpu.KERNEL)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_a_bit_and_states_may_have_gaps(tokens, dtype, threads):
    weight, wide, outs = torch.randn(601, 128).to(dtype), torch.randn(tokens, 128, 2).to(dtype), []
    for count in (1, 2, 3):
        threads(count)
        outs.append(cpu.linear(wide[..., 0], weight))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], cpu.linear(wide[..., 0].contiguous(), weight))


@needs(cpu.KERNEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_and_undefined_numbers_go_on(dtype):
    weight = torch.eye(5).to(dtype)
    weight[1, 1], weight[2, 2] = float("inf"), float("nan")
    got = cpu.linear(torch.tensor([1.0, -2.0, 1.0, 3e38, 0.0]).to(dtype), weight)
    assert got[1] == -float("inf") or got[1].isnan()  # inf * 0 of the others
    assert got[2].isnan()
    assert got[0].isfinite()


@needs(cpu.KERNEL)
def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even():
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12, -(1 + 2**-8), 3.3e38, 2.0**-130])
    parts = torch.stack([values.bfloat16().float(), values - values.bfloat16().float()], 1)
    weight = parts.bfloat16()
    exact = weight.float().sum(1)
    assert torch.equal(cpu.linear(torch.ones(2, dtype=torch.bfloat16), weight), exact.bfloat16())


def test_what_cannot_run_in_c_plus_plus_is_said(fresh, caplog):
    caplog.set_level(logging.INFO)
    x, weight = torch.ones(8), torch.ones(4, 8)
    both = "are not both float32 or bfloat16"
    for states, matrix, reason in [
        (x.half(), weight.half(), f"states of torch.float16 and a weight of torch.float16 {both}"),
        (x, torch.ones(8, 4).T, "the weight is not contiguous"),
    ]:
        assert linear(states, matrix).tolist() == [8.0] * 4
        assert caplog.messages.pop() == f"linear: reference (cpp: {reason})"
        caplog.clear()
