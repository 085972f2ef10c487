import logging

import pytest
import torch

from ag.errors import UserError
from ag.kernels import dispatch
from ag.kernels.attention_stats import attention_stats
from ag.kernels.gated_attention import gated_attention, reference
from ag.kernels.gated_attention.masks import Masks


@pytest.fixture(autouse=True)
def unset(fresh):
    fresh.setattr(dispatch, "INTERPRETED", False)


def test_the_first_that_can_run_is_chosen_and_told_once(caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        assert dispatch.pick("sums", {"triton": "no card", "chunked": None, "reference": None}, None) == "chunked"
    assert dispatch.pick("sums", {"triton": None, "chunked": None}, "") == "triton"
    assert [record.getMessage() for record in caplog.records] == ["sums: chunked (triton: no card)", "sums: triton"]


def test_a_version_can_be_forced_where_the_operation_has_it(caplog):
    caplog.set_level(logging.INFO)
    assert dispatch.pick("sums", {"triton": None, "chunked": None, "reference": None}, "reference") == "reference"
    assert dispatch.pick("decode", {"triton": None, "reference": None}, "chunked") == "triton"
    assert caplog.messages == ["sums: reference (AG_KERNELS asks for it)", "decode: triton"]


def test_an_unknown_version_is_named(monkeypatch):
    monkeypatch.setenv("AG_KERNELS", "cuda")
    with pytest.raises(UserError, match="AG_KERNELS=cuda: .*triton, cpp, chunked, reference"):
        gated_attention(*[torch.zeros(1, 1, 4, 8)] * 3)


@pytest.mark.parametrize("installed", [True, False])
def test_a_forced_version_that_cannot_run_says_why(monkeypatch, installed):
    monkeypatch.setenv("AG_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "INSTALLED", installed)
    reason = "the tensors are on cpu" if installed else "Triton is not installed"
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(UserError, match=f"AG_KERNELS=triton: gated_attention .*{reason}"):
        gated_attention(x, x, x)
    with pytest.raises(UserError, match=f"AG_KERNELS=triton: attention_stats .*{reason}"):
        attention_stats("sum", x, x, torch.arange(4)[None], torch.arange(4)[None, None], 1.0)


def test_what_triton_cannot_take(monkeypatch):
    monkeypatch.setattr(dispatch, "INSTALLED", True)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    assert dispatch.no_triton("cpu", torch.float32, 256) is None
    assert dispatch.no_triton("cpu", torch.float32, 257) == "the head size 257 is above 256"
    assert "interpreter" in dispatch.no_triton("cpu", torch.bfloat16, 8)
    assert "float64" in dispatch.no_triton("cpu", torch.float64, 8)


def test_the_forced_version_runs(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    keep = (torch.rand(1, 2, 20) > 0.5).float()
    monkeypatch.setenv("AG_KERNELS", "reference")
    want = reference.gated_attention(q, k, v, keep, Masks(recent=2), 8**-0.5)
    assert torch.equal(gated_attention(q, k, v, keep, recent=2), want)
    token_indices = torch.arange(20)[None]
    sums = attention_stats("sum", q.bfloat16(), k.bfloat16(), token_indices, token_indices[None], 0.3)
    assert sums.dtype == torch.float32
