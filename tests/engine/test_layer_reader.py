"""What the reader of a layer computes, against attention written out pair by pair."""

import pytest
import torch

from ag.engine import layer_reader
from ag.engine.attention_rows import FUSED
from ag.engine.scorer_inputs import Needs, UndeclaredInputError
from ag.errors import UserError
from ag.kernels.attention_stats import cpu
from tests.support.attention_by_hand import SINKS_AND_CAP, Scene
from tests.support.bounds import hold
from tests.support.compiled import needs as needs_to_be_built
from tests.support.refused import refuses

needs_compiler = needs_to_be_built(cpu.KERNEL)

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
    needs = Needs(attention_moments=max(scene.lengths))
    moments = scene.reader.attention_moments(needs)
    bounds = [scene.bound(lambda reader, i=i: reader.attention_moments(needs)[i]) for i in range(2)]
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            a = scene.dense(b, h)[0]
            wanted = a.mean(0), a.var(0) if len(a) > 1 else torch.zeros_like(a[0])
            for got, want, bound in zip(moments, wanted, bounds, strict=True):
                hold(got[b, h, : a.shape[1]], want, bound[b, h, : a.shape[1]])


@pytest.mark.parametrize("block", [128, 4])
def test_totals_are_the_same_in_blocks(scene, block, monkeypatch):
    monkeypatch.setattr(layer_reader, "TILE_QUERIES", block)
    statistics = {"a": None, "a2": lambda weights, *_: weights.square(), "s": lambda weights, logits, values: logits}
    needs = {name: Needs(attention_sums="new", statistic=f) for name, f in statistics.items()}
    totals = {name: scene.reader.attention_sums(x) for name, x in needs.items()}
    bounds = {name: scene.bound(lambda reader, x=x: reader.attention_sums(x)) for name, x in needs.items()}
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
        needs = Needs(attention_sums="new", statistic=statistic)
        with monkeypatch.context() as patch:
            patch.setattr(layer_reader, "FUSED", {})
            tiles = scene.reader.attention_sums(needs)
            bound = scene.bound(lambda reader, needs=needs: reader.attention_sums(needs))
        with monkeypatch.context() as patch:
            patch.setenv("AG_KERNELS", version)
            patch.setattr(
                layer_reader.LayerReader, "_tiles", lambda reader: pytest.fail("queries were visited in tiles")
            )
            found = scene.reader.attention_sums(needs)
        assert bool((tiles > 0).any())
        hold(found, tiles, 2 * bound)  # of two that round apart


def test_an_input_that_is_not_declared_is_refused_with_its_name(scene):
    inputs = scene.reader.inputs(Needs(keys=True), {})
    assert torch.equal(inputs.keys.double(), scene.k)
    with refuses(UndeclaredInputError, "inputs.values", "add values to the Needs"):
        _ = inputs.values
    with refuses(UndeclaredInputError, "inputs.key_indices", "add key_indices to the Needs"):
        _ = inputs.age
    assert not hasattr(inputs, "values")
    for names in (("values",), True):
        with refuses(UserError, f"every_query={names!r}", "('keys',)"):
            Needs(keys=True, every_query=names)


def test_an_input_is_computed_only_if_it_is_declared(scene, monkeypatch):
    """A pass that only notes computes the inputs of every query."""
    needs = Needs(attention_sums="new", values=True, every_query=("attention_sums",))
    reader = scene.reader
    inputs = reader.inputs(needs, {}, only_noted=True)
    assert "values" not in vars(reader) and not hasattr(inputs, "values")
    assert torch.equal(inputs.attention_sums, scene.reader.inputs(needs, {}).attention_sums)
    assert "keys_float32" not in vars(scene.reader)
