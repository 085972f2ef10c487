"""Prefill under hard flags on a card, against masking in float64."""

import pytest
import torch

from ag.kernels.gated_prefill import gated_prefill
from tests.gpu.cases import OPTIONS, arguments, covering, exact, formula, here, name
from tests.support.bounds import near

pytestmark = pytest.mark.gpu
CASES = ("plain", "protected", "window", "left-padding", "right-padding")


def masked(q, k, v, keep, options):
    """The output of gated attention under the flags, in float64."""
    return exact(formula, [q, k, v, keep], torch.ones_like(q), options, gradients=False)[0]


@pytest.mark.parametrize(("dim", "dtype", "sizes", "case", "flags"), covering(CASES, ("hard", "evicted")), ids=name)
def test_output(triton_only, dim, dtype, sizes, case, flags):
    for length, group in sizes:
        (q, k, v), keep, options = arguments(
            length=here(length), group=group, dim=dim, dtype=dtype, flags=flags, **OPTIONS[case]
        )
        near(gated_prefill(q, k, v, keep.bool(), **options), masked(q, k, v, keep, options), case, q.dtype)


def test_evicted_keys_are_not_read(triton_only):
    """Blocks of them hold no numbers, and no query but their own ones notices."""
    length = here(4097)
    (q, k, v), keep, options = arguments(length=length, group=4, dim=64, dtype=torch.float32)
    gone = slice(length // 4, length // 2)
    keep[:, :, gone] = 0
    want = gated_prefill(q, k, v, keep.bool(), **options)
    k[:, :, gone] = v[:, :, gone] = float("nan")
    got = gated_prefill(q, k, v, keep.bool(), **options)
    beyond = length // 2 + 128 if length > 1000 else length // 2 + 16  # those of a tile with them do
    assert torch.equal(got[:, :, beyond:], want[:, :, beyond:])
    assert bool(got[:, :, gone].isnan().any())


def test_every_version_gives_the_same(monkeypatch):
    (q, k, v), keep, options = arguments(length=here(1000), group=4, dim=64, dtype=torch.float32, recent=5, sinks=3)
    want = masked(q, k, v, keep, options)
    for version in ("triton", "chunked", "reference"):
        monkeypatch.setenv("AG_KERNELS", version)
        near(gated_prefill(q, k, v, keep.bool(), **options), want, version)
