"""What a layer shows, against attention written out pair by pair."""

import pytest
import torch
from attention_by_hand import Scene
from compiled import needs
from torch.utils._python_dispatch import TorchDispatchMode

from ag.engine import observe
from ag.engine.observe import Context, Keys, Queries
from ag.engine.rows import FUSED, AttentionRows, attention
from ag.kernels.row_statistics import Values, cpu
from ag.kernels.row_statistics.reference import differences

needs_compiler = needs(cpu.KERNEL)

SCENES = {
    "one": {},
    "mha": {"heads": 3, "kv_heads": 3, "lengths": (7, 7)},
    "left": {"lengths": (9, 4, 1), "padding": "left"},
    "right": {"lengths": (3, 11), "padding": "right"},
    "ragged": {"lengths": (12,), "ragged": True},
    "ragged-left": {"lengths": (12, 5), "ragged": True, "padding": "left"},
    "ragged-right": {"lengths": (6, 13), "ragged": True, "padding": "right", "heads": 6},
    "sliding": {"lengths": (14, 6), "window": 4},
    "sliding-ragged": {"lengths": (14,), "window": 3, "ragged": True},
    "few-queries": {"lengths": (15, 4), "queries": 6, "ragged": True},
}


@pytest.fixture(params=SCENES, ids=str)
def scene(request):
    return Scene(seed=3, **SCENES[request.param])


def rows_by_hand(scene, b, h, last):
    a, s, visible = scene.dense(b, h)
    first = max(0, len(a) - last)
    return a[first:], s[first:], visible[first:]


