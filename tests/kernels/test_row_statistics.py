"""Sums of row statistics: every version against the formulas in float64, pair by pair where that is needed."""

import logging
import shutil

import pytest
import torch

from ag.errors import UserError
from ag.kernels import native
from ag.kernels.row_statistics import cpu, reference_row_statistics, row_statistics
from ag.kernels.row_statistics.reference import KINDS

COMPILED = native.function(cpu.SOURCE, *cpu.ARGUMENTS)
needs_compiler = pytest.mark.skipif(isinstance(COMPILED, str), reason=f"C++: {COMPILED}")
VERSIONS = [
    pytest.param(cpu.row_statistics, id="cpp", marks=needs_compiler),
    pytest.param(reference_row_statistics, id="reference"),
]
CASES = {
    "one": {"rows": 1, "keys": 1},
    "w1-N513-G3": {"rows": 1, "keys": 513, "heads": 6, "kv_heads": 2},
    "w7-N33": {"rows": 7, "keys": 33},
    "w17-N257-G4-B2": {"batch": 2, "rows": 17, "keys": 257, "heads": 4, "kv_heads": 1},
    "w65-N1000-G2": {"rows": 65, "keys": 1000, "heads": 2},
    "w33-N4099-G1": {"rows": 33, "keys": 4099, "heads": 3, "kv_heads": 3},
}


def tile(batch=1, heads=2, kv_heads=1, rows=5, keys=9, dim=8, hidden=0.3):
    """Return logits, what counts, values and outputs in float64, exact in float32."""
    make = torch.Generator().manual_seed(rows * keys + heads)

    def draw(*shape):
        return torch.randn(*shape, generator=make).double()

    logits = draw(batch, heads, rows, keys) * 3
    logits[torch.rand(logits.shape, generator=make) < hidden] = -torch.inf
    logits[:, :, rows // 2, : keys // 2] = -torch.inf
    counted = torch.rand(batch, rows, generator=make) > 0.2
    counted[:, -1] = True
    if rows > 3:
        logits[:, :, 1] = -torch.inf  # a row that sees nothing
        counted[:, 1] = True
        logits[:, :, 2, keys // 3] = 500.0  # one that sees little else
    return logits, counted, draw(batch, kv_heads, keys, dim), draw(batch, heads, rows, dim)


def parts(kind, logits, counted, v, o):
    """Return the arguments of the operation."""
    if kind == "attention":
        return kind, logits, counted
    if kind == "value":
        return kind, logits, counted, v.square().sum(-1)
    dots = o @ v.repeat_interleave(logits.shape[1] // v.shape[1], 1).mT
    return kind, logits, counted, v.square().sum(-1), dots, o.square().sum(-1)


def by_definition(kind, logits, counted, v, o):
    """``||A (by_value v - by_key (v - o))||^2`` of every pair, from the vectors, in float64."""
    hidden = logits == -torch.inf
    a = torch.where(hidden, 0.0, (logits - logits.amax(-1, keepdim=True).clamp_min(-1e9)).exp())
    a = a / a.sum(-1, keepdim=True).clamp_min(1e-300)
    if kind == "attention":
        values = a
    else:
        v = v.repeat_interleave(logits.shape[1] // v.shape[1], 1)[:, :, None]
        s = torch.where(hidden, 0.0, logits)[..., None]
        o = o[:, :, :, None]
        change = {"value": v, "key": s * (v - o), "joint": v + s * (v - o)}[kind]
        values = a.square() * change.square().sum(-1)
    return (values * counted[:, None, :, None]).sum(2)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_version_equals_the_definition(version, kind, case):
    made = tile(**case)
    wanted = by_definition(kind, *made)
    assert bool((wanted > 0).any())
    found = version(*parts(kind, *(x if x.dtype == torch.bool else x.float() for x in made)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(reference_row_statistics(*parts(kind, *made)), wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_sees_gets_nothing(version, kind):
    logits, counted, v, o = (x if x.dtype == torch.bool else x.float() for x in tile(rows=20, keys=40))
    logits[..., 7] = -torch.inf
    assert not version(*parts(kind, logits, counted, v, o))[..., 7].any()
    assert not version(*parts(kind, torch.full_like(logits, -torch.inf), counted, v, o)).any()
    assert not version(*parts(kind, logits, torch.zeros_like(counted), v, o)).any()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["one", "row"])
def test_a_logit_that_is_not_a_number_shows(version, kind, where):
    logits, counted, v, o = (x if x.dtype == torch.bool else x.float() for x in tile(rows=20, keys=40, hidden=0.0))
    logits[0, 0, -1, 5 if where == "one" else slice(None)] = float("nan")
    found = version(*parts(kind, logits, counted, v, o))
    assert bool(found[0, 0].isnan().all())
    assert bool(found[0, 1].isfinite().all())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_distance_rounded_below_zero_counts_as_none(version):
    """The output is the one value that the row sees: its key error is 0, and never negative."""
    logits = torch.full((1, 1, 1, 3), -torch.inf)
    logits[..., 1] = 7.0
    v = torch.full((1, 1, 3, 5), 0.1) * 3
    found = version("key", logits, torch.ones(1, 1).bool(), v.square().sum(-1), 1.0001 * (v @ v.mT)[:, :, 1:2],
                    v.square().sum(-1)[..., 1:2])  # fmt: skip
    assert found.tolist() == [[[0.0, 0.0, 0.0]]]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [{"rows": 64, "keys": 2500, "heads": 3}, {"rows": 33, "keys": 9000, "heads": 1}])
def test_cpp_does_not_depend_on_the_number_of_threads(kind, case):
    arguments = parts(kind, *(x if x.dtype == torch.bool else x.float() for x in tile(**case)))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpu.row_statistics(*arguments))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_compiler
def test_arguments_need_not_be_contiguous():
    logits, counted, v, o = (x if x.dtype == torch.bool else x.float() for x in tile(batch=2, rows=8, keys=20))
    kind, *arguments = parts("joint", logits, counted, v, o)
    strided = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in arguments]
    assert not any(x.is_contiguous() for x in strided)
    assert torch.equal(cpu.row_statistics(kind, *strided), cpu.row_statistics(kind, *arguments))


def test_without_a_compiler_pytorch_takes_over_and_says_so_once(fresh, caplog):
    fresh.delenv("CXX", raising=False)
    fresh.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO)
    logits, counted, *_ = tile()
    for _ in range(2):
        found = row_statistics("attention", logits.float(), counted)
    assert torch.equal(found, reference_row_statistics("attention", logits.float(), counted))
    assert caplog.messages == ["row_statistics: reference (cpp: there is no C++ compiler (install g++))"]
    fresh.setenv("AG_KERNELS", "cpp")
    with pytest.raises(UserError, match=r"AG_KERNELS=cpp: row_statistics cannot run so: there is no C\+\+ compiler"):
        row_statistics("attention", logits.float(), counted)


@needs_compiler
def test_the_environment_forces_a_version(fresh):
    logits, counted, *_ = tile(rows=40, keys=70)
    for name, version in {"cpp": cpu.row_statistics, "reference": reference_row_statistics}.items():
        fresh.setenv("AG_KERNELS", name)
        wanted = version("attention", logits.float(), counted)
        assert torch.equal(row_statistics("attention", logits.float(), counted), wanted)


def test_float64_is_left_to_pytorch(fresh):
    made = tile()
    torch.testing.assert_close(row_statistics(*parts("joint", *made)), by_definition("joint", *made))
