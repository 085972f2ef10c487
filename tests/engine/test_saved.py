"""A saved cache, read again, goes on bit by bit as the one that was saved; what is no whole saved cache is refused."""

import copy
import json
import re
from dataclasses import dataclass

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import ag
from ag.engine.repeat import Repetition
from ag.engine.saved import FORMAT, SCHEMA
from ag.engine.scorers import SCORERS
from ag.engine.scorers.base import Needs, Scorer
from ag.errors import UserError
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

RING = {"covers": "all", "window": 6, "recent_tokens": 7}
CASES = {
    "full": ("full", None, "prefill", {}, None),
    "snapkv": ("snapkv", 12, "prefill", {"window": 4}, None),
    "snapkv-slots": ("snapkv@heads", 12, "every", {"window": 4, "positions": "slot"}, None),
    "pyramidkv-steps": ("pyramidkv", 0.5, "steps:3", {"window": 3, "beta": 4}, None),
    "h2o": ("h2o", 0.3, "every", {}, None),
    "h2o-window": ("h2o", 12, "steps:2", {"window": 5, "normalize": "count"}, None),
    "h2o-caote": ("h2o+caote@preference", 12, "every", {"observers": 6}, None),
    "h2o-seen": ("h2o@global", 0.4, "blocks:16+every", {"budget_of": "seen"}, None),
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


def slow_but(cases, *fast):
    """All cases; slow are those that are not named."""
    assert set(fast) <= set(cases)
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in cases]


def made(model, name):
    spec, budget, schedule, options, gates = CASES[name]
    if gates is not None:
        ag.attach(model, gates_for(model, **gates))
    return ag.EvictionCache(model, spec, budget, schedule, **options)


class Text:
    """A padded batch that goes on with the same tokens in every cache."""

    def __init__(self):
        self.drawn, longest = torch.Generator().manual_seed(0), max(LENGTHS)
        self.mask = torch.stack([torch.arange(longest) >= longest - n for n in LENGTHS]).long()
        self.ids = self.tokens(longest) * self.mask

    def tokens(self, count):
        return torch.randint(3, 128, (len(self.mask), count), generator=self.drawn)

    @torch.no_grad()
    def feed(self, model, caches, ids):
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        return [model(ids, attention_mask=self.mask, position_ids=positions, past_key_values=x).logits for x in caches]

    def begin(self, model, cache):
        self.mask = (self.ids > 0).long()
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            model(self.ids, attention_mask=self.mask, position_ids=positions, past_key_values=cache)


def held(cache):
    return [
        [[head.tolist() for head in row] for row in cache.kept_positions(i)] for i in range(len(cache.evicting_layers))
    ]