@pytest.mark.parametrize("last", [1, 3, 100])
def test_rows(scene, last):
    rows = scene.seen.rows(last)
    assert rows.a.dtype == rows.s.dtype == rows.o.dtype == torch.float32
    assert rows.a.shape[2] == min(last, scene.seen.q.shape[2])
    for b in range(len(scene.lengths)):
        here = min(last, len(scene.columns[b]))
        assert rows.counted[b].tolist() == [False] * (rows.a.shape[2] - here) + [True] * here
        for h in range(scene.heads):
            a, s, visible = rows_by_hand(scene, b, h, last)
            held = a.shape[1]
            got = [x[b, h, -here:] for x in (rows.a, rows.s, rows.visible, rows.o)]
            assert torch.allclose(got[0][:, :held].double(), a, atol=1e-6)
            assert torch.allclose(got[1][:, :held].double(), s, atol=1e-5)
            assert torch.equal(got[2][:, :held], visible)
            assert torch.allclose(got[3].double(), a @ scene.values(b, h // scene.group), atol=1e-5)
            for part in got[:3]:
                assert not part[:, held:].any()


@pytest.mark.parametrize("block", [128, 4])
def test_totals_are_the_same_in_blocks(scene, block, monkeypatch):
    monkeypatch.setattr(observe, "BLOCK", block)
    totals = {
        "a": scene.seen.total(attention),
        "a2": scene.seen.total(lambda rows: rows.a.square()),
        "s": scene.seen.total(lambda rows: rows.s),
    }
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            a, s, _ = scene.dense(b, h)
            for name, want in {"a": a, "a2": a.square(), "s": s}.items():
                got = totals[name][b, h].double()
                assert torch.allclose(got[: a.shape[1]], want.sum(0), atol=2e-5), name
                assert not got[a.shape[1] :].any()


def test_every_query_pays_one(scene):
    if scene.window is None and scene.seen.q.shape[2] == max(scene.lengths):
        paid = scene.seen.total(attention).sum(-1)
        for b in range(len(scene.lengths)):
            for h in range(scene.heads):
                blind = sum(not bool(row.any()) for row in scene.dense(b, h)[2])
                assert float(paid[b, h]) == pytest.approx(scene.lengths[b] - blind, rel=1e-5)


def test_moments(scene):
    for last in (1, 4, 100):
        rows = scene.seen.rows(last)
        mean, variance = rows.moments()
        for b in range(len(scene.lengths)):
            for h in range(scene.heads):
                a = rows_by_hand(scene, b, h, last)[0]
                count = len(a)
                for slot in range(a.shape[1]):
                    column = [float(x) for x in a[:, slot]]
                    middle = sum(column) / count
                    spread = sum((x - middle) ** 2 for x in column) / (count - 1) if count > 1 else 0.0
                    assert float(mean[b, h, slot]) == pytest.approx(middle, rel=1e-5, abs=1e-7)
                    assert float(variance[b, h, slot]) == pytest.approx(spread, rel=1e-4, abs=1e-9)


def test_differences_of_values_and_outputs(scene):
    rows = scene.seen.rows(3)
    apart, along = differences(rows.a, rows.values)
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            values = scene.values(b, h // scene.group)
            a = rows_by_hand(scene, b, h, 3)[0]
            for i, row in enumerate(reversed(a)):
                output = sum(weight * value for weight, value in zip(row, values, strict=True))
                for slot, value in enumerate(values):
                    change = value - output
                    got = float(apart[b, h, -1 - i, slot]), float(along[b, h, -1 - i, slot])
                    assert got[0] == pytest.approx(float(change @ change), rel=1e-5, abs=1e-9)
                    assert got[1] == pytest.approx(float(value @ change), rel=1e-5, abs=1e-5)


def test_age_lengths_and_group(scene):
    assert scene.seen.lengths.tolist() == list(scene.lengths)
    assert scene.seen.group == scene.group
    for b, g in scene.places():
        held = scene.held[b][g]
        assert scene.seen.age[b, g, : len(held)].tolist() == [scene.lengths[b] - 1 - p for p in held]


def test_over_layer(scene):
    values = torch.rand(*scene.seen.q.shape[:2], scene.seen.k.shape[2], generator=torch.Generator().manual_seed(5)) + 1
    got = scene.seen.over_layer(values)
    for b, g in scene.places():
        for slot, p in enumerate(scene.held[b][g]):
            total = 0.0
            for h in range(scene.heads):
                other = scene.held[b][h // scene.group]
                total += float(values[b, h, other.index(p)]) if p in other else 0.0
            assert float(got[b, g, slot]) == pytest.approx(total / scene.heads, rel=1e-5)


def test_free_slots_are_never_seen():
    quiet, loud = (Scene(seed=1, lengths=(11, 4), ragged=True).seen for _ in range(2))
    free = ~loud.key_valid
    assert bool(free.any())
    loud.k[free], loud._keys.v[free] = 1e30, float("nan")
    for part in ("a", "s", "o"):
        assert torch.equal(getattr(quiet.rows(5), part), getattr(loud.rows(5), part))
    assert torch.equal(quiet.total(attention), loud.total(attention))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype):
    scene = Scene(seed=4, lengths=(20, 9), dtype=dtype, sharp=3.0)
    total = scene.seen.total(attention)
    assert total.dtype == torch.float32
    for b in range(2):
        for h in range(scene.heads):
            want = scene.dense(b, h)[0].sum(0)
            assert torch.allclose(total[b, h, : len(want)].double(), want, atol=1e-5)


def test_a_row_of_a_batch_is_what_it_is_alone():
    batch = Scene(seed=6, lengths=(13, 5), padding="left")
    whole, parts = batch.seen, batch.seen.total(attention)
    ranks = torch.arange(5).expand(1, 2, 5)
    alone = observe.Observation(
        keys=Keys(k=whole.k[1:, :, :5], v=whole.v[1:, :, :5], ranks=ranks, valid=torch.ones(1, 2, 5).bool()),
        queries=Queries(q=whole.q[1:, :, -5:], ranks=ranks[:, 0], valid=torch.ones(1, 5).bool()),
        context=Context(scaling=whole.scaling),
    )
    assert torch.allclose(alone.total(attention), parts[1:, :, :5], atol=1e-6)
    assert torch.allclose(alone.rows(3).a, whole.rows(3).a[1:, ..., :5], atol=1e-6)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return made


def test_no_tensor_grows_with_the_square_of_the_prompt():
    sizes = {}
    for tokens in (512, 1024):
        seen = Scene(lengths=(tokens,), heads=2, kv_heads=1, dim=4).seen
        with Largest() as largest:
            seen.total(attention)
        sizes[tokens] = largest.size
    assert sizes[1024] <= 2 * observe.BLOCK * 1024
    assert sizes[1024] <= 2.1 * sizes[512]


@needs_compiler
def test_one_pass_sums_what_several_sum(scene, monkeypatch):
    found = []
    for version in ("cpp", "reference"):
        monkeypatch.setenv("AG_KERNELS", version)
        seen = scene.seen
        found.append([x for f in FUSED for x in (seen.total(f), seen.rows(3).total(f))])
    assert len(found[0]) == 8
    for one, several in zip(*found, strict=True):
        assert bool((several > 0).any())
        torch.testing.assert_close(one, several, rtol=1e-5, atol=1e-7)


@needs_compiler
def test_sums_in_one_pass_and_rows_leave_each_other_alone(monkeypatch):
    monkeypatch.delenv("AG_KERNELS", raising=False)
    scene = Scene(seed=2, lengths=(12, 7), ragged=True)
    fresh, used = scene.seen.rows(4), scene.seen.rows(4)
    sums = {f: used.total(f) for f in FUSED}
    for part in ("a", "s", "o", "visible"):
        assert torch.equal(getattr(used, part), getattr(fresh, part))
    mean = used.mean_heads()
    for f in FUSED:
        assert torch.equal(used.total(f), sums[f])
        monkeypatch.setenv("AG_KERNELS", "reference")
        plain = mean.total(f)
        monkeypatch.delenv("AG_KERNELS")
        assert torch.equal(mean.total(f), plain)


@needs_compiler
def test_sums_in_one_pass_make_no_weights(monkeypatch):
    monkeypatch.delenv("AG_KERNELS", raising=False)
    logits, v, outputs = torch.randn(1, 4, 3, 9), torch.randn(1, 1, 9, 5), torch.randn(1, 4, 3, 5)
    rows = AttentionRows(
        logits, lambda: Values.of(v), torch.ones(1, 3).bool(), outputs=lambda: outputs - Values.of(v).centre
    )
    for f in FUSED:
        rows.total(f)
    assert not {"a", "s", "visible"} & set(vars(rows))
