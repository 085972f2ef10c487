"""Column maxima on a card, against the whole attention matrix in float64."""

import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from tests.gpu.cases import DEVICE, OPTIONS, arguments, by_head, covering, here, name, near

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
        near(got, by_head(reference_column_max, q, k, options=options), case, q.dtype)
        assert torch.equal(got, column_max(q, k, **options))
