"""A saved cache, read again, goes on bit by bit as the one that was saved; what is no whole saved cache is refused."""

import copy
import json
import re

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import ag
from ag.engine.saved import FORMAT, SCHEMA
from ag.errors import UserError
from tests.support.batches import columns, padded, read, row, step
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

RING = {"covers": "all", "window": 6, "recent_tokens": 7}
CASES = {
    "full": ("full", None, "prefill", {}, None),
    "h2o-int8": ("h2o", 12, "every", {"kv_dtype": "int8"}, None),
    "ring-int8": ("gates", None, "blocks:8", {"kv_dtype": "int8"}, RING),
    "snapkv": ("snapkv", 12, "prefill", {"window": 4}, None),
    "snapkv-slots": ("snapkv@heads", 12, "every", {"window": 4, "positions": "slot"}, None),
    "pyramidkv-steps": ("pyramidkv", 0.5, "steps:3", {"window": 3, "beta": 4}, None),
    "h2o": ("h2o", 0.3, "every", {}, None),
    "h2o-window": ("h2o", 12, "steps:2", {"window": 5, "normalize": "count"}, None),
    "h2o-caote": ("h2o+caote@preference", 12, "every", {"observers": 6}, None),
    "h2o-global": ("h2o@global", 0.4, "blocks:16+every", {}, None),
    "scissorhands": ("scissorhands", 14, "every", {}, None),
    "cake": ("cake", 14, "every", {"window": 4}, None),
    "criticalkv": ("tova+criticalkv", 10, "every", {}, None),
    "expected": ("expected_attention", 12, "every", {"window": 8}, None),
    "over-budget": ("snapkv", 0.3, "prefill", {"window": 8}, None),
    "kvzip": ("kvzip", 0.5, "prefill", {"chunk": 16, "ask": "7 8"}, None),
    "ranked": ("gates", 0.4, "every", {}, {"covers": "all", "window": 6}),
    "ranked-wrapped": ("gates+caote@heads", 14, "prefill", {}, {}),
    "flags": ("gates", None, "prefill", {}, {"recent_tokens": 3}),
    "flags-dense": ("gates", None, "prefill", {}, {"prefill": "dense", "recent_tokens": 3}),
    "ring": ("gates", None, "prefill", {}, RING),
    "ring-slots": ("gates", None, "prefill", {"positions": "slot"}, RING),
    "ring-blocks": ("gates", None, "blocks:8", {}, RING),
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


FAST = {
    "full",
    "h2o-int8",
    "h2o-caote",
    "snapkv-slots",
    "over-budget",
    "kvzip",
    "flags",
    "ring-blocks",
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in CASES])
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_a_loaded_cache_goes_on_as_the_saved_one(tiny_llama, tmp_path, name):
    """A ragged batch, saved after the prompt and after tokens behind it; tokens one by one, a later turn, a beam."""
    model, text = tiny_llama(), Text("right" if name.startswith("h2o") else "left")
    cache = made(model, name)
    text.begin(model, cache)
    for sizes in [1] * 7, (1, 1, 5, 1):
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


@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_what_a_step_found_over_the_budget(tiny_llama, tmp_path):
    model, text = tiny_llama(), Text()
    cache = ag.EvictionCache(model, "h2o", 12, "every")
    text.begin(model, cache)
    cache.protect([[(0, 60)], [], []])
    text.feed(model, [cache], text.tokens(1))
    assert cache.over_budget.tolist() == [True, False, False]
    _, loaded = loaded_too(model, cache, tmp_path / "context.cache")
    assert torch.equal(loaded.over_budget, cache.over_budget)
    assert torch.equal(*text.feed(model, [cache, loaded], text.tokens(1)))


def test_rows_that_a_window_emptied(tiny_mistral, tmp_path, monkeypatch):
    """A flagged prompt fills a window of 120; behind 121 tokens without flags a row holds three."""
    model, ids = tiny_mistral(sliding_window=120), row(260)[None]
    ag.attach(model, gates_for(model, covers="all", recent_tokens=3, sink_tokens=0))
    monkeypatch.setattr(ag.AttentionGates, "flags", lambda self, logits: torch.ones_like(logits) * logits.shape[2] > 1)
    cache = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        for part in ids[:, :251].split([130, *[1] * 121], 1):
            model(part, past_key_values=cache)
        assert [len(head) for head in cache.kept_positions(1)[0]] == [3, 3]
        caches = loaded_too(model, cache, tmp_path / "c")
        assert caches[0].nbytes == caches[1].nbytes
        for t in range(251, 260):
            assert torch.equal(*(model(ids[:, t : t + 1], past_key_values=x).logits for x in caches))
    assert columns(caches[0]) == columns(caches[1])