def bits(x):
    return x.view(torch.uint8 if x.dtype == torch.bool else {4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize(
    "name", slow_but(CASES, "full", "h2o-caote", "snapkv-slots", "over-budget", "kvzip", "flags", "ring-blocks")
)
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_a_loaded_cache_goes_on_as_the_saved_one(tiny_llama, tmp_path, name):
    """A ragged batch, saved after the prompt and after tokens behind it; tokens one by one, a later turn, a beam."""
    model, text, file = tiny_llama(), Text(), tmp_path / "context.cache"
    cache = made(model, name)
    text.begin(model, cache)
    for sizes in [1] * 7, (1, 1, 5, 1):
        before = held(cache)
        cache.save(file)
        loaded = ag.EvictionCache.load(file, model)
        assert type(loaded) is ag.EvictionCache and repr(loaded.policy) == repr(cache.policy)
        assert loaded.policy.scorer == cache.policy.scorer and loaded.policy.allocator == cache.policy.allocator
        assert held(loaded) == held(cache) == before and loaded.nbytes == cache.nbytes
        assert str(loaded.report()) == str(cache.report())
        for size in sizes:
            one, other = text.feed(model, [cache, loaded], text.tokens(size))
            assert torch.equal(bits(one), bits(other))
            assert held(loaded) == held(cache)
    for each in (cache, loaded):
        each.reorder_cache(torch.tensor([2, 0, 0]))
    text.mask = text.mask[[2, 0, 0]]
    one, other = text.feed(model, [cache, loaded], text.tokens(1))
    assert torch.equal(bits(one), bits(other))
    assert held(loaded) == held(cache) != before


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny_mistral", "tiny_qwen3"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "ring"])
def test_other_models(request, tmp_path, family, name):
    model, text = request.getfixturevalue(family)(), Text()
    cache = made(model, name)
    text.begin(model, cache)
    cache.save(tmp_path / "c")
    loaded = ag.EvictionCache.load(tmp_path / "c", model)
    for _ in range(10):
        assert torch.equal(*text.feed(model, [cache, loaded], text.tokens(1)))


def test_rows_that_a_window_emptied(tiny_mistral, tmp_path, monkeypatch):
    """A flagged prompt fills a window of 120; behind 121 tokens without flags a row holds three."""
    model, drawn = tiny_mistral(sliding_window=120), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (1, 260), generator=drawn)
    ag.attach(model, gates_for(model, covers="all", recent_tokens=3, sink_tokens=0))
    monkeypatch.setattr(ag.AttentionGates, "flags", lambda self, logits: torch.ones_like(logits) * logits.shape[2] > 1)
    cache = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        model(ids[:, :130], past_key_values=cache)
        assert [len(head) for head in cache.kept_positions(1)[0]] == [119, 119]
        for t in range(130, 251):
            model(ids[:, t : t + 1], past_key_values=cache)
        assert [len(head) for head in cache.kept_positions(1)[0]] == [3, 3]
        cache.save(tmp_path / "c")
        loaded = ag.EvictionCache.load(tmp_path / "c", model)
        assert held(loaded) == held(cache) and loaded.nbytes == cache.nbytes
        for t in range(251, 260):
            one, other = (model(ids[:, t : t + 1], past_key_values=x).logits for x in (cache, loaded))
            assert torch.equal(bits(one), bits(other))
    assert held(loaded) == held(cache)


@pytest.mark.parametrize("name", ["full", "flags", "ring", "snapkv"])
def test_what_crop_takes_back_after_loading(tiny_llama, tmp_path, name):
    """Saved between a draft and its crop: what it takes back is what the original takes back."""
    model, text = tiny_llama(), Text()
    cache = made(model, name)
    text.begin(model, cache)
    text.feed(model, [cache], text.tokens(1))
    text.feed(model, [cache], text.tokens(6))
    cache.save(tmp_path / "c")
    loaded = ag.EvictionCache.load(tmp_path / "c", model)
    for each in (cache, loaded):
        each.crop(5)
    text.mask = text.mask[:, :-5]
    for size in (1, 1, 3, 1):
        assert torch.equal(*text.feed(model, [cache, loaded], text.tokens(size)))
    assert held(cache) == held(loaded)


@pytest.mark.parametrize("name", ["flags", "ring", "snapkv", "late"])
def test_what_crop_refuses_after_loading(tiny_llama, tmp_path, name, monkeypatch):
    """Every number of tokens that the original would not take back, the loaded one does not either."""
    monkeypatch.setitem(CASES, "late", ("knorm", 12, "steps:4", {}, None))
    model, text = tiny_llama(), Text()
    cache = made(model, name)
    text.begin(model, cache)
    for _ in range(9):
        text.feed(model, [cache], text.tokens(1))
    cache.crop(1)
    text.mask = text.mask[:, :-1]
    text.feed(model, [cache], text.tokens(2))
    cache.save(tmp_path / "c")

    def outcome(each, number):
        try:
            each.crop(number)
        except UserError as error:
            return str(error)
        at = text.mask.shape[1] - number
        mask, ids = torch.cat([text.mask[:, :at], torch.ones(3, 4, dtype=torch.long)], 1), torch.full((3, 4), 9)
        with torch.no_grad():
            outs = [
                model(ids[:, :1], attention_mask=mask[:, : at + n], past_key_values=each).logits for n in (1, 2, 3, 4)
            ]
        return torch.cat(outs).tolist(), held(each)

    found = []
    for number in range(1, 14):
        one, other = copy.deepcopy(cache), ag.EvictionCache.load(tmp_path / "c", model)
        found.append(outcome(one, number))
        assert found[-1] == outcome(other, number)
    assert {type(x) for x in found} == {str, tuple}


def test_padding_on_the_right(tiny_llama, tmp_path):
    """Later tokens of a shorter sequence follow its own last one, not the padding."""
    model, text = tiny_llama(), Text()
    cache, mask = made(model, "h2o"), text.mask.flip(1)
    with torch.no_grad():
        model(text.ids.flip(1) * mask, attention_mask=mask, past_key_values=cache)
        cache.save(tmp_path / "c")
        loaded = ag.EvictionCache.load(tmp_path / "c", model)
        for _ in range(4):
            ids, mask = text.tokens(1), torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            one, other = (model(ids, attention_mask=mask, past_key_values=x).logits for x in (cache, loaded))
            assert torch.equal(one, other)
    assert held(cache) == held(loaded)


def test_generate_goes_on_and_checks_the_text(tiny_llama, tmp_path):
    """One context, many questions, in another process's words: each answer is that of a copy."""
    model, greedy = tiny_llama(), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    drawn = torch.Generator().manual_seed(4)
    context, ask, other = (torch.randint(3, 128, (1, n), generator=drawn) for n in (60, 7, 60))
    cache = ag.EvictionCache(model, "h2o@heads", 0.4, "every")
    first = model.generate(context, past_key_values=cache, **greedy)
    ids = torch.cat([first, ask], 1)
    cache.save(tmp_path / "c")
    loaded = ag.EvictionCache.load(tmp_path / "c", model)
    with refuses(UserError, "column 0", "cache.reset()"):
        model.generate(torch.cat([other, ids[:, 60:]], 1), past_key_values=loaded, **greedy)
    found = model.generate(ids, past_key_values=loaded, **greedy)
    assert torch.equal(found, model.generate(ids, past_key_values=copy.deepcopy(cache), **greedy))
    loaded.reset()
    again = model.generate(context, past_key_values=loaded, **greedy)
    assert torch.equal(again, first)


def test_only_what_is_held_is_written(tiny_llama, tmp_path):
    """Of 400 tokens 20 a head stay: in 3 layers of 2 heads 20 keys and values of 16 numbers, and little beside them."""
    model, ids = tiny_llama(), torch.randint(3, 128, (1, 400), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, "snapkv", 20, window=4)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "c")
    tensors = safetensors.torch.load_file(tmp_path / "c")
    assert sum(x.nbytes for name, x in tensors.items() if re.search("keys|values", name)) == 3 * 2 * 20 * 16 * 2 * 4
    rest = {name: x.nbytes for name, x in tensors.items() if not re.search("keys|values", name)}
    assert sum(rest.values()) <= 3 * 2 * 20 * 4 + 400 + 3 * 8 * 8
    assert (tmp_path / "c").stat().st_size < sum(x.nbytes for x in tensors.values()) + 8000
    for index, layer in enumerate(cache.evicting_layers):
        rows = layer.store.padded()
        assert torch.equal(tensors[f"layers.{index}.store.keys"], rows.keys.flatten(0, 1))
        assert torch.equal(tensors[f"layers.{index}.store.values"], rows.values.flatten(0, 1))


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_gates_of_a_folder(tiny_llama, tmp_path, threshold):
    model, text = tiny_llama(), Text()
    gates = gates_for(model)
    gates.save_pretrained(tmp_path / "gates")
    cache = ag.EvictionCache(model, f"gates:{tmp_path / 'gates'}", threshold=threshold)
    text.begin(model, cache)
    cache.save(tmp_path / "c")
    loaded = ag.EvictionCache.load(tmp_path / "c", model)
    for _ in range(4):
        assert torch.equal(*text.feed(model, [cache, loaded], text.tokens(1)))
    gates_for(model, seed=1).save_pretrained(tmp_path / "gates")
    with refuses(UserError, "other gates", str(tmp_path / "c")):
        ag.EvictionCache.load(tmp_path / "c", model)


