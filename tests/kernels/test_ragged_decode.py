"""Decoding over ragged rows: every version against the plain one, and what happens without a compiler."""

import logging
import shutil
import sys
import types

import pytest
import torch
from compiled import needs

from ag.errors import UserError
from ag.kernels.ragged_decode import (
    chunked_ragged_decode,
    cpu,
    flash,
    ragged_decode,
    ragged_decode_weights,
    reference_ragged_decode,
)

SCALING = 0.3
needs_compiler = needs(cpu.KERNEL)
VERSIONS = [
    pytest.param(cpu.ragged_decode, id="cpp", marks=needs_compiler),
    pytest.param(chunked_ragged_decode, id="chunked"),
]


def rows(lengths, group=3, dim=64, width=None, dtype=torch.float32, gap=5, batch=1):
    """Return q, keys, values, starts and lengths; free slots hold NaN, so that reading one shows."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    width = dim if width is None else width
    lengths = torch.tensor(lengths)
    starts = (lengths + gap).cumsum(0) - lengths
    size = int(lengths.sum()) + gap * (len(lengths) + 1)
    keys, values = (torch.randn(size, x, generator=generator, dtype=torch.float64) for x in (dim, width))
    held = torch.zeros(size, dtype=torch.bool)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        held[start : start + length] = True
    keys[~held] = values[~held] = float("nan")
    q = torch.randn(batch, len(lengths) // batch * group, dim, generator=generator, dtype=torch.float64) * 3
    return q.to(dtype), keys.to(dtype), values.to(dtype), starts, lengths


def by_hand(q, keys, values, starts, lengths):
    """Softmax attention in float64, head by head."""
    batch, heads, _ = q.shape
    group = batch * heads // len(starts)
    out = torch.zeros(batch, heads, values.shape[1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            row = (b * heads + h) // group
            held = slice(int(starts[row]), int(starts[row] + lengths[row]))
            weights = (SCALING * keys[held].double() @ q[b, h].double()).exp()
            if len(weights):
                out[b, h] = weights @ values[held].double() / weights.sum()
    return out


CASES = {
    "one_token": {"lengths": [1, 1]},
    "empty_row": {"lengths": [0, 7, 300]},
    "nothing": {"lengths": [0, 0]},
    "equal": {"lengths": [70, 70, 70, 70], "batch": 2},
    "chunk_borders": {"lengths": [255, 256, 257, 513]},
    "uneven_batch": {"lengths": [1000, 3, 41, 640, 77, 0], "batch": 3},
    "G1-D60": {"lengths": [33, 290], "group": 1, "dim": 60},
    "G4-D63": {"lengths": [5, 300], "group": 4, "dim": 63},
    "G8-D128": {"lengths": [259, 2], "group": 8, "dim": 128},
    "G7-D80-Dv48": {"lengths": [259, 20], "group": 7, "dim": 80, "width": 48},
}


@pytest.mark.parametrize("version", [reference_ragged_decode, *VERSIONS])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_version_equals_attention_by_hand(version, case):
    arguments = rows(**case)
    # logits are as large as 40, which float32 rounds by up to 1e-5, and so are the weights
    torch.testing.assert_close(version(*arguments, SCALING).double(), by_hand(*arguments), rtol=5e-5, atol=5e-5)


def test_weights_are_handed_out_only_where_they_are_at_hand(monkeypatch):
    monkeypatch.setenv("AG_KERNELS", "chunked")
    out, weights = ragged_decode_weights(*rows([3, 5]), SCALING, 5)
    assert weights is None and torch.equal(out, ragged_decode(*rows([3, 5]), SCALING))


@pytest.mark.parametrize("forced", ["reference", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_are_those_of_the_output(monkeypatch, forced, case):
    """By hand in float64; behind the end of a row they are 0."""
    monkeypatch.setenv("AG_KERNELS", forced)
    q, keys, values, starts, lengths = rows(**case)
    longest = int(lengths.max())
    out, weights = ragged_decode_weights(q, keys, values, starts, lengths, SCALING, longest)
    assert torch.equal(out, ragged_decode(q, keys, values, starts, lengths, SCALING))
    assert weights.shape == (*q.shape[:2], longest) and weights.dtype == torch.float32
    by_row = weights.flatten(0, 1).unflatten(0, (len(starts), -1))
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        held = slice(start, start + length)
        exact = (SCALING * q.view(len(starts), -1, q.shape[-1])[row].double() @ keys[held].double().T).softmax(-1)
        torch.testing.assert_close(by_row[row, :, :length].double(), exact, rtol=1e-5, atol=1e-7)
        assert not by_row[row, :, length:].any()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [60, 64, 128])
def test_half_precision_is_summed_in_float32(version, dtype, dim):
    arguments = rows([700, 1, 300], dim=dim, dtype=dtype)
    out = version(*arguments, SCALING)
    assert out.dtype == dtype
    expected = by_hand(*arguments)
    # no worse than rounding the exact result; PyTorch's own attention rounds the weights as well
    loose = 1.01 if version is cpu.ragged_decode else 4
    assert bool(
        ((out.double() - expected).abs() <= loose * torch.finfo(dtype).eps * expected.abs().clamp_min(0.1)).all()
    )


def varlen_forward(q, k, v, **said):
    """What flash-attn documents of its call: batch element i reads ``seqused_k[i]`` keys from its offset on."""
    assert all(said[name].dtype == torch.int32 for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    assert said["cu_seqlens_q"].tolist() == list(range(len(q) + 1)) and said["max_seqlen_q"] == 1
    assert len(said["cu_seqlens_k"]) == len(q) + 1 and said["max_seqlen_k"] >= int(said["seqused_k"].max())
    assert not said["causal"] and said["dropout_p"] == 0
    out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"), dtype=q.dtype)
    for i, (start, used) in enumerate(zip(said["cu_seqlens_k"].tolist(), said["seqused_k"].tolist(), strict=False)):
        if used:
            keys, values = k[start : start + used, 0], v[start : start + used, 0]
            out[i] = (q[i] @ keys.T * said["softmax_scale"]).softmax(-1) @ values
    return out, None, None, None


@pytest.mark.parametrize("case", [case for case in CASES.values() if "width" not in case], ids=str)
def test_flash_attn_is_told_where_rows_lie(monkeypatch, case):
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = varlen_forward
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    arguments = rows(**case, dtype=torch.float64)
    torch.testing.assert_close(flash.flash_ragged_decode(*arguments, SCALING), by_hand(*arguments))


def test_what_flash_attn_cannot_take(monkeypatch):
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(flash, "INSTALLED", False)
    assert flash.unavailable(x, x).startswith("flash-attn is not installed")
    monkeypatch.setattr(flash, "INSTALLED", True)
    assert flash.unavailable(x, x) == "the tensors are on cpu"

    def on_card(dtype, dim):
        return types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(4, dim))

    half = on_card(torch.float16, 64)
    assert flash.unavailable(half, half) is None
    assert "not in torch.float32" in flash.unavailable(on_card(torch.float32, 64), half)
    assert "of one size" in flash.unavailable(half, on_card(torch.float16, 32))


@needs_compiler
def test_cpp_reads_every_finite_half():
    """Subnormal numbers and the largest ones among them; a weight of 1 gives a value back."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values.isfinite()][:, None]
    starts = torch.arange(len(values))
    out = cpu.ragged_decode(
        torch.zeros(len(values), 1, 1).half(), values * 0, values, starts, torch.ones_like(starts), 1.0
    )
    assert torch.equal(out.flatten(), values.flatten())


