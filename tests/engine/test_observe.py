"""What a layer shows, against attention written out pair by pair."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ag.engine import observe
from ag.engine.rows import FUSED, AttentionRows, attention
from ag.kernels.row_statistics import Values, cpu
from ag.kernels.row_statistics.reference import differences
from tests.support.attention_by_hand import Scene
from tests.support.bounds import hold
from tests.support.compiled import needs

needs_compiler = needs(cpu.KERNEL)
EPS = torch.finfo(torch.float32).eps

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
    bound = {part: scene.bound(lambda seen, part=part: getattr(seen.rows(last), part)) for part in "aso"}
    assert rows.a.dtype == rows.s.dtype == rows.o.dtype == torch.float32
    assert rows.a.shape[2] == min(last, scene.seen.q.shape[2])
    for b in range(len(scene.lengths)):
        here = min(last, len(scene.columns[b]))
        assert rows.counted[b].tolist() == [False] * (rows.a.shape[2] - here) + [True] * here
        for h in range(scene.heads):
            a, s, visible = rows_by_hand(scene, b, h, last)
            held = a.shape[1]
            got = [x[b, h, -here:] for x in (rows.a, rows.s, rows.visible, rows.o)]
            hold(got[0][:, :held], a, bound["a"][b, h, -here:, :held])
            hold(got[1][:, :held], s, bound["s"][b, h, -here:, :held])
            assert torch.equal(got[2][:, :held], visible)
            hold(got[3], a @ scene.values(b, h // scene.group), bound["o"][b, h, -here:])
            for part in got[:3]:
                assert not part[:, held:].any()


@pytest.mark.parametrize("block", [128, 4])
def test_totals_are_the_same_in_blocks(scene, block, monkeypatch):
    monkeypatch.setattr(observe, "BLOCK", block)
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


def test_moments(scene):
    for last in (1, 4, 100):
        rows = scene.seen.rows(last)
        mean, variance = rows.moments()
        bounds = [scene.bound(lambda seen, i=i, last=last: seen.rows(last).moments()[i]) for i in (0, 1)]
        for b in range(len(scene.lengths)):
            for h in range(scene.heads):
                a = rows_by_hand(scene, b, h, last)[0]
                count = len(a)
                for slot in range(a.shape[1]):
                    column = [float(x) for x in a[:, slot]]
                    middle = sum(column) / count
                    spread = sum((x - middle) ** 2 for x in column) / (count - 1) if count > 1 else 0.0
                    hold(mean[b, h, slot], middle, bounds[0][b, h, slot])
                    hold(variance[b, h, slot], spread, bounds[1][b, h, slot])


def test_differences_of_values_and_outputs(scene):
    rows = scene.seen.rows(3)
    apart, along = differences(rows.a, rows.values)
    bounds = [scene.bound(lambda seen, i=i: differences(seen.rows(3).a, seen.values)[i]) for i in (0, 1)]
    for b in range(len(scene.lengths)):
        for h in range(scene.heads):
            values = scene.values(b, h // scene.group)
            a = rows_by_hand(scene, b, h, 3)[0]
            for i, row in enumerate(reversed(a)):
                if not row.any():  # it sees nothing, and its weights of 0 are all that counts
                    continue
                output = sum(weight * value for weight, value in zip(row, values, strict=True))
                for slot, value in enumerate(values):
                    change = value - output
                    place = b, h, -1 - i, slot
                    hold(apart[place], change @ change, bounds[0][place])
                    hold(along[place], value @ change, bounds[1][place])


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
            # positive numbers: a sum of so many, and a quotient
            hold(got[b, g, slot], total / scene.heads, 2 * (scene.heads + 1) * EPS * total / scene.heads)


def test_free_slots_are_never_seen():
    quiet, loud = (Scene(seed=1, lengths=(11, 4), ragged=True).seen for _ in range(2))
    free = ~loud.key_valid
    assert bool(free.any())
    loud.k[free], loud._keys.v[free] = 1e30, float("nan")
    for part in ("a", "s", "o"):
        assert torch.equal(getattr(quiet.rows(5), part), getattr(loud.rows(5), part))
    assert torch.equal(quiet.total(attention), loud.total(attention))


def test_a_decision_changes_nothing_of_what_others_see():
    """Sequence 0 is not due, 1 holds more than the capacity, 2 does not."""
    seen = Scene(lengths=(9, 9, 4)).seen
    view = seen.deciding(torch.tensor([False, True, True]), torch.tensor([4, 4, 4]))
    assert view.evicts.tolist() == [[False, False], [True, True], [False, False]]
    assert seen.due is seen.capacity is None and seen.evicts.all()


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
    sums = [f for g in FUSED for f in (lambda seen, g=g: seen.total(g), lambda seen, g=g: seen.rows(3).total(g))]
    assert len(sums) == 8
    for f in sums:
        monkeypatch.setenv("AG_KERNELS", "reference")
        several, bound = f(scene.seen), scene.bound(f)
        monkeypatch.setenv("AG_KERNELS", "cpp")
        assert bool((several > 0).any())
        hold(f(scene.seen), several, 2 * bound)  # of two that round apart


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