def test_attached_gates_are_compared(tiny_llama, tmp_path):
    model, text = tiny_llama(), Text()
    cache = made(model, "ring")
    text.begin(model, cache)
    cache.save(tmp_path / "c")
    ag.detach(model)
    ag.attach(model, gates_for(model, seed=1, **RING))
    with refuses(UserError, "other gates"):
        ag.EvictionCache.load(tmp_path / "c", model)
    ag.detach(model)
    ag.attach(model, gates_for(model, **RING).at(threshold=0.4))
    with refuses(UserError, "other gates"):
        ag.EvictionCache.load(tmp_path / "c", model)
    ag.detach(model)
    with refuses(UserError, "ag.attach"):
        ag.EvictionCache.load(tmp_path / "c", model)


def test_under_autocast(tiny_llama, tmp_path):
    """Keys are rotated in float32 then, and values are products in bfloat16."""
    model, text = tiny_llama(), Text()
    cache = made(model, "h2o")
    with torch.autocast("cpu", torch.bfloat16):
        text.begin(model, cache)
        store = cache.evicting_layers[0].store
        assert (store.pool.keys.dtype, store.pool.values.dtype) == (torch.float32, torch.bfloat16)
        cache.save(tmp_path / "c")
        loaded = ag.EvictionCache.load(tmp_path / "c", model)
        assert torch.equal(*text.feed(model, [cache, loaded], text.tokens(1)))
    with refuses(UserError, "values"):
        ag.EvictionCache.load(tmp_path / "c", model)