@pytest.mark.parametrize("version", VERSIONS)
def test_large_logits_neither_overflow_nor_vanish(version):
    q, keys, values, starts, lengths = rows([600, 300])
    arguments = (q * 100, keys, values, starts, lengths)
    out, expected = (
        version(*arguments, SCALING),
        reference_ragged_decode(*(x.double() for x in arguments[:3]), starts, lengths, SCALING),
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@needs_compiler
def test_cpp_does_not_depend_on_the_number_of_threads():
    arguments = rows([2000, 30, 700])
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(cpu.ragged_decode(*arguments, SCALING))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_without_a_compiler_pytorch_takes_over_and_says_so_once(fresh, caplog):
    fresh.delenv("CXX", raising=False)
    fresh.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO)
    arguments = rows([40, 9])
    for _ in range(2):
        out = ragged_decode(*arguments, SCALING)
    assert torch.equal(out, chunked_ragged_decode(*arguments, SCALING))
    lines = [record.getMessage() for record in caplog.records if "ragged_decode" in record.getMessage()]
    (line,) = lines
    assert line.startswith("ragged_decode: chunked (triton: ")
    assert line.endswith("; cpp: there is no C++ compiler (install g++))")
    fresh.setenv("AG_KERNELS", "cpp")
    with pytest.raises(UserError, match=r"AG_KERNELS=cpp: ragged_decode .*C\+\+"):
        ragged_decode(*arguments, SCALING)


@pytest.mark.parametrize(
    ("name", "version"), [("chunked", chunked_ragged_decode), ("reference", reference_ragged_decode)]
)
def test_the_environment_forces_a_version(fresh, name, version):
    fresh.setenv("AG_KERNELS", name)
    arguments = rows([400, 9])
    assert torch.equal(ragged_decode(*arguments, SCALING), version(*arguments, SCALING))


def test_float64_is_left_to_pytorch(fresh):
    arguments = rows([400, 9], dtype=torch.float64)
    torch.testing.assert_close(ragged_decode(*arguments, SCALING), by_hand(*arguments))
