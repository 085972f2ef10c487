"""Decoding over ragged rows: every version against the plain one, and what happens without a compiler."""

import logging
import shutil
import types

import pytest
import torch
from bounds import bounded, hold
from compiled import needs
from rows_by_hand import check_weights
from torch.nn.attention import varlen

from ag.errors import UserError
from ag.kernels import ragged_decode as ragged
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


def by_hand(q, keys, values, starts, lengths, dtype=torch.float32):
    """Softmax attention in float64, head by head, as sums in ``dtype`` may find it."""
    batch, heads, _ = q.shape
    group = batch * heads // len(starts)
    out = bounded(torch.zeros(batch, heads, values.shape[1]), dtype)
    for b in range(batch):
        for h in range(heads):
            row = (b * heads + h) // group
            held = slice(int(starts[row]), int(starts[row] + lengths[row]))
            weights = (bounded(q[b, h, None], dtype) @ bounded(keys[held], dtype).T * SCALING).exp()
            if weights.numel():
                out[b, h] = (weights @ bounded(values[held], dtype) / weights.sum())[0]
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
    hold(version(*arguments, SCALING), by_hand(*arguments))


@pytest.mark.parametrize("forced", ["reference", "chunked", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_are_those_of_the_output(monkeypatch, forced, case):
    """By hand in float64; behind the end of a row they are 0. A version that has none leaves them to one that does."""
    monkeypatch.setenv("AG_KERNELS", forced)
    arguments = rows(**case)
    longest = int(arguments[-1].max())
    out, weights = ragged_decode_weights(*arguments, SCALING, longest)
    assert weights.shape == (*arguments[0].shape[:2], longest) and weights.dtype == torch.float32
    check_weights(weights, out, *arguments, SCALING)


def test_weights_of_float64_arguments(fresh):
    arguments = rows([400, 9], dtype=torch.float64)
    out, weights = ragged_decode_weights(*arguments, SCALING, 400)
    assert out.dtype == torch.float64 and weights.dtype == torch.float32
    check_weights(weights, out, *arguments, SCALING)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [60, 64, 128])
def test_half_precision_is_summed_in_float32(version, dtype, dim):
    arguments = rows([700, 1, 300], dim=dim, dtype=dtype)
    out = version(*arguments, SCALING)
    assert out.dtype == dtype
    # PyTorch's own attention rounds the weights as well
    hold(out, by_hand(*arguments, torch.float32 if version is cpu.ragged_decode else dtype))


def varlen_attn(q, k, v, *, cu_seq_q, cu_seq_k, max_q, max_k, scale, enable_gqa, seqused_k):
    """What PyTorch documents of its call: batch element i reads ``seqused_k[i]`` keys from its offset on."""
    assert all(x.dtype == torch.int32 for x in (cu_seq_q, cu_seq_k, seqused_k))
    assert cu_seq_q.tolist() == list(range(len(q) + 1)) and max_q == 1 and enable_gqa and k.shape[1] == 1
    assert len(cu_seq_k) == len(q) + 1 and max_k == int(seqused_k.max())
    out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"), dtype=q.dtype)
    for i, (start, used) in enumerate(zip(cu_seq_k.tolist(), seqused_k.tolist(), strict=False)):
        if used:
            keys, values = k[start : start + used, 0], v[start : start + used, 0]
            out[i] = (q[i] @ keys.T * scale).softmax(-1) @ values
    return out


@pytest.mark.parametrize("case", [case for case in CASES.values() if "width" not in case], ids=str)
def test_flash_attention_is_told_where_rows_lie_and_how_long_they_are(fresh, case):
    """How far rows are split follows from the longest one, not from the whole buffer."""
    fresh.setattr(varlen, "varlen_attn", varlen_attn)
    flash._varlen_attn.cache_clear()
    for name, reason in (("triton", "there is no Triton"), ("flash", None), ("cpp", "the tensors are on a card")):
        here = {"triton": (ragged, "no_triton"), "flash": (flash, "unavailable"), "cpp": (cpu, "unavailable")}[name]
        fresh.setattr(*here, lambda *_, why=reason: why)
    arguments = rows(**case, dtype=torch.float64)
    found = ragged_decode(*arguments, SCALING, int(arguments[-1].max()))
    flash._varlen_attn.cache_clear()
    hold(found, by_hand(*arguments, torch.float64))


def test_what_flash_attention_cannot_take(monkeypatch):
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert flash.unavailable(x, x, x) == "the tensors are on cpu"

    def on_card(dtype, dim):
        return types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(4, dim))

    monkeypatch.setattr(flash, "_varlen_attn", lambda: varlen_attn)
    half, other = on_card(torch.float16, 64), on_card(torch.bfloat16, 64)
    assert flash.unavailable(half, half, half) is None
    assert "torch.float32" in flash.unavailable(half, *[on_card(torch.float32, 64)] * 2)
    assert "torch.bfloat16" in flash.unavailable(other, half, half)
    for dim in (60, 264):
        assert f"keys of {dim}" in flash.unavailable(half, *[on_card(torch.float16, dim)] * 2)
    assert "of one size" in flash.unavailable(half, half, on_card(torch.float16, 32))
    monkeypatch.setattr(flash, "_varlen_attn", lambda: None)
    assert "seqused_k" in flash.unavailable(half, half, half)


def test_flash_attention_needs_a_torch_that_reads_a_part_of_each_row(fresh):
    for offered, usable in ((varlen_attn, True), (lambda query, key, value, cu_seq_q, scale=None: None, False)):
        fresh.setattr(varlen, "varlen_attn", offered)
        flash._varlen_attn.cache_clear()
        assert (flash._varlen_attn() is not None) == usable
    flash._varlen_attn.cache_clear()


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
    expected = reference_ragged_decode(*map(bounded, arguments[:3]), starts, lengths, SCALING)
    assert float(expected.error.max()) < 0.1  # one key has nearly everything, whatever its logit's error
    hold(version(*arguments, SCALING), expected)


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
    hold(ragged_decode(*arguments, SCALING), by_hand(*arguments, torch.float64))
