"""positions=slot and positions=interpolated: keys and queries are rotated when they meet; against float64."""

from functools import partial

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ag
from ag.errors import UserError
from ag.model.hooks import UnsupportedModelError, decoder_of
from tests.support.bounds import hold, of_logits, of_pass
from tests.support.dense import forward
from tests.support.gates_for import gates_for
from tests.support.held import feed, run
from tests.support.pairs import covering

PROMPTS, STEPS = (29, 19), 8
ROWS = [torch.randint(3, 128, (p + STEPS,), generator=torch.Generator().manual_seed(p)) for p in PROMPTS]
POLICIES = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "snapkv@heads": {"window": 4, "kernel": 3, "floor": 0.0},
    "tova+caote@pyramid": {},
}
SCHEDULES = ("prefill", "blocks:8+every", "every")


def by_slots(ranks, query):
    """Places of what a head holds: their index."""
    return range(len(ranks))


def squeezed(context):
    """Give what gives places: from a query's own, those beyond half of the context in proportion."""

    def places(ranks, query):
        far = query - context // 2
        room = context - 1 - context // 2
        return [
            context - 1 - (d if d <= context // 2 or far <= room else context // 2 + (d - context // 2) * room / far)
            for d in (query - rank for rank in ranks)
        ]

    return places


def slot_logits(model, ids, events, places=by_slots):
    """Logits ``[T, V]`` of one row, float64 where the model is.

    ``events[layer]``: what came together, as (queries, what each KV head held then, pairs that are not visible).
    """
    turned, x = model.get_decoder().rotary_emb, model.get_input_embeddings()(ids)[None]

    def attend(layer, _, q, k, v):
        out, group = torch.full_like(q, float("nan")), len(q) // len(k)
        for queries, held, hidden_pairs in events[layer]:
            each = range(len(queries))
            for h in range(len(q)):
                g = h // group
                mine = [held[g].index(i) for i in queries]
                turn = turned(x, torch.tensor([[*places(held[g], i)] for i in queries], dtype=q.dtype))
                asked = torch.zeros(len(queries), 1, len(held[g]), q.shape[-1], dtype=q.dtype)
                asked[each, 0, mine] = q[h, queries]
                asked, keys = apply_rotary_pos_emb(asked, k[g, held[g]].expand_as(asked), *turn)
                scores = (asked[each, 0, mine][:, None] @ keys[:, 0].mT)[:, 0] * q.shape[-1] ** -0.5
                hidden = [[t > i or (g, i, t) in hidden_pairs for t in held[g]] for i in queries]
                out[h, queries] = scores.masked_fill(torch.tensor(hidden), float("-inf")).softmax(-1) @ v[g, held[g]]
        return out

    return forward(model, ids, attend)


def events_of(result, row):
    return [
        [(arrival.new[row], arrival.held[row], set()) for arrival in layer if arrival.new[row]]
        for layer in result.arrivals
    ]


def check_slots(exact, rows, result, places=by_slots):
    for b, row in enumerate(rows):
        events = events_of(result, b)
        wanted = partial(slot_logits, exact, row, events, places)
        hold(result.logits[b], wanted(), of_pass(exact, wanted, torch.float32))


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    covering(
        name=list(POLICIES),
        schedule=SCHEDULES,
        side=["left", "right"],
        allowed=lambda name, schedule, **_: schedule != "prefill" or name in ("streaming_llm", "snapkv@heads"),
    ),
)
def test_keys_are_rotated_by_their_slots(tiny_llama, name, schedule, side):
    """Alone and in padded batches, which hold the same."""
    model, exact = tiny_llama(), tiny_llama().double()
    policy = ag.policy(name, 12, schedule, positions="slot", **POLICIES[name])
    rows = [row[:-4] for row in ROWS]
    alone = run(model, policy, [rows[1]], [PROMPTS[1]])
    check_slots(exact, [rows[1]], alone)
    batch = run(model, policy, rows, PROMPTS, side)
    check_slots(exact, rows, batch)
    assert [[layer[1] for layer in held] for held in batch.held] == [
        [layer[0] for layer in held] for held in alone.held
    ]
    if name.endswith("@heads"):
        assert any(len(heads[0]) != len(heads[1]) for layer in batch.held[-1] for heads in layer)
    original = run(model, ag.policy(name, 12, schedule, **POLICIES[name]), [rows[1]], [PROMPTS[1]])
    assert (original.logits[0][PROMPTS[1] :] - alone.logits[0][PROMPTS[1] :]).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "schedule"), [("h2o", "every"), ("snapkv@heads", "blocks:8+steps:3")])
def test_chat_turns(tiny_llama, name, schedule):
    """Turns of several tokens, of another number for each sequence, or of none."""
    passes = [[29, 19], [1, 1], [5, 3], [1, 0], [1, 4]]
    policy = ag.policy(name, 12, schedule, positions="slot", **POLICIES[name])
    rows = [row[: sum(n[b] for n in passes)] for b, row in enumerate(ROWS)]
    for side in ("left", "right"):
        model = tiny_llama()
        check_slots(tiny_llama().double(), rows, feed(ag.EvictionCache(model, policy), model, rows, passes, side))


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    covering(name=list(POLICIES), schedule=["blocks:8+every", "every", "prefill"], side=["left", "right"]),
)
def test_far_tokens_are_squeezed_into_the_context(tiny_llama, name, schedule, side):
    """Of a context that the prompt of one row fits and that of the other does not: whole, in blocks, and in turns."""
    model, exact = (tiny_llama(max_position_embeddings=24) for _ in range(2))
    policy = ag.policy(name, 12, schedule, positions="interpolated", **POLICIES[name])
    passes = [PROMPTS, (1, 1), (4, 3), (1, 1), (0, 3)]
    rows = [row[: sum(n[b] for n in passes)] for b, row in enumerate(ROWS)]
    result = feed(ag.EvictionCache(model, policy), model, rows, passes, side)
    check_slots(exact.double(), rows, result, squeezed(24))


