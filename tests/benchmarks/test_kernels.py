"""The benchmark of the kernels: how a call is timed, and which operations and bytes are counted."""

import json

import pytest
import torch

from benchmarks import kernels


def test_a_call_is_timed_by_replaying_a_graph_or_as_it_is_launched(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(kernels, "seconds_of", lambda device, step, rounds: [3.0, 1.0, 2.0])
    monkeypatch.setattr(testing, "do_bench_cudagraph", lambda step, return_mode: 4.0 if return_mode == "median" else 0)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert kernels.call_seconds(cuda, lambda: None, 3) == (0.004, "graph")
    assert kernels.call_seconds(cpu, lambda: None, 3) == (2.0, "launches")

    def refused(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(testing, "do_bench_cudagraph", refused)
    assert kernels.call_seconds(cuda, lambda: None, 3) == (2.0, "launches")


def test_pairs_and_bytes_are_counted_and_a_rival_without_a_time_says_why(monkeypatch, tmp_path):
    def refused(*_, **__):
        raise RuntimeError("No available kernel.\nAborting.")

    def draw(*shape):
        return torch.randn(*shape, 16)

    for name, value in {"HEADS": 4, "KV_HEADS": 2, "DIM": 16, "KEPT": 0.5}.items():
        monkeypatch.setattr(kernels, name, value)
    torch.manual_seed(0)
    (found,) = kernels.prefill(draw, 40)
    torch.manual_seed(0)
    for heads in (4, 2, 2):
        draw(1, heads, 40)
    keep = torch.rand(1, 2, 40) < 0.5
    pairs = sum(1 for h in range(4) for j in range(40) for t in range(j + 1) if keep[0, h // 2, t] or t == j)
    assert found[2:4] == (4 * 16 * pairs, 4 * 16 * 40 * (4 + 2 + 2 + 4))
    for _, _, operations, moved, _ in kernels.decoding(draw, 64):
        assert operations == moved  # 4 D a key and query of its group of 2; 8 D bytes a key
    monkeypatch.setattr(kernels, "scaled_dot_product_attention", refused)
    measured = kernels.measure("cpu", 40, 40, 64, 65536, 64)
    assert {row["timed by"] for row in measured["rows"]} == {"launches"} and len(measured["rows"]) == 7
    assert measured["rows"][0]["flash ms"] == measured["rows"][-1]["cudnn ms"] == "No available kernel."
    kernels.main(tmp_path, measured)
    assert json.loads((tmp_path / "kernels.json").read_text()) == measured
    assert "| paged_attention, 8 x 64 tokens, 50% kept |" in (tmp_path / "kernels.md").read_text()