def test_instructions_of_a_tokenizer(tiny_llama, tiny_tokenizer, tmp_path):
    """The policy's text does not have them; the loaded cache does, for its next prompt."""
    model, text = tiny_llama(), Text()
    cache = ag.EvictionCache(model, ag.policy("kvzip+caote", 12).with_tokenizer(tiny_tokenizer))
    assert cache.policy.scorer.inner.ask
    text.begin(model, cache)
    cache.save(tmp_path / "c")
    loaded = ag.EvictionCache.load(tmp_path / "c", model)
    assert loaded.policy.scorer == cache.policy.scorer
    for each in (cache, loaded):
        each.reset()
        text.begin(model, each)
    assert held(loaded) == held(cache)


#: Attributes that a fresh cache of the same policy and model has too, or that follow from those that are written.
FIXED = {
    "cache": {"policy", "gates", "decoder", "evicting_layers", "layers", "layer_class_to_replicate", "offloading",
              "sharing", "pool", "decision", "repetition"},
    "text": {"policy", "gates", "rotation", "layers", "now", "_alike", "_counters", "_ahead"},
    "shares": {"open", "votes"},
    "layer": {"policy", "gates", "rotation", "keys", "values", "is_initialized", "_ran", "gate_type", "recent", "pool",
              "_until_full"},
    "gate": {"window"},
    "store": {"batch", "kv_heads", "gate_type", "_in_order", "_held", "_table", "_room", "_shared", "_prompt", "_runs",
              "_indexed", "_counted", "_since", "_ahead", "_going", "_slots_going", "_numbers", "slots", "_reserved",
              "_mine", "_ones"},
}  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2], ids=["prompt", "decoding"])
@pytest.mark.parametrize("name", ["full", "h2o", "pyramidkv-steps", "kvzip", "ranked", "ring"])
def test_no_attribute_is_forgotten(tiny_llama, name, steps):
    """Whatever a part has that is not fixed is written; a new attribute must be put on one of the two lists."""
    model, text = tiny_llama(), Text()
    cache = made(model, name)
    text.begin(model, cache)
    for _ in range(steps):
        text.feed(model, [cache], text.tokens(1))

    def written(kind, part):
        return vars(part).keys() - FIXED[kind]

    assert written("cache", cache) == {"text", "parts"}
    shares = set() if cache.decision is None else {"shares"}
    assert cache.parts.keys() == {"text", "layers.0", "layers.1", "layers.2"} | shares
    assert written("text", cache.text) == cache.text.state_dict().keys()
    if cache.decision is not None:
        assert (
            vars(cache.decision).keys() == {"policy", "shares", "_of", "_allowed", "_found", "_looked"}
            and cache.decision is cache.parts["shares"]
        )
        assert written("shares", cache.decision.shares) == cache.decision.shares.state_dict().keys()
    for index, layer in enumerate(cache.evicting_layers):
        assert layer is cache.parts[f"layers.{index}"]
        names = {"_scoring": "scoring_seconds", "gate_memory": "gate"}  # a property stands for the stopwatch
        state = layer.state_dict()
        assert {names.get(x, x) for x in written("layer", layer)} == state.keys()
        assert written("gate", layer.gate_memory) == state["gate"].keys()
        columns = {"keys", "values", "ranks", "gate"}
        assert {x.strip("_") for x in written("store", layer.store)} == state["store"].keys() - columns


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
    ("change", "named"),
    [
        ({"num_hidden_layers": 2}, ("num_layers=3", "2")),
        ({"num_key_value_heads": 4}, ("num_kv_heads=2", "4")),
        ({"head_dim": 32}, ("head_dim=16", "32")),
    ],
)
def test_another_geometry(tiny_llama, saved, change, named):
    with refuses(UserError, str(saved[1]), *named):
        ag.EvictionCache.load(saved[1], tiny_llama(**change))


def test_another_type(tiny_llama, saved):
    with refuses(UserError, "dtype='torch.float32'", "torch.bfloat16"):
        ag.EvictionCache.load(saved[1], tiny_llama().bfloat16())


def rewritten(file, change=lambda head, tensors: None, **metadata):
    """Write a saved cache again, changed."""
    with safe_open(file, "pt") as opened:
        kept = opened.metadata() | metadata
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    head = json.loads(kept["cache"])
    change(head, tensors)
    safetensors.torch.save_file(tensors, file, kept | {"cache": json.dumps(head)})


