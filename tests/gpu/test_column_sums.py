"""Column sums on a card, against the whole attention matrix in float64."""

import pytest
import torch

from ag.kernels.column_sums import column_sums
from ag.kernels.column_sums.reference import reference_column_sums
from tests.gpu.cases import DEVICE, OPTIONS, arguments, by_head, covering, here, name, near

pytestmark = pytest.mark.gpu
CASES = ("plain", "window", "left-padding", "right-padding")


@pytest.mark.parametrize(("dim", "dtype", "sizes", "case", "power"), covering(CASES, (1, 2)), ids=name)
def test_sums(triton_untuned, dim, dtype, sizes, case, power):
    given = {key: value for key, value in OPTIONS[case].items() if key in ("window", "padding")}
    for length, group in sizes:
        (q, k, _), _, options = arguments(length=here(length), group=group, dim=dim, dtype=dtype, **given)
        queries = (torch.rand(q.shape[2], len(q), device=DEVICE) > 0.3).T  # not contiguous
        options |= {"queries": queries, "power": power, "skip": 3 * (power == 2), "mean": power == 2}
        got = column_sums(q, k, **options)
        near(got, by_head(reference_column_sums, q, k, options=options), case, q.dtype)
        assert torch.equal(got, column_sums(q, k, **options))


def test_only_some_queries_count(triton_untuned):
    """The last 32, as a window of observers; and none at all, which pays nothing."""
    length = here(4097)
    (q, k, _), _, options = arguments(length=length, group=4, dim=128, dtype=torch.bfloat16)
    last = (torch.arange(length, device=DEVICE) >= length - min(32, length // 2)).expand(len(q), -1)
    given = {"scaling": options["scaling"], "queries": last}
    near(column_sums(q, k, **given), by_head(reference_column_sums, q, k, options=given), "last", q.dtype)
    assert float(column_sums(q, k, options["scaling"], last & False).abs().sum()) == 0