@pytest.mark.parametrize("name", ["full", "flags", "ring", "snapkv", "late"])
def test_what_crop_takes_back_and_refuses_after_loading(tiny_llama, tmp_path, name, monkeypatch):
    """Of every number of tokens the loaded cache does what the original does, and goes on alike."""
    monkeypatch.setitem(CASES, "late", ("knorm", 12, "steps:4", {}, None))
    model, text = tiny_llama(), Text()
    cache = made(model, name)
    text.begin(model, cache)
    for size in [1] * 9:
        text.feed(model, [cache], text.tokens(size))
    cache.crop(-1)
    text.mask = text.mask[:, :-1]
    text.feed(model, [cache], text.tokens(2))
    cache.save(tmp_path / "c")

    def outcome(each, number):
        try:
            each.crop(-number)
        except UserError as error:
            return str(error)
        mask = torch.cat([text.mask[:, : text.mask.shape[1] - number], torch.ones(3, 4, dtype=torch.long)], 1)
        new = torch.full((3, 1), 9)
        outs = [step(model, each, new, mask[:, : mask.shape[1] - n]) for n in (3, 2, 1, 0)]
        return torch.cat(outs).tolist(), columns(each)

    found = []
    for number in range(1, 14):
        one, other = copy.deepcopy(cache), ag.EvictionCache.load(tmp_path / "c", model)
        found.append(outcome(one, number))
        assert found[-1] == outcome(other, number)
    assert {type(x) for x in found} == ({tuple} if name == "full" else {str, tuple})


def test_generate_goes_on_and_checks_the_text(tiny_llama, tmp_path):
    """One context, many questions, in another process's words: each answer is that of a copy."""
    model, greedy = tiny_llama(), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    context, ask, other = (row(n, seed)[None] for n, seed in ((60, 0), (7, 1), (60, 2)))
    cache = ag.EvictionCache(model, "h2o@heads", 0.4, "every")
    first = model.generate(context, past_key_values=cache, **greedy)
    ids = torch.cat([first, ask], 1)
    _, loaded = loaded_too(model, cache, tmp_path / "c")
    with refuses(UserError, "column 0", "cache.reset()"):
        model.generate(torch.cat([other, ids[:, 60:]], 1), past_key_values=loaded, **greedy)
    found = model.generate(ids, past_key_values=loaded, **greedy)
    assert torch.equal(found, model.generate(ids, past_key_values=copy.deepcopy(cache), **greedy))
    loaded.reset()
    again = model.generate(context, past_key_values=loaded, **greedy)
    assert torch.equal(again, first)


def test_only_what_is_held_is_written(tiny_llama, tmp_path):
    """Of 400 tokens 20 a head stay: in 3 layers of 2 heads 20 keys and values of 16 numbers, and little beside them."""
    cache = read(tiny_llama(), row(400), "snapkv", 20, window=4)
    cache.save(tmp_path / "c")
    tensors = safetensors.torch.load_file(tmp_path / "c")
    assert sum(x.nbytes for name, x in tensors.items() if re.search("keys|values", name)) == 3 * 2 * 20 * 16 * 2 * 4
    rest = {name: x.nbytes for name, x in tensors.items() if not re.search("keys|values", name)}
    assert sum(rest.values()) <= 3 * 2 * 20 * 4 + 400 + 3 * 8 * 8 + 2 * 3 * 2 * 8
    assert (tmp_path / "c").stat().st_size < sum(x.nbytes for x in tensors.values()) + 8000
    for index in range(3):
        places = cache.store.ledger(index)[0][..., :20].flatten()
        for name in ("keys", "values"):
            assert torch.equal(
                tensors[f"layers.{index}.tokens.{name}"], getattr(cache.pool, name).flatten(0, 1)[places]
            )


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