def test_another_schema(saved):
    model, file = saved
    rewritten(file, schema=str(SCHEMA + 1))
    with refuses(UserError, str(file), f"schema='{SCHEMA + 1}'", f"expected {SCHEMA}"):
        ag.EvictionCache.load(file, model)


def test_no_such_file_and_no_cache(saved, tmp_path):
    model, file = saved
    with refuses(UserError, "nowhere"):
        ag.EvictionCache.load(tmp_path / "nowhere", model)
    (tmp_path / "text").write_text("hello")
    with refuses(UserError, "text", "EvictionCache.save"):
        ag.EvictionCache.load(tmp_path / "text", model)
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    with refuses(UserError, "weights", "EvictionCache.save"):
        ag.EvictionCache.load(tmp_path / "weights", model)
    for size in (4, 100, file.stat().st_size - 5):
        (tmp_path / "short").write_bytes(file.read_bytes()[:size])
        with refuses(UserError, "short"):
            ag.EvictionCache.load(tmp_path / "short", model)
    with refuses(UserError, str(tmp_path)):
        ag.EvictionCache.load(tmp_path, model)


def forge(name, value):
    def change(head, tensors):
        tensors[name] = value(tensors[name])

    return change


def drop(*path):
    def change(head, tensors):
        part = head["state"]
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]

    return change


def forge_gate(head, tensors):
    head["state"]["layers.1"]["store"]["gate"] = {"tensor": "layers.1.store.gate"}
    tensors["layers.1.store.gate"] = torch.ones(len(tensors["layers.1.store.ranks"]))


FORGED = {
    "long rows": forge("layers.1.store.lengths", lambda x: x + 10**6),
    "rows below zero": forge("layers.1.store.lengths", lambda x: x - 100),
    "few keys": forge("layers.2.store.keys", lambda x: x[:-1]),
    "wide ranks": forge("layers.2.store.ranks", lambda x: x[:, None].expand(-1, 2).contiguous()),
    "lengths of another type": forge("layers.1.store.lengths", lambda x: x.int()),
    "lengths as a table": forge("layers.1.store.lengths", lambda x: x[:, None]),
    "a row less": forge("layers.1.store.lengths", lambda x: x[:-1]),
    "ranks below zero": forge("layers.1.store.ranks", lambda x: x - 1),
    "ranks beyond the text": forge("layers.1.store.ranks", lambda x: x.where(x < x.max(), 41)),
    "a token twice": forge("layers.1.store.ranks", lambda x: x.where(x != x[1], x[0])),
    "ranks out of order": forge("layers.1.store.ranks", lambda x: x.flip(0)),
    "no window": lambda head, tensors: head["state"]["layers.0"].update(window=0),
    "lengths that wrap": forge("layers.1.store.lengths", lambda x: x.where(torch.arange(len(x)) < 5, 2**63 - 1)),
    "precise keys": forge("layers.2.store.keys", lambda x: x.double()),
    "coarse values": forge("layers.2.store.values", lambda x: x.half()),
    "what gates said, without gates": forge_gate,
    "a text that is no mask": forge("text.valid", lambda x: x.long()),
    "ranks of another type": forge("layers.2.store.ranks", lambda x: x.long()),
    "keys of another type": forge("layers.2.store.keys", lambda x: x.int()),
    "keys of another width": forge("layers.2.store.keys", lambda x: x[:, :8].contiguous()),
    "other sequences": forge("text.valid", lambda x: x[:2]),
    "no records": drop("layers.0", "memory"),
    "no layer": drop("layers.2"),
    "no shares": drop("shares"),
    "no policy": lambda head, tensors: head.pop("policy"),
    "no gates": lambda head, tensors: head.pop("gates"),
    "a number for the model": lambda head, tensors: head.update(base_model=3),
    "a model without geometry": lambda head, tensors: head["base_model"].update(fingerprint=None),
    "a number for a tensor": lambda head, tensors: head["state"]["text"].update(valid=3),
    "a text for a number": lambda head, tensors: head["state"]["layers.0"].update(columns_seen="3"),
    "an attribute more": lambda head, tensors: head["state"]["layers.0"].update(run=3),
    "a tensor that is not there": lambda head, tensors: tensors.pop("layers.0.store.values"),
    "a share of a layer that has none": lambda head, tensors: head["state"]["shares"]["settled"]["items"].append(
        [7, 3]
    ),
    "marks of other sequences": lambda head, tensors: head["state"]["shares"].update(
        over_budget={"tensor": "text.valid"}
    ),
    "a part more": lambda head, tensors: head["state"].update(more={}),
    "shares of other layers": lambda head, tensors: head["state"]["shares"].update(layers=[0, 1]),
}