def test_within_the_context_nothing_is_squeezed(tiny_llama):
    model, logits = tiny_llama(max_position_embeddings=len(ROWS[0])), []
    for positions in ("original", "interpolated"):
        policy = ag.policy("h2o", 12, "blocks:8+every", positions=positions)
        logits.append(run(model, policy, ROWS[:1], PROMPTS[:1]).logits[0])
    hold(*logits, 2 * of_logits(model))


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


@pytest.mark.parametrize("rope", ROPES)
def test_other_rotations(tiny_llama, rope):
    model, exact = tiny_llama(rope_parameters=ROPES[rope]), tiny_llama(rope_parameters=ROPES[rope]).double()
    assert (decoder_of(model).rotary_emb.attention_scaling != 1) == (rope == "yarn")
    result = run(model, ag.policy("h2o", 12, "blocks:8+every", positions="slot"), [row[:-4] for row in ROWS], PROMPTS)
    check_slots(exact, [row[:-4] for row in ROWS], result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming_llm", "tova"])
def test_a_stream_runs_past_the_context_of_the_model(tiny_llama, name):
    """No position beyond budget and block ever reaches the rotary embedding, and the text goes on as it should."""
    model = tiny_llama(max_position_embeddings=48)
    row = torch.randint(3, 128, (60 + 20,), generator=torch.Generator().manual_seed(1))
    policy = ag.policy(name, 24, "blocks:8+every", positions="slot")
    cache, positions = ag.EvictionCache(model, policy), []
    decoder_of(model).rotary_emb.register_forward_pre_hook(
        lambda _, args, named: positions.append((args[1] if len(args) > 1 else named["position_ids"]).abs().max()),
        with_kwargs=True,
    )
    result = feed(cache, model, [row], [[60], *[[1]] * 20])
    assert 24 <= int(torch.stack(positions).max()) <= 24 + 8
    assert cache.seen_tokens == 80
    check_slots(tiny_llama(max_position_embeddings=48).double(), [row], result)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("dynamic", {}), ("longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8})],
)
def test_rotations_that_change_are_refused(tiny_llama, kind, extra):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64} | extra
    model = tiny_llama(rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match=f"positions=slot: .*{kind}.*positions=original"):
        ag.EvictionCache(model, "streaming_llm", budget=24, positions="slot")
    ag.EvictionCache(model, "streaming_llm", budget=24)


def test_partial_rotations_are_refused():
    config = PhiConfig(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(UnsupportedModelError, match="PhiModel.* 8 .* 16 "):
        ag.EvictionCache(PhiForCausalLM(config), "streaming_llm", budget=24, positions="slot")


def test_sliding_windows_are_refused(tiny_mistral, tiny_qwen2):
    with pytest.raises(UserError, match="window of 16 .*positions=original"):
        ag.EvictionCache(tiny_mistral(), "streaming_llm", budget=24, positions="slot")
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny_qwen2(use_sliding_window=True, sliding_window=9, layer_types=kinds)
    with pytest.raises(UserError, match="positions=slot: Qwen2Model.* window of 9 "):
        ag.EvictionCache(model, "h2o", budget=24, positions="slot")
    ag.EvictionCache(tiny_mistral(sliding_window=None), "h2o", budget=24, positions="slot")


def test_gates_on_every_token(tiny_llama):
    """What each head holds follows from the flags that the gates gave, and slots from what it holds."""
    model, exact, recent, passes = tiny_llama(), tiny_llama().double(), 4, [20, *[1] * 6, 5, *[1] * 6]
    ag.attach(model, gates_for(model, covers="all", sink_tokens=1, recent_tokens=recent, window=5))
    row, judged, flag = ROWS[0][: sum(passes)], [], ag.AttentionGates.flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ag.AttentionGates, "flags", lambda self, x: judged.append(flag(self, x)[0]) or flag(self, x))
        cache = ag.EvictionCache(model, ag.policy("gates", positions="slot"))
        result = feed(cache, model, [row], [[n] for n in passes])
    events = []
    for layer in range(3):
        flags = torch.cat(judged[layer::3], 1).tolist()
        happened, done = [], 0
        for size in passes:
            first, end = done, done + size
            held = [[t for t in range(end) if not done or t < 1 or head[t] or first - t < recent] for head in flags]
            gone = {
                (g, i, t)
                for g, head in enumerate(flags)
                for i in range(first, end)
                for t in held[g]
                if not (t < 1 or head[t] or i - t < recent)
            }
            happened.append((list(range(first, end)), held, gone))
            done = end
        events.append(happened)
    wanted = slot_logits(exact, row, events)
    hold(result.logits[0], wanted, of_logits(model))
    assert cache.kept_share() < 0.9
