"""The smallest case of each Triton kernel: for compute-sanitizer, which makes a launch a hundred times slower.

Lengths are odd, so that every mask is used, and each result is held to its reference.
"""

import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from ag.kernels.column_sums import column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from ag.kernels.gated_attention import gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention
from ag.kernels.gated_prefill import gated_prefill
from ag.kernels.gated_prefill.reference import reference_gated_prefill
from ag.kernels.ragged_decode import ragged_decode
from ag.kernels.ragged_decode.reference import reference_ragged_decode
from gpu.cases import DEVICE, arguments, draw, exact, near, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("triton_untuned")]
SMALL = {"length": 19, "group": 2, "dim": 20, "dtype": torch.float32}


def test_gated_attention():
    tensors, keep, options = arguments(
        **SMALL, padding="left", window=11, recent=2, sinks=1, dense=True, documents=True
    )
    weight = draw(*tensors[0].shape)
    got = run(gated_attention, [*tensors, keep], weight, options)
    want = exact(reference_gated_attention, [*tensors, keep], weight, options)
    for what, mine, theirs in zip(["out", "dq", "dk", "dv", "dkeep"], got, want, strict=True):
        near(mine, theirs, 1e-4, what)


def test_gated_prefill():
    (q, k, v), keep, options = arguments(**SMALL, padding="left", window=11, recent=2, sinks=1)
    want = reference_gated_prefill(q.double(), k.double(), v.double(), keep.bool(), **options)
    near(gated_prefill(q, k, v, keep.bool(), **options), want, 1e-4, "out")


def test_column_sums():
    (q, k, _), _, options = arguments(**SMALL, padding="left", window=11)
    options |= {"queries": options["key_valid"], "power": 2, "skip": 1, "mean": True}
    want = reference_column_sums(q.double(), k.double(), **options)
    near(column_sums(q, k, **options), want, 1e-4, "sums")


def test_column_max():
    (q, k, _), _, options = arguments(**SMALL, padding="left", window=11)
    options |= {"queries": options["key_valid"]}
    want = reference_column_max(q.double(), k.double(), **options)
    near(column_max(q, k, **options), want, 1e-4, "maxima")


def test_ragged_decode():
    torch.manual_seed(0)
    q, keys, values = draw(2, 2, 20), draw(70, 20), draw(70, 20)
    starts, lengths = torch.tensor([3, 40], device=DEVICE), torch.tensor([37, 19], device=DEVICE)
    want = reference_ragged_decode(q.double(), keys.double(), values.double(), starts, lengths, 0.3)
    near(ragged_decode(q, keys, values, starts, lengths, 0.3), want, 1e-4, "out")