@pytest.mark.parametrize("name", FORGED)
def test_damage(saved, name):
    model, file = saved
    rewritten(file)
    ag.EvictionCache.load(file, model)
    rewritten(file, FORGED[name])
    with refuses(UserError, str(file), "damaged"):
        ag.EvictionCache.load(file, model)


def in_store(**changes):
    return lambda head, tensors: head["state"]["layers.1"]["store"].update(changes)


FORGED_FLAGS = {
    "lengths of another type": forge("layers.1.store.lengths", lambda x: x.int()),
    "precise keys": forge("layers.1.store.keys", lambda x: x.double()),
    "precise values": forge("layers.1.store.values", lambda x: x.double()),
    "flags of another type": forge("layers.1.store.gate", lambda x: x.float()),
    "flags without any": forge("layers.1.store.gate", lambda x: x[:, None][:, :0]),
    "no flags": in_store(gate=None),
}


@pytest.mark.parametrize("name", FORGED_FLAGS)
def test_flags_that_a_kernel_could_not_work_with(tiny_llama, tmp_path, name):
    model, file, text = tiny_llama(), tmp_path / "c", Text()
    cache = made(model, "ring")
    text.begin(model, cache)
    text.feed(model, [cache], text.tokens(2))
    cache.save(file)
    rewritten(file)
    ag.EvictionCache.load(file, model)
    rewritten(file, FORGED_FLAGS[name])
    with refuses(UserError, str(file), "damaged"):
        ag.EvictionCache.load(file, model)


def test_nothing_to_save_yet(tiny_llama, tmp_path):
    model, ids = tiny_llama(), torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, "snapkv", 12, window=4)
    with refuses(UserError, "EvictionCache.save", "nothing", "prompt"):
        cache.save(tmp_path / "c")
    cache.expect(torch.ones(1, 20, dtype=torch.bool))
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        with refuses(UserError, "8 of 20 columns"):
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


@dataclass(frozen=True, kw_only=True)
class Remembers(Scorer):
    """Records what no file can have."""

    needs = Needs(every_query=True)

    def note(self, seen, records):
        records["words"] = Words(seen.key_ranks.shape) if seen.decoding else seen.key_ranks.float()

    def score(self, seen):
        return seen.key_ranks.float()


class Words(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape


@dataclass(frozen=True, kw_only=True)
class Rereads(Scorer):
    """Rereads in a way of its own."""

    def score(self, seen):
        return seen.key_ranks.float()

    def repetition(self):
        class Own(Repetition):
            pass

        own = Own(self)
        own.done = True
        return own


def test_states_that_no_file_can_have(tiny_llama, tmp_path, monkeypatch):
    model, text = tiny_llama(), Text()
    monkeypatch.setitem(SCORERS, "remembers", Remembers)
    monkeypatch.setitem(SCORERS, "rereads", Rereads)
    cache = ag.EvictionCache(model, "remembers", 60, "every")
    text.begin(model, cache)
    cache.save(tmp_path / "tensors")
    loaded = ag.EvictionCache.load(tmp_path / "tensors", model)
    assert torch.equal(*(x.evicting_layers[2].memory["words"] for x in (cache, loaded)))
    text.feed(model, [cache], text.tokens(1))
    with refuses(UserError, "layers.0.memory.words", "Words", "copy.deepcopy"):
        cache.save(tmp_path / "c")
    cache = ag.EvictionCache(model, "rereads", 12)
    Text().begin(model, cache)
    with refuses(UserError, "Own"):
        cache.save(tmp_path / "c")
    changed = ag.policy("snapkv", 12, window=4)
    object.__setattr__(changed, "scorer", ag.policy("h2o", 12).scorer)
    cache = ag.EvictionCache(model, changed)
    Text().begin(model, cache)
    with refuses(UserError, "ag.policy"):
        cache.save(tmp_path / "c")
    assert {x.name for x in tmp_path.iterdir()} == {"tensors"}


def test_pickling_says_what_to_do(tiny_llama, tmp_path):
    with refuses(UserError, "cache.save(path)", "EvictionCache.load(path, model)", "copy.deepcopy"):
        torch.save(ag.EvictionCache(tiny_llama(), "h2o", 4), tmp_path / "cache.pt")
