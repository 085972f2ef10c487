"""Column maxima on a card, against the whole attention matrix in float64."""

import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from tests.gpu.cases import DEVICE, OPTIONS, PRECISIONS, arguments, covering, here, name, near, part

pytestmark = pytest.mark.gpu
CASES = ("plain", "window", "left-padding", "right-padding")


@pytest.mark.parametrize(("dim", "dtype", "sizes", "case", "factors"), covering(CASES, (False, True)), ids=name)
def test_maxima(triton_untuned, dim, dtype, sizes, case, factors):
    given = {key: value for key, value in OPTIONS[case].items() if key in ("window", "padding")}
    for length, group in sizes:
        (q, k, _), _, options = arguments(length=here(length), group=group, dim=dim, dtype=dtype, **given)
        queries = (torch.rand(q.shape[2], len(q), device=DEVICE) > 0.3).T  # not contiguous
        options |= {"queries": queries}
        if factors:
            options["factors"] = torch.rand(queries.shape, device=DEVICE)
        got = column_max(q, k, **options)
        want = torch.zeros(got.shape, dtype=torch.float64, device=DEVICE)
        for b in range(len(q)):
            for h in range(q.shape[1]):
                one = q[b : b + 1, h : h + 1].double(), k[b : b + 1, h // group : h // group + 1].double()
                want[b, h] = reference_column_max(*one, **part(options, b))[0, 0]
        near(got, want, PRECISIONS[dtype], case)
        assert torch.equal(got, column_max(q, k, **options))
