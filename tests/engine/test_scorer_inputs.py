"""What a layer shows, against attention written out pair by pair."""

import pytest
import torch

from ag.engine import scorer_inputs
from ag.engine.rows import FUSED, attention
from ag.kernels.attention_stats import cpu
from tests.support.attention_by_hand import SINKS_AND_CAP, Scene
from tests.support.bounds import hold
from tests.support.compiled import needs

needs_compiler = needs(cpu.KERNEL)

SCENES = {
    "mha-left": {"heads": 3, "kv_heads": 3, "lengths": (9, 4, 1), "padding": "left"},
    "ragged-left": {"lengths": (12, 5), "ragged": True, "padding": "left"},
    "ragged-right": {"lengths": (6, 13), "ragged": True, "padding": "right", "heads": 6},
    "sliding-ragged": {"lengths": (14,), "window": 3, "ragged": True},
    "few-queries": {"lengths": (15, 4), "queries": 6, "ragged": True},
    "sinks-and-cap": {"lengths": (10, 4), "ragged": True, "softmax": SINKS_AND_CAP},
}


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=3, **SCENES[request.param])


def test_moments_leave_out_queries_of_padding(scene):
    last = max(scene.lengths)
    moments = scene.seen.rows(last).moments
    bounds = [scene.bound(lambda seen, i=i: seen.rows(last).moments[i]) for i in range(2)]
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            a = scene.dense(b, h)[0]
            wanted = a.mean(0), a.var(0) if len(a) > 1 else torch.zeros_like(a[0])
            for got, want, bound in zip(moments, wanted, bounds, strict=True):
                hold(got[b, h, : a.shape[1]], want, bound[b, h, : a.shape[1]])


@pytest.mark.parametrize("block", [128, 4])
def test_totals_are_the_same_in_blocks(scene, block, monkeypatch):
    monkeypatch.setattr(scorer_inputs, "BLOCK", block)
    statistics = {"a": attention, "a2": lambda rows: rows.a.square(), "s": lambda rows: rows.s}
    totals = {name: scene.seen.total(f) for name, f in statistics.items()}
    bounds = {name: scene.bound(lambda seen, f=f: seen.total(f)) for name, f in statistics.items()}
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            a, s, _ = scene.dense(b, h)
            for name, want in {"a": a, "a2": a.square(), "s": s}.items():
                got = totals[name][b, h].double()
                hold(got[: a.shape[1]], want.sum(0), bounds[name][b, h, : a.shape[1]], name)
                assert not got[a.shape[1] :].any()


@needs_compiler
@pytest.mark.parametrize("version", ["cpp", "chunked", "reference"])
def test_a_kernel_sums_what_tiles_sum(scene, version, monkeypatch):
    assert len(FUSED) == 2
    for statistic in FUSED:
        with monkeypatch.context() as patch:
            patch.setattr(scorer_inputs, "FUSED", {})
            tiles, bound = scene.seen.total(statistic), scene.bound(lambda seen, f=statistic: seen.total(f))
        with monkeypatch.context() as patch:
            patch.setenv("AG_KERNELS", version)
            patch.setattr(
                scorer_inputs.ScorerInputs, "_tiles", lambda seen: pytest.fail("queries were visited in tiles")
            )
            found = scene.seen.total(statistic)
        assert bool((tiles > 0).any())
        hold(found, tiles, 2 * bound)  # of two that round apart
