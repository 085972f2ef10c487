"""How a kernel's time is taken."""

import pytest
import torch

from benchmarks import kernels


def test_a_call_is_timed_by_replaying_a_graph_or_as_it_is_launched(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    waited, calls = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(kernels, "seconds_of", lambda device, step, rounds: [3.0, 1.0, 2.0])
    monkeypatch.setattr(testing, "do_bench_cudagraph", lambda step, return_mode: 4.0 if return_mode == "median" else 0)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert kernels.call_seconds(cuda, lambda: calls.append(1), 3) == (0.004, "graph")
    assert len(calls) == 2 and not waited  # it was called before it is captured

    def refused(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(testing, "do_bench_cudagraph", refused)
    assert kernels.call_seconds(cuda, lambda: None, 3) == (2.0, "launches") and waited == [cuda]
    assert kernels.call_seconds(cpu, lambda: None, 3) == (2.0, "launches")
