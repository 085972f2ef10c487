"""positions=slot and positions=interpolated: held keys are turned on when their places change; against float64."""

import copy
import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ag
from ag.engine.block_pool import Pool
from ag.engine.cache import EvictionCache
from ag.engine.evictor import Evictor
from ag.engine.layer import Layer
from ag.errors import UserError
from ag.model.hooks import UnsupportedModelError, decoder_of
from tests.support.bounds import hold, of_logits, of_pass
from tests.support.dense import forward
from tests.support.gates_for import gates_for
from tests.support.pairs import covering
from tests.support.refused import refuses

PROMPTS, STEPS = (29, 19), 8
ROWS = [torch.randint(3, 128, (p + STEPS,), generator=torch.Generator().manual_seed(p)) for p in PROMPTS]
POLICIES = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "h2o@global": {},
    "snapkv@heads": {"window": 4, "kernel": 3, "floor": 0.0},
    "tova+caote@pyramid": {},
}
SCHEDULES = ("prefill", "blocks:8+every", "every")
TURNS = [PROMPTS, (1, 1), (4, 3), (1, 1), (0, 3)]


# ---- the oracle: what heads held when queries attended, and where that lay


def by_slots(held, queries):
    """Places of what a head holds: their number in the order of the text."""
    return [sorted(held).index(rank) for rank in held]


