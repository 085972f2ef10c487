import pytest
import torch

from ag.kernels.column_max import column_max
from ag.kernels.column_max.reference import reference_column_max
from tests.kernels.test_column_sums import inputs as plain_inputs
from tests.kernels.test_column_sums import weights
from tests.support.bounds import bounded, hold

OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "left-padding": {"padding": "left"},
    "right-padding": {"padding": "right"},
    "responses": {"queries": "last"},
    "factors": {"factors": 0},
    "all": {"padding": "left", "window": 31, "queries": "some", "factors": 3},
    "later": {"newest": 14, "padding": "left", "window": 9, "factors": 3},
}


def inputs(length, heads, kv_heads, dim=12, factors=None, **options):
    """As for column sums; ``factors``: the number of queries whose factor is 0."""
    q, k, options = plain_inputs(length, heads, kv_heads, dim, **options)
    if factors is not None:
        generator, shape = torch.Generator().manual_seed(length), options["queries"].shape
        draw = torch.rand(shape, generator=generator, dtype=torch.float64) * 3 + 0.1
        draw[:, -factors:] *= factors == 0
        options["factors"] = draw
    return q, k, options


def loops(q, k, factors=None, **options):
    """The largest of each key's pairs, one by one."""
    out = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype)
    for b, h, j, t, weight in weights(q, k, **options):
        out[b, h, t] = max(float(out[b, h, t]), (1.0 if factors is None else float(factors[b, j])) * weight)
    return out


def by_reference(q, k, options, dtype=torch.float64):
    """The maxima of a computation in a type."""
    return reference_column_max(bounded(q, dtype), bounded(k, dtype), **options)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_both_versions_equal_loops(case):
    q, k, options = inputs(23, 4, 2, **OPTIONS[case])
    want, error = loops(q, k, **options), by_reference(q, k, options).error
    for function in (column_max, reference_column_max):
        hold(function(q, k, **options), want, error)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"), [(1, 2, 1), (127, 2, 2), (129, 6, 2), (300, 3, 3), (257, 4, 1)]
)
def test_chunked_equals_reference(length, heads, kv_heads, case):
    q, k, options = inputs(length, heads, kv_heads, **OPTIONS[case])
    got = column_max(q, k, **options)
    assert got.shape == (2, heads, length)
    hold(got, by_reference(q, k, options))
    for dtype in (torch.float32, torch.bfloat16):
        rounded = q.to(dtype), k.to(dtype)
        single = column_max(*rounded, **options)
        assert single.dtype == torch.float32
        hold(single, by_reference(*rounded, options, dtype))


def test_padding_gets_nothing_and_the_first_token_its_own_row():
    q, k, options = inputs(140, 4, 2, padding="left")
    got = column_max(q, k, **options)
    valid = options["key_valid"]
    assert (got[~valid[:, None].expand_as(got)] == 0).all()
    first = valid.long().argmax(1)
    assert (got[torch.arange(2), :, first] == 1).all()  # it sees itself alone


def test_more_queries_never_lower_a_maximum_and_none_give_zero():
    q, k, options = inputs(150, 4, 2)
    queries, last = options["queries"], torch.zeros(2, 150, 4)
    for step in (16, 4, 1):
        options["queries"] = queries & (torch.arange(150) % step == 0)
        got = column_max(q, k, **options).mT
        assert (got >= last).all()
        last = got
    options["queries"] = queries & False
    assert column_max(q, k, **options).abs().sum() == 0


def test_keys_left_out_leave_the_softmax():
    """Over a part of the keys, in their order: the restricted softmax of KVzip."""
    q, k, options = inputs(60, 2, 1)
    part = torch.tensor([*range(4), *range(20, 30), *range(50, 60)])  # prefix, chunk, repetition
    counted = (part >= 50).expand(2, -1)
    options = {"scaling": options["scaling"], "queries": counted}
    got = column_max(q[:, :, part], k[:, :, part], **options)
    error = by_reference(q[:, :, part], k[:, :, part], options).error
    for b in range(2):
        for h in range(2):
            rows = []
            for i in range(50, 60):
                seen = [t for t in part.tolist() if t <= i]
                weights = (12**-0.5 * (k[b, 0, seen] @ q[b, h, i])).softmax(0)
                rows.append(dict(zip(seen, weights.tolist(), strict=True)))
            want = torch.tensor([max(row.get(t, 0.0) for row in rows) for t in part.tolist()], dtype=torch.float64)
            hold(got[b, h], want, error[b, h])


def test_memory_is_linear_in_length():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.size = max(self.size, *(x.numel() for x in [out] if isinstance(x, torch.Tensor)), 0)
            return out

    sizes = []
    for length in (512, 1024, 2048):
        q, k, options = inputs(length, 2, 1)
        with Largest() as largest:
            column_max(q, k, **options)
        sizes.append(largest.size)
    assert sizes[1] <= 2.01 * sizes[0]
    assert sizes[2] <= 2.01 * sizes[1]
