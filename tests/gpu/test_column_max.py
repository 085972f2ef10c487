"""Column maxima on a card, against the whole attention matrix in float64."""

import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from tests.gpu.cases import DEVICE, OPTIONS, arguments, covering, here, name, near, part, right

pytestmark = pytest.mark.gpu
CASES = ("plain", "window", "left-padding", "right-padding")


def by_head(q, k, options):
    """The reference in float64, one query head at a time."""
    group = q.shape[1] // k.shape[1]

    def computed(q, k):
        found = [
            [
                reference_column_max(q[b : b + 1, h : h + 1], k[b : b + 1, h // group][:, None], **part(options, b))
                for h in range(q.shape[1])
            ]
            for b in range(len(q))
        ]
        return [torch.cat([torch.cat(row, 1) for row in found])]

    return right(computed, q, k)[0]


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
        near(got, by_head(q, k, options), case, q.dtype)
        assert torch.equal(got, column_max(q, k, **options))
