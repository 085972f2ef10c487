"""A saved cache, read again, goes on bit by bit as the one that was saved; what is no whole saved cache is refused."""

import json
import re

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import ag
from ag.engine.cache_file import SCHEMA
from ag.errors import UserError
from tests.support.batches import columns, padded, read, row, step
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

RING = {"covers": "all", "window": 6, "recent_tokens": 7}
CASES = {
    "h2o-int8": ("h2o", 12, "every", {"kv_dtype": "int8"}, None),
    "h2o": ("h2o", 0.3, "every", {}, None),
    "snapkv-slots": ("snapkv@heads", 12, "every", {"window": 4, "positions": "slot"}, None),
    "criticalkv-global": ("tova+criticalkv@global", 0.3, "blocks:16+every", {}, None),
    "expected": ("expected_attention", 12, "every", {"window": 8}, None),
    "ranked": ("gates", 0.4, "every", {}, {"covers": "all", "window": 6}),
    "ring": ("gates", None, "blocks:8", {}, RING),
}
LENGTHS = 41, 23, 9


def made(model, name):
    spec, budget, schedule, options, gates = CASES[name]
    if gates is not None:
        ag.attach(model, gates_for(model, **gates))
    return ag.EvictionCache(model, spec, budget, schedule, **options)


class Text:
    """A padded batch that goes on with the same tokens in every cache."""

    def __init__(self, side="left"):
        self.drawn, (self.ids, self.first) = (
            torch.Generator().manual_seed(0),
            padded([*map(row, LENGTHS)], side).values(),
        )

    def begin(self, model, cache):
        self.mask = self.first
        step(model, cache, self.ids, self.mask)

    def tokens(self, count):
        return torch.randint(3, 128, (len(self.mask), count), generator=self.drawn)

    def feed(self, model, caches, ids):
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        return [step(model, cache, ids, self.mask) for cache in caches]


def loaded_too(model, cache, file):
    """Save a cache; return it and what was loaded."""
    cache.save(file)
    return cache, ag.EvictionCache.load(file, model)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_a_loaded_cache_goes_on_as_the_saved_one(tiny_llama, tmp_path, name):
    """A ragged batch, saved after the prompt and after tokens behind it; tokens one by one, a later turn, a beam."""
    model, text = tiny_llama(), Text("right" if name.startswith("h2o") else "left")
    cache = made(model, name)
    text.begin(model, cache)
    for sizes in [1] * 4, (1, 5, 1):
        before = columns(cache)
        _, loaded = loaded_too(model, cache, tmp_path / "context.cache")
        assert type(loaded) is ag.EvictionCache and repr(loaded.policy) == repr(cache.policy)
        assert loaded.policy.scorer == cache.policy.scorer and loaded.policy.allocator == cache.policy.allocator
        assert columns(loaded) == columns(cache) == before and loaded.nbytes == cache.nbytes
        assert str(loaded.report()) == str(cache.report())
        for size in sizes:
            one, other = text.feed(model, [cache, loaded], text.tokens(size))
            assert torch.equal(one, other)
            assert columns(loaded) == columns(cache)
    for each in (cache, loaded):
        each.reorder_cache(torch.tensor([2, 0, 0]))
    text.mask = text.mask[[2, 0, 0]]
    one, other = text.feed(model, [cache, loaded], text.tokens(1))
    assert torch.equal(one, other)
    assert columns(loaded) == columns(cache) != before


def test_only_what_is_held_is_written(tiny_llama, tmp_path):
    """Of 400 tokens 20 a head stay: in 3 layers of 2 heads 20 keys and values of 16 numbers, and little beside them."""
    read(tiny_llama(), row(400), "snapkv", 20, window=4).save(tmp_path / "c")
    sizes = {name: x.nbytes for name, x in safetensors.torch.load_file(tmp_path / "c").items()}
    entries = [size for name, size in sizes.items() if re.search("keys|values", name)]
    assert sum(entries) == 3 * 2 * 20 * 16 * 2 * 4
    assert sum(sizes.values()) - sum(entries) <= 3 * 2 * 20 * 4 + 400 + 3 * 8 * 8 + 2 * 3 * 2 * 8
    assert (tmp_path / "c").stat().st_size < sum(sizes.values()) + 8000


def test_gates_are_compared(tiny_llama, tmp_path):
    """Those of a folder, and attached ones."""
    model, text, file = tiny_llama(), Text(), tmp_path / "c"
    gates_for(model).save_pretrained(tmp_path / "gates")
    cache = ag.EvictionCache(model, f"gates:{tmp_path / 'gates'}", threshold=0.3)
    text.begin(model, cache)
    assert torch.equal(*text.feed(model, loaded_too(model, cache, file), text.tokens(1)))
    gates_for(model, seed=1).save_pretrained(tmp_path / "gates")
    with refuses(UserError, "other gates", str(file)):
        ag.EvictionCache.load(file, model)
    cache = made(model, "ring")
    text.begin(model, cache)
    cache.save(file)
    for others in (gates_for(model, seed=1, **RING), gates_for(model, **RING).at(threshold=0.4), None):
        ag.detach(model)
        if others is not None:
            ag.attach(model, others)
        with refuses(UserError, "ag.attach" if others is None else "other gates"):
            ag.EvictionCache.load(file, model)