def squeezed(context):
    """Give what gives places seen from the end of the sixteenth of the context that a pass ends in."""
    stride, near = max(1, context // 16), context // 2

    def places(held, queries):
        newest = max(context, -(-(queries[-1] + 1) // stride) * stride) - 1
        far, room = newest - near, context - 1 - near
        distances = [newest - rank for rank in held]
        return [newest - (d if d <= near else near + (d - near) * room / max(far, room)) for d in distances]

    return places


@contextmanager
def recorded(layers=3):
    """Give for each layer and sequence what came together, as (queries, what each KV head held then)."""
    events, read = [{} for _ in range(layers)], Layer.read

    def recording(layer, call, batch, store, *others):
        found = read(layer, call, batch, store, *others)
        for b, (row, heads) in enumerate(zip(batch.ranks, store.ledger(layer.index)[1], strict=True)):
            new, held = row[row >= 0].tolist(), [x[x >= 0].tolist() for x in heads]
            if new:
                events[layer.index].setdefault(b, []).append((new, held))
        return found

    Layer.read = recording
    try:
        yield events
    finally:
        Layer.read = read


def slot_logits(model, ids, events, places=by_slots, hidden=lambda *_: False):
    """Logits ``[T, V]`` of one row, float64 where the model is; ``hidden(layer, head, query, key)`` are not seen."""
    turned, x = model.get_decoder().rotary_emb, model.get_input_embeddings()(ids)[None]

    def attend(layer, _, q, k, v):
        out, group = torch.full_like(q, float("nan")), len(q) // len(k)
        for queries, held in events[layer]:
            for h in range(len(q)):
                mine, g = held[h // group], h // group
                at = torch.tensor([places(mine, queries)], dtype=torch.float64)
                turn = [x[0] for x in turned(x, at)]
                own = [mine.index(i) for i in queries]
                keys = rotated(k[g, mine], turn)
                asked = rotated(q[h, queries], [x[own] for x in turn])
                unseen = [[t > i or hidden(layer, g, i, t) for t in mine] for i in queries]
                scores = asked @ keys.mT * q.shape[-1] ** -0.5
                out[h, queries] = scores.masked_fill(torch.tensor(unseen), float("-inf")).softmax(-1) @ v[g, mine]
        return out

    return forward(model, ids, attend)


def rotated(x, turn):
    """Rotate ``[n, D]`` by cosines and sines ``[n, D]``."""
    cos, sin = turn
    return apply_rotary_pos_emb(x[None, None], x[None, None], cos[None], sin[None])[0][0, 0]


@torch.no_grad()
def fed(cache, model, rows, passes, side="left"):
    """Feed rows in passes, each of which takes so many tokens of each row; returns the logits of each row's tokens."""
    done, outs, mask = [0] * len(rows), [], torch.zeros(len(rows), 0, dtype=torch.long)
    for lengths in passes:
        longest = max(lengths)
        ids, flags = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
        for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            place = slice(longest - n, longest) if side == "left" else slice(0, n)
            ids[b, place], flags[b, place] = row[done[b] : done[b] + n], 1
        mask, done = torch.cat([mask, flags], 1), [d + n for d, n in zip(done, lengths, strict=True)]
        at = (mask.cumsum(1) - 1).clamp_min(0)[:, -longest:]
        outs.append(model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits)
    return [row[flags] for row, flags in zip(torch.cat(outs, 1), mask.bool(), strict=True)]


def judged(model, exact, cache, rows, passes, side="left", places=by_slots):
    """Feed rows and hold their logits to the oracle; returns them."""
    with recorded() as events:
        logits = fed(cache, model, rows, passes, side)
    for b, row in enumerate(rows):
        wanted = partial(slot_logits, exact, row, [layer[b] for layer in events], places)
        hold(logits[b], wanted(), of_pass(exact, wanted, torch.float32))
    return logits


def single(rows, prompts, steps):
    return [row[: n + steps] for row, n in zip(rows, prompts, strict=True)], [prompts, *[[1] * len(rows)] * steps]


# ---- slots


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "side"), covering(name=list(POLICIES), schedule=SCHEDULES, side=["left", "right"])
)
def test_keys_are_rotated_by_their_slots(tiny_llama, name, schedule, side):
    model, exact = tiny_llama(), tiny_llama().double()
    policy = ag.policy(name, 12, schedule, positions="slot", **POLICIES[name])
    rows, passes = single(ROWS, PROMPTS, 4)
    cache = EvictionCache(model, policy)
    logits = judged(model, exact, cache, rows, passes, side)
    if name.endswith("@heads"):
        assert any(len({len(x) for x in row}) > 1 for layer in range(3) for row in cache.kept_positions(layer))
    original = fed(EvictionCache(model, ag.policy(name, 12, schedule, **POLICIES[name])), model, rows, passes, side)
    assert (original[0][PROMPTS[0] :] - logits[0][PROMPTS[0] :]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "schedule", "side"), [("h2o", "every", "left"), ("snapkv@heads", "blocks:8+steps:3", "right")]
)
def test_chat_turns(tiny_llama, name, schedule, side):
    """Turns of several tokens, of another number for each sequence, or of none."""
    passes = [[29, 19], [1, 1], [5, 3], [1, 0], [1, 4]]
    policy = ag.policy(name, 12, schedule, positions="slot", **POLICIES[name])
    rows, model = [row[: sum(n[b] for n in passes)] for b, row in enumerate(ROWS)], tiny_llama()
    judged(model, tiny_llama().double(), EvictionCache(model, policy), rows, passes, side)


@torch.no_grad()
def test_scorers_are_shown_queries_and_keys_at_their_slots(tiny_llama):
    """Those of earlier chunks too, which were at other slots when they attended; keys of layer 0 depend on no other."""
    model, shown, evict = tiny_llama(), [], Evictor.evict
    plain = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *x: plain.append(x[2].double()))
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *x: plain.append(x[2].double()))
    model(ROWS[0][None], use_cache=False)
    q, k = (x[0].view(len(ROWS[0]), -1, 16).transpose(0, 1) for x in plain[:2])

    def watching(self, seen, batch, store, records):
        if seen.layer == 0:
            shown.append((seen.q[0], seen.query_ranks[0].tolist(), seen.k[0], seen.key_ranks[0]))
        return evict(self, seen, batch, store, records)

    policy = ag.policy("snapkv@heads", 12, "blocks:3", positions="slot", **POLICIES["snapkv@heads"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evictor, "evict", watching)
        model(ROWS[0][None], past_key_values=EvictionCache(model, policy))
    rope, earlier = model.get_decoder().rotary_emb, 0
    for queries, ranks, keys, held in shown:
        for head in range(k.shape[0]):
            there = held[head] >= 0
            mine = held[head][there].tolist()
            slots = by_slots(mine, ranks)
            turn = [x[0] for x in rope(k[:1], torch.tensor([slots]))]
            bound = 16 * torch.finfo(torch.float32).eps * float(k.abs().max() + q.abs().max())
            hold(keys[head][there], rotated(k[head, mine], turn), bound)
            at = [len(mine) - 1 - (ranks[-1] - rank) for rank in ranks]
            turn = [x[0] for x in rope(q[:1], torch.tensor([at]))]
            hold(queries[2 * head], rotated(q[2 * head, ranks], turn), bound)
            earlier += len(ranks) > 3 and len(mine) < ranks[-1]
    assert earlier > 4


ROPES = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
def test_other_rotations(tiny_llama, rope):
    model, exact = tiny_llama(rope_parameters=ROPES[rope]), tiny_llama(rope_parameters=ROPES[rope]).double()
    assert (decoder_of(model).rotary_emb.attention_scaling != 1) == (rope == "yarn")
    cache = EvictionCache(model, ag.policy("h2o", 12, "blocks:8+every", positions="slot"))
    judged(model, exact, cache, *single(ROWS, PROMPTS, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming_llm", "tova"])
def test_a_stream_runs_past_the_context_of_the_model(tiny_llama, name):
    """No position beyond budget and block ever reaches the rotary embedding, and the text goes on as it should."""
    model = tiny_llama(max_position_embeddings=48)
    row = torch.randint(3, 128, (60 + 20,), generator=torch.Generator().manual_seed(1))
    cache, positions = EvictionCache(model, ag.policy(name, 24, "blocks:8+every", positions="slot")), []
    decoder_of(model).rotary_emb.register_forward_pre_hook(
        lambda _, args, named: positions.append((args[1] if len(args) > 1 else named["position_ids"]).abs().max()),
        with_kwargs=True,
    )
    judged(model, tiny_llama(max_position_embeddings=48).double(), cache, [row], [[60], *[[1]] * 20])
    assert 24 <= int(torch.stack(positions).max()) <= 24 + 8


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("passes", [[20, *[1] * 6, 5, *[1] * 6], [*[7] * 5]])
def test_flags(tiny_llama, passes, side):
    """What the first query of a pass does not see has no slot in it; batches and drafts that go back change nothing."""
    model, exact, recent = tiny_llama(), tiny_llama().double(), 4
    gates = gates_for(model, covers="all", sink_tokens=1, recent_tokens=recent, window=5)
    ag.attach(model, gates)
    row, given, flag = ROWS[0][: sum(passes)], [], ag.AttentionGates.flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ag.AttentionGates, "flags", lambda self, x: given.append(flag(self, x)[0]) or flag(self, x))
        cache = EvictionCache(model, ag.policy("gates", positions="slot"))
        got = fed(cache, model, [row], [[n] for n in passes])[0]
    flags, events = [torch.cat(given[layer::3], 1).tolist() for layer in range(3)], []
    for layer in range(3):
        done, happened = 0, []
        for size in passes:
            queries = list(range(done, done + size))
            held = [
                [t for t in range(done + size) if not done or t < 1 or head[t] or done - t < recent]
                for head in flags[layer]
            ]
            happened.append((queries, held))
            done += size
        events.append(happened)
    wanted = partial(
        slot_logits, exact, row, events, hidden=lambda n, g, i, t: not (t < 1 or flags[n][g][t] or i - t < recent)
    )
    hold(got, wanted(), of_logits(model))
    assert any(len(x) < sum(passes) - 5 for layer in range(3) for x in cache.kept_positions(layer)[0])
    again, batch = EvictionCache(model, ag.policy("gates", positions="slot")), [row, ROWS[1][:9]]
    short = [9, *[0] * (len(passes) - 1)]
    hold(fed(again, model, batch, list(zip(passes, short, strict=True)), side)[0], got, 2 * of_logits(model))


# ---- places squeezed into the context


@pytest.mark.parametrize("context", [24, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    covering(name=["h2o", "snapkv@heads"], schedule=["blocks:8+every", "every", "prefill"], side=["left", "right"]),
)
def test_far_tokens_are_squeezed_into_the_context(tiny_llama, name, schedule, side, context):
    """A prompt in the context, and a text that grows beyond it in turns; in blocks a longer prompt too."""
    model, exact = (tiny_llama(max_position_embeddings=context) for _ in range(2))
    policy = ag.policy(name, 12, schedule, positions="interpolated", **POLICIES[name])
    prompt = PROMPTS if "blocks" in schedule else (22, 19)
    passes = [prompt, *[(1, 1)] * 6, (4, 3), *[(1, 1)] * 3, (0, 3), *[(1, 1)] * 3]
    whole = [torch.cat([row, ROWS[0]]) for row in ROWS]
    rows = [row[: sum(n[b] for n in passes)] for b, row in enumerate(whole)]
    assert len(rows[0]) > context or context == 40
    judged(model, exact.double(), EvictionCache(model, policy), rows, passes, side, squeezed(context))


def test_a_text_goes_on_far_beyond_the_context(tiny_llama):
    """Where nothing is evicted too; keys are turned once in each of its sixteenths."""
    model, exact = (tiny_llama(max_position_embeddings=48) for _ in range(2))
    row = torch.randint(3, 128, (120,), generator=torch.Generator().manual_seed(1))
    for policy in (ag.policy("full", positions="interpolated"), ag.policy("h2o", 20, positions="interpolated")):
        cache = EvictionCache(model, policy)
        got = judged(model, exact.double(), cache, [row], [[40], *[[8]] * 10], places=squeezed(48))[0]
        plain = fed(EvictionCache(model, policy.spec, policy.budget), model, [row], [[40], *[[8]] * 10])[0]
        hold(got[:48], plain[:48], 2 * of_logits(model))  # within the context nothing is squeezed
        assert (got[60:] - plain[60:]).abs().max() > 1e-2


def test_passes_that_would_be_squeezed_are_refused(tiny_llama):
    model = tiny_llama(max_position_embeddings=32)
    cache = EvictionCache(model, "h2o", 12, positions="interpolated")
    with refuses(UserError, "interpolated", "sequence 1", "33", "32", "blocks:14", "cache.reset()"):
        fed(cache, model, [ROWS[1][:5], torch.cat(ROWS)], [(5, 33)])
    cache.reset()
    fed(cache, model, [torch.cat(ROWS)], [(32,), (14,)])  # in the context, and in a part that is short enough


# ---- sequences that go back, come and go


@pytest.mark.parametrize(
    ("positions", "policy", "schedule"),
    [("slot", "knorm@heads", "steps:9"), ("slot", "flags", "prefill"), ("interpolated", "knorm", "steps:9")],
)
def test_tokens_that_are_taken_back_leave_no_trace(tiny_llama, positions, policy, schedule):
    """A fork of the cache takes a draft back, and so does the cache; both go on as if it had never come."""
    model, budget = tiny_llama(max_position_embeddings=36), None if policy == "flags" else 12
    ag.attach(model, gates_for(model, scope="causal", covers="all", sink_tokens=1, recent_tokens=5))
    cache, clean = (EvictionCache(model, policy, budget, schedule, positions=positions) for _ in range(2))
    for one in (cache, clean):
        fed(one, model, [ROWS[0]], [(33,)])
        with torch.no_grad():
            model(ROWS[0][None, :1], past_key_values=one)
    fork = copy.deepcopy(cache)
    with torch.no_grad():
        want = [model(ids, past_key_values=clean).logits for ids in (ROWS[1][None, :2], ROWS[1][None, 2:9])]
        for one, draft in ((cache, 5), (fork, 4)):
            model(ROWS[0][None, 5 : 5 + draft], past_key_values=one)
            one.crop(-draft)
        for one in (cache, fork):
            for ids, logits in zip((ROWS[1][None, :2], ROWS[1][None, 2:9]), want, strict=True):
                hold(model(ids, past_key_values=one).logits, logits, 4 * of_logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["slot", "interpolated"])
@pytest.mark.parametrize(("policy", "schedule"), [("h2o@heads", "every"), ("snapkv", "steps:4"), ("flags", "prefill")])
@torch.no_grad()
def test_sequences_come_and_go(tiny_llama, positions, policy, schedule):
    """A cache that others are added to, removed from and repeated in goes on like each sequence alone."""
    model, draw, budget = tiny_llama(max_position_embeddings=36), random.Random(3), None if policy == "flags" else 9
    ag.attach(model, gates_for(model, scope="causal", covers="all", sink_tokens=1, recent_tokens=5))
    pool, bound, options = Pool(model, 2**22), 4 * of_logits(model), {"positions": positions}
    options |= {"window": 4} if policy == "snapkv" else {}
    alone, cache, names = {}, None, []
    for number in range(7):
        ids = torch.randint(3, 128, (1, draw.randint(8, 30)))
        new, alone[number] = (EvictionCache(model, policy, budget, schedule, pool=x, **options) for x in (pool, None))
        for one in (new, alone[number]):
            model(ids, past_key_values=one)
        if cache is None:
            cache = new
        else:
            cache.add(new)
        names.append(number)
        if len(names) > 3:
            gone = draw.randrange(len(names))
            cache.remove([gone])
            del names[gone]
        if number == 4:
            twin = draw.randrange(len(names))
            cache.batch_select_indices(torch.tensor([*range(len(names)), twin]))
            alone[99] = copy.deepcopy(alone[names[twin]])
            names.append(99)
        for _ in range(5):
            tokens = torch.randint(3, 128, (len(names), 1))
            got = model(tokens, past_key_values=cache).logits
            for row, name in enumerate(names):
                want = model(tokens[row : row + 1], past_key_values=alone[name]).logits
                hold(got[row : row + 1], want, bound)


@torch.no_grad()
def test_turns_do_not_add_up_to_an_error(tiny_llama):
    """In bfloat16: keys that were turned 150 times lie where the first rotation would have put them."""
    model, plain = tiny_llama().bfloat16(), []
    row = torch.randint(3, 128, (180,), generator=torch.Generator().manual_seed(1))
    policy = ag.policy("streaming_llm", 160, "every", positions="slot", sinks=0)
    cache = EvictionCache(model, policy)
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *x: plain.append(x[2].double()))
    fed(cache, model, [torch.cat([row, row])], [[180], *[[1]] * 150])
    handle.remove()
    k, (index, ranks) = torch.cat(plain, 1)[0].view(330, 2, 16).transpose(0, 1), cache.store.ledger(0)
    for head in range(2):
        mine = ranks[0, head].tolist()
        turn = [x[0] for x in model.get_decoder().rotary_emb(k[:1], torch.tensor([by_slots(mine, [])]))]
        want = rotated(k[head, mine], turn)
        bound = 3 * torch.finfo(torch.bfloat16).eps * k[head, mine].abs().amax(-1, keepdim=True)  # once, by the model
        hold(cache.pool.keys.flatten(0, 1)[index[0, head]], want, bound.expand_as(want))
    assert cache.pool.keys.dtype == torch.float32


# ---- what is refused


@pytest.mark.parametrize("positions", ["slot", "interpolated"])
def test_types_that_turns_wear_out_are_refused(tiny_llama, positions):
    model = tiny_llama()
    with refuses(UserError, f"positions={positions}", "int8", "float32", "positions=original"):
        EvictionCache(model, "h2o", 12, positions=positions, kv_dtype="int8")
    pool = Pool(tiny_llama().bfloat16(), 2**20)
    with refuses(UserError, f"positions={positions}", "bfloat16", "float32", "pool="):
        EvictionCache(tiny_llama().bfloat16(), "h2o", 12, positions=positions, pool=pool)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("dynamic", {}), ("longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8})],
)
@pytest.mark.parametrize("positions", ["slot", "interpolated"])
def test_rotations_that_change_are_refused(tiny_llama, kind, extra, positions):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64} | extra
    model = tiny_llama(rope_parameters=rope)
    with refuses(UnsupportedModelError, f"positions={positions}", kind, "positions=original"):
        EvictionCache(model, "streaming_llm", budget=24, positions=positions)
    EvictionCache(model, "streaming_llm", budget=24)


def test_partial_rotations_are_refused():
    config = PhiConfig(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    with refuses(UnsupportedModelError, "PhiModel", "8", "16"):
        EvictionCache(PhiForCausalLM(config), "streaming_llm", budget=24, positions="slot")


def test_sliding_windows_are_refused(tiny_mistral, tiny_qwen2):
    with refuses(UserError, "window of 16", "positions=original"):
        EvictionCache(tiny_mistral(), "streaming_llm", budget=24, positions="slot")
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny_qwen2(use_sliding_window=True, sliding_window=9, layer_types=kinds)
    with refuses(UserError, "positions=slot", "Qwen2Model", "window of 9"):
        EvictionCache(model, "h2o", budget=24, positions="slot")
    EvictionCache(tiny_mistral(sliding_window=None), "h2o", budget=24, positions="slot")