def test_under_autocast(tiny_llama, tmp_path):
    """Keys are rotated in float32 then, and values are products in bfloat16."""
    model, text = tiny_llama(), Text()
    cache = made(model, "h2o")
    with torch.autocast("cpu", torch.bfloat16):
        text.begin(model, cache)
        assert (cache.pool.keys.dtype, cache.pool.values.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(*text.feed(model, loaded_too(model, cache, tmp_path / "c"), text.tokens(1)))
    with refuses(UserError, "values"):
        ag.EvictionCache.load(tmp_path / "c", model)


def test_instructions_of_a_tokenizer(tiny_llama, tiny_tokenizer, tmp_path):
    """The policy's text does not have them; the loaded cache does, for its next prompt."""
    model, text = tiny_llama(), Text()
    cache = ag.EvictionCache(model, ag.policy("kvzip+caote", 12).with_tokenizer(tiny_tokenizer))
    assert cache.policy.scorer.inner.ask
    text.begin(model, cache)
    cache, loaded = loaded_too(model, cache, tmp_path / "c")
    assert loaded.policy.scorer == cache.policy.scorer
    for each in (cache, loaded):
        each.reset()
        text.begin(model, each)
    assert columns(loaded) == columns(cache)


# ---- what is refused


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A model, and the file of a cache of its."""
    model, file = tiny_llama(), tmp_path / "context.cache"
    cache = made(model, "h2o")
    Text().begin(model, cache)
    cache.save(file)
    return model, file


@pytest.mark.parametrize(
    ("change", "dtype", "named"),
    [
        ({"num_hidden_layers": 2}, torch.float32, ("num_layers=3", "2")),
        ({"num_key_value_heads": 4}, torch.float32, ("num_kv_heads=2", "4")),
        ({"head_dim": 32}, torch.float32, ("head_dim=16", "32")),
        ({}, torch.bfloat16, ("dtype='torch.float32'", "torch.bfloat16")),
    ],
)
def test_another_model(tiny_llama, saved, change, dtype, named):
    with refuses(UserError, str(saved[1]), *named):
        ag.EvictionCache.load(saved[1], tiny_llama(**change).to(dtype))


def rewritten(file, change=lambda head, tensors: None, **metadata):
    """Write a saved cache again, changed."""
    with safe_open(file, "pt") as opened:
        kept = opened.metadata() | metadata
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    head = json.loads(kept["cache"])
    change(head, tensors)
    safetensors.torch.save_file(tensors, file, kept | {"cache": json.dumps(head)})


def test_no_such_file_and_no_cache(saved, tmp_path):
    model, file = saved
    (tmp_path / "text").write_text("hello")
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "short").write_bytes(file.read_bytes()[:-5])
    for name in ("nowhere", "text", "weights", "short", "."):
        with refuses(UserError, str(tmp_path / name)):
            ag.EvictionCache.load(tmp_path / name, model)
    rewritten(file, schema=str(SCHEMA + 1))
    with refuses(UserError, str(file), f"schema='{SCHEMA + 1}'", f"expected {SCHEMA}"):
        ag.EvictionCache.load(file, model)


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
    "long rows": ("h2o", forge("held", lambda x: x + 10**6)),
    "rows below zero": ("h2o", forge("held", lambda x: x - 100)),
    "lengths of another type": ("h2o", forge("held", lambda x: x.int())),
    "lengths as a vector": ("h2o", forge("held", lambda x: x.flatten())),
    "a layer less": ("h2o", forge("held", lambda x: x[:-1])),
    "lengths that wrap": ("h2o", forge("held", row_of(1, lambda x: torch.full_like(x, 2**63 - 1)))),
    "another layer's length": ("h2o", forge("held", row_of(1, lambda x: x - 1))),
    "no room for a row": ("h2o", forge("owned", lambda x: x * 0)),
    "all memory": ("h2o", forge("owned", lambda x: x + 10**6)),
    "few keys": ("h2o", forge(TOKENS + "keys", lambda x: x[:-1])),
    "precise keys": ("h2o", forge(TOKENS + "keys", lambda x: x.double())),
    "keys of another type": ("h2o", forge(TOKENS + "keys", lambda x: x.int())),
    "keys of another width": ("h2o", forge(TOKENS + "keys", lambda x: x[:, :8].contiguous())),
    "coarse values": ("h2o", forge(TOKENS + "values", lambda x: x.half())),
    "said to be coarse": ("h2o", put("state", types=["torch.float32", "torch.float16"])),
    "wide ranks": ("h2o", forge(TOKENS + "ranks", lambda x: x[:, None].expand(-1, 2).contiguous())),
    "ranks below zero": ("h2o", forge(TOKENS + "ranks", lambda x: x - 1)),
    "ranks beyond the text": ("h2o", forge(TOKENS + "ranks", lambda x: x.where(x < x.max(), 41))),
    "ranks of another type": ("h2o", forge(TOKENS + "ranks", lambda x: x.long())),
    "a token twice": ("h2o", forge(TOKENS + "ranks", lambda x: x.where(x != x[1], x[0]))),
    "a text that is no mask": ("h2o", forge("sequences.mask", lambda x: x.long())),
    "other sequences": ("h2o", forge("sequences.mask", lambda x: x[:2])),
    "a longer text": ("h2o", forge("sequences.num_tokens", lambda x: x + 1)),
    "an eviction to come": ("h2o", forge("sequences.evicted_at", lambda x: x + 100)),
    "other positions": ("h2o", forge("sequences.next_ranks", lambda x: x + 1)),
    "a text for a flag": ("h2o", put("state", "sequences", own_positions="no")),
    "a text for a window": ("h2o", put("state", "layers", "0", window="3")),
    "an attribute more": ("h2o", put("state", "sequences", run=3)),
    "a number for a tensor": ("h2o", put("state", "sequences", mask=3)),
    "records of other slots": ("h2o", forge("layers.0.records.sums", lambda x: x[..., :-1].contiguous())),
    "shares of other layers": ("h2o", put("state", "budgets", layers=[0, 1])),
    "marks of other sequences": ("h2o", put("state", "budgets", over_budget={"tensor": "sequences.mask"})),
    "a share too many": ("h2o", put("state", "budgets", settled={"items": [[7, 3]]})),
    "no records": ("h2o", lambda head, tensors: head["state"]["layers"]["0"].pop("records")),
    "no layer": ("h2o", lambda head, tensors: head["state"]["layers"].pop("2")),
    "no shares": ("h2o", lambda head, tensors: head["state"].pop("budgets")),
    "no policy": ("h2o", lambda head, tensors: head.pop("policy")),
    "no gates": ("h2o", lambda head, tensors: head.pop("gates")),
    "a number for the model": ("h2o", put(base_model=3)),
    "a model without geometry": ("h2o", put("base_model", fingerprint=None)),
    "a tensor that is not there": ("h2o", lambda head, tensors: tensors.pop(TOKENS + "values")),
    "precise keys beside flags": ("ring", forge(TOKENS + "keys", lambda x: x.double())),
    "flags of another type": ("ring", forge(TOKENS + "gate", lambda x: x.float())),
    "flags of another shape": ("ring", forge(TOKENS + "gate", lambda x: x[:, None][:, :0])),
    "no flags": ("ring", lambda head, tensors: head["state"]["layers"]["1"]["tokens"].pop("gate")),
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


def test_nothing_to_save_yet(tiny_llama, tmp_path):
    model, ids = tiny_llama(), row(20)[None]
    cache = ag.EvictionCache(model, "snapkv", 12, window=4)
    with refuses(UserError, "EvictionCache.save", "nothing", "prompt"):
        cache.save(tmp_path / "c")
    cache.expect(torch.ones(1, 20, dtype=torch.bool))
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        with refuses(UserError, "[8] of [20] tokens"):
            cache.save(tmp_path / "c")
        model(ids[:, 8:], past_key_values=cache)
    assert list(tmp_path.iterdir()) == []
    cache.save(tmp_path / "c")
    assert ag.EvictionCache.load(tmp_path / "c", model).seen_tokens == 20


def test_what_is_in_the_way(saved, tmp_path):
    model, file = saved
    cache = ag.EvictionCache.load(file, model)
    (tmp_path / "mine.txt").write_text("dear diary")
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    for name in ("mine.txt", "weights"):
        with refuses(UserError, name, "another path"):
            cache.save(tmp_path / name)
    assert (tmp_path / "mine.txt").read_text() == "dear diary"
    with refuses(UserError, "nowhere"):
        cache.save(tmp_path / "nowhere" / "c")
    with refuses(UserError, tmp_path.name):
        cache.save(tmp_path)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.save(file)
    assert len(ag.EvictionCache.load(file, model).valid) == 2
    assert {x.name for x in tmp_path.iterdir()} == {"mine.txt", "weights", file.name}
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == FORMAT


def test_a_policy_that_no_file_can_have(tiny_llama, tmp_path):
    model = tiny_llama()
    changed = ag.policy("snapkv", 12, window=4)
    object.__setattr__(changed, "scorer", ag.policy("h2o", 12).scorer)
    cache = ag.EvictionCache(model, changed)
    Text().begin(model, cache)
    with refuses(UserError, "ag.policy"):
        cache.save(tmp_path / "c")
    assert not [*tmp_path.iterdir()]


def test_pickling_says_what_to_do(tiny_llama, tmp_path):
    with refuses(UserError, "cache.save(path)", "EvictionCache.load(path, model)", "copy.deepcopy"):
        torch.save(ag.EvictionCache(tiny_llama(), "h2o", 4), tmp_path / "cache.pt")