# ---- what is refused


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A model, and the file of a cache of its."""
    model, file = tiny_llama(), tmp_path / "context.cache"
    cache = made(model, "h2o")
    Text().begin(model, cache)
    cache.save(file)
    return model, file


def rewritten(file, change=lambda head, tensors: None, **metadata):
    """Write a saved cache again, changed."""
    with safe_open(file, "pt") as opened:
        kept = opened.metadata() | metadata
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    head = json.loads(kept["cache"])
    change(head, tensors)
    safetensors.torch.save_file(tensors, file, kept | {"cache": json.dumps(head)})


def forge(name, value):
    def change(head, tensors):
        tensors[name] = value(tensors[name])

    return change


def put(*path, **values):
    def change(head, tensors):
        part = head
        for key in path:
            part = part[key]
        part.update(values)

    return change


TOKENS = "layers.1.tokens."


def row_of(layer, value):
    """Change the counts of one layer."""
    return lambda x: x.index_copy(0, torch.tensor([layer]), value(x[layer : layer + 1]))


#: By name: the cache that is damaged, and how.
FORGED = {
    "long rows": ("h2o", forge("held.0", lambda x: x + 10**6)),
    "all memory": ("h2o", forge("owned.0", lambda x: x + 10**6)),
    "precise keys": ("h2o", forge(TOKENS + "keys", lambda x: x.double())),
    "token_indices beyond the text": ("h2o", forge(TOKENS + "token_indices", lambda x: x.where(x < x.max(), 41))),
    "a token twice": ("h2o", forge(TOKENS + "token_indices", lambda x: x.where(x != x[1], x[0]))),
    "other sequences": ("h2o", forge("sequences.mask", lambda x: x[:2])),
    "an attribute more": ("h2o", put("state", "sequences", run=3)),
    "records of other slots": ("h2o", forge("layers.0.records.sums", lambda x: x[..., :-1].contiguous())),
    "a share too many": ("h2o", put("state", "budgets", layer_budget={"items": [[7, 3]]})),
    "no layer": ("h2o", lambda head, tensors: head["state"]["layers"].pop("2")),
    "a tensor that is not there": ("h2o", lambda head, tensors: tensors.pop(TOKENS + "values")),
}


@pytest.mark.parametrize("name", FORGED)
def test_damage(tiny_llama, tmp_path, name):
    (case, change), model, file, text = FORGED[name], tiny_llama(), tmp_path / "c", Text()
    cache = made(model, case)
    text.begin(model, cache)
    cache.save(file)
    rewritten(file)
    ag.EvictionCache.load(file, model)
    rewritten(file, change)
    with refuses(UserError, str(file), "damaged"):
        ag.EvictionCache.load(file, model)


def test_no_saved_cache_or_of_another_model(tiny_llama, saved, tmp_path):
    model, file = saved
    for changed, name in (({"num_hidden_layers": 2}, "num_layers=3"), ({"head_dim": 32}, "head_dim=16")):
        with refuses(UserError, str(file), name):
            ag.EvictionCache.load(file, tiny_llama(**changed))
    with refuses(UserError, str(file), "dtype='torch.float32'", "torch.bfloat16"):
        ag.EvictionCache.load(file, tiny_llama().bfloat16())
    (tmp_path / "text").write_text("hello")
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "short").write_bytes(file.read_bytes()[:-5])
    for name in ("nowhere", "text", "weights", "short"):
        with refuses(UserError, str(tmp_path / name)):
            ag.EvictionCache.load(tmp_path / name, model)
    rewritten(file, schema=str(SCHEMA + 1))
    with refuses(UserError, str(file), f"schema='{SCHEMA + 1}'", f"expected {SCHEMA}"):
        ag.EvictionCache.load(file, model)


def test_what_cannot_be_written(saved, tmp_path):
    """Nothing is lost: neither what lies there, nor an earlier saved cache."""
    model, file = saved
    fresh = ag.EvictionCache(model, "snapkv", 12, window=4)
    with refuses(UserError, "EvictionCache.save", "nothing", "prompt"):
        fresh.save(tmp_path / "c")
    fresh.expect(torch.ones(1, 20, dtype=torch.bool))
    with torch.no_grad():
        model(row(8)[None], past_key_values=fresh)
    with refuses(UserError, "[8] of [20] tokens"):
        fresh.save(tmp_path / "c")
    cache = ag.EvictionCache.load(file, model)
    (tmp_path / "mine.txt").write_text("dear diary")
    for name in ("mine.txt", "nowhere/c"):
        with refuses(UserError, name):
            cache.save(tmp_path / name)
    assert (tmp_path / "mine.txt").read_text() == "dear diary"
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.save(file)
    assert len(ag.EvictionCache.load(file, model).valid) == 2
    assert {x.name for x in tmp_path.iterdir()} == {"mine.txt", file.name}
    with refuses(UserError, "cache.save(path)", "EvictionCache.load(path, model)", "copy.deepcopy"):
        torch.save(cache, tmp_path / "cache.pt")


def test_under_autocast(tiny_llama, tmp_path):
    """Values are products in bfloat16 then, and are held in the type of the weights."""
    model, text = tiny_llama(), Text()
    cache = made(model, "h2o")
    with torch.autocast("cpu", torch.bfloat16):
        text.begin(model, cache)
        assert torch.equal(*text.feed(model, loaded_too(model, cache, tmp_path / "c"), text.tokens(1)))
    coarse = tiny_llama().bfloat16()
    with refuses(UserError, "torch.float16", "torch.bfloat16", "torch.autocast"), torch.autocast("cpu", torch.float16):
        text.begin(coarse, ag.EvictionCache(coarse, "full"))
