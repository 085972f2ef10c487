"""positions=slot and positions=interpolated: held keys are turned on when their places change; against float64."""

import copy
from functools import partial

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ag
from ag.engine.block_pool import Pool
from ag.engine.cache import EvictionCache
from ag.engine.evictor import Evictor
from ag.errors import UserError
from ag.model.structure import UnsupportedModelError
from tests.support.batches import row
from tests.support.bounds import hold, of_logits, of_pass
from tests.support.dense import forward
from tests.support.gates_for import gates_for
from tests.support.held import feed
from tests.support.refused import refuses

PROMPTS, STEPS = (29, 19), 8
ROWS = [row(p + STEPS, p) for p in PROMPTS]
POLICIES = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "h2o@global": {},
    "snapkv@heads": {"window": 4, "kernel": 3, "floor": 0.0},
    "tova+caote@pyramid": {},
}
# ---- the oracle: what heads held when queries attended, and where that lay


def by_slots(held, queries):
    """Places of what a head holds: their number in the order of the text."""
    return [sorted(held).index(token_index) for token_index in held]


def squeezed(context):
    """Give what gives places seen from the end of the sixteenth of the context that a pass ends in."""
    stride, near = max(1, context // 16), context // 2

    def places(held, queries):
        newest = max(context, -(-(queries[-1] + 1) // stride) * stride) - 1
        far, room = newest - near, context - 1 - near
        distances = [newest - token_index for token_index in held]
        return [newest - (d if d <= near else near + (d - near) * room / max(far, room)) for d in distances]

    return places


def slot_logits(model, ids, arrivals, b, places):
    """Logits ``[T, V]`` of a sequence, float64 where the model is."""
    turned, x = model.get_decoder().rotary_emb, model.get_input_embeddings()(ids)[None]

    def attend(layer, _, q, k, v):
        out, group = torch.full_like(q, float("nan")), len(q) // len(k)
        for arrival in arrivals[layer]:
            for h in range(len(q)) if arrival.new[b] else ():
                queries, g = arrival.new[b], h // group
                mine = arrival.held[b][g]
                at = torch.tensor([places(mine, queries)], dtype=torch.float64)
                turn = [x[0] for x in turned(x, at)]
                own = [mine.index(i) for i in queries]
                keys = rotated(k[g, mine], turn)
                asked = rotated(q[h, queries], [x[own] for x in turn])
                unseen = [[t not in arrival.seen(b, g, i) for t in mine] for i in queries]
                scores = asked @ keys.mT * q.shape[-1] ** -0.5
                out[h, queries] = scores.masked_fill(torch.tensor(unseen), float("-inf")).softmax(-1) @ v[g, mine]
        return out

    return forward(model, ids, attend)


def rotated(x, turn):
    """Rotate ``[n, D]`` by cosines and sines ``[n, D]``."""
    cos, sin = turn
    return apply_rotary_pos_emb(x[None, None], x[None, None], cos[None], sin[None])[0][0, 0]


def judged(model, exact, cache, rows, passes, side="left", places=by_slots):
    """Feed rows and hold their logits to the oracle; returns them."""
    result = feed(cache, model, rows, passes, side)
    for b, tokens in enumerate(rows):
        wanted = partial(slot_logits, exact, tokens, result.arrivals, b, places)
        hold(result.logits[b], wanted(), of_pass(exact, wanted, torch.float32))
    return result.logits


# ---- slots


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    [
        ("snapkv@heads", "blocks:8+steps:3", "any"),
        ("tova+caote@pyramid", "blocks:8+every", "right"),
        ("flags", "prefill", "left"),
    ],
)
def test_keys_are_rotated_by_their_slots(tiny_llama, name, schedule, side):
    """In turns of any length; under flags what the first query of a pass does not see has no slot in it."""
    model, exact = tiny_llama(), tiny_llama().double()
    ag.attach(model, gates_for(model, covers="all", sink_tokens=1, recent_tokens=4, window=5))
    passes = [[29, 19], [1, 1], [4, 3], [1, 0], [1, 3]]
    policy = ag.policy(name, None if name == "flags" else 12, schedule, positions="slot", **POLICIES.get(name, {}))
    rows = [tokens[: sum(n[b] for n in passes)] for b, tokens in enumerate(ROWS)]
    judged(model, exact, EvictionCache(model, policy), rows, passes, side)


@torch.no_grad()
def test_scorers_are_shown_queries_and_keys_at_their_slots(tiny_llama):
    """Those of earlier chunks too, which were at other slots when they attended; keys of layer 0 depend on no other."""
    model, shown, evict = tiny_llama(), [], Evictor.evict
    plain = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *x: plain.append(x[2].double()))
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *x: plain.append(x[2].double()))
    model(ROWS[0][None], use_cache=False)
    q, k = (x[0].view(len(ROWS[0]), -1, 16).transpose(0, 1) for x in plain[:2])

    def watching(self, reader, batch, store, records):
        if reader.layer == 0:
            queries = reader.rotated_queries[0], reader.query_indices[0].tolist()
            shown.append((*queries, reader.keys[0], reader.key_indices[0]))
        return evict(self, reader, batch, store, records)

    policy = ag.policy("snapkv@heads", 12, "blocks:3", positions="slot", **POLICIES["snapkv@heads"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evictor, "evict", watching)
        model(ROWS[0][None], past_key_values=EvictionCache(model, policy))
    rope, earlier = model.get_decoder().rotary_emb, 0
    for queries, token_indices, keys, held in shown:
        for head in range(k.shape[0]):
            there = held[head] >= 0
            mine = held[head][there].tolist()
            slots = by_slots(mine, token_indices)
            turn = [x[0] for x in rope(k[:1], torch.tensor([slots]))]
            bound = 16 * torch.finfo(torch.float32).eps * float(k.abs().max() + q.abs().max())
            hold(keys[head][there], rotated(k[head, mine], turn), bound)
            at = [len(mine) - 1 - (token_indices[-1] - token_index) for token_index in token_indices]
            turn = [x[0] for x in rope(q[:1], torch.tensor([at]))]
            hold(queries[2 * head], rotated(q[2 * head, token_indices], turn), bound)
            earlier += len(token_indices) > 3 and len(mine) < token_indices[-1]
    assert earlier > 4


# ---- places squeezed into the context


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("h2o", "every"), ("snapkv@heads", "blocks:8+every")])
def test_far_tokens_are_squeezed_into_the_context(tiny_llama, name, schedule):
    """A prompt in the context, and a text that grows beyond it in turns; in blocks a longer prompt too."""
    context, side = 24, "any"
    model, exact = (tiny_llama(max_position_embeddings=context) for _ in range(2))
    policy = ag.policy(name, 12, schedule, positions="interpolated", **POLICIES[name])
    prompt = PROMPTS if "blocks" in schedule else (22, 19)
    passes = [prompt, *[(1, 1)] * 6, (4, 3), *[(1, 1)] * 3, (0, 3), *[(1, 1)] * 3]
    whole = [torch.cat([row, ROWS[0]]) for row in ROWS]
    rows = [row[: sum(n[b] for n in passes)] for b, row in enumerate(whole)]
    judged(model, exact.double(), EvictionCache(model, policy), rows, passes, side, squeezed(context))


def test_passes_that_would_be_squeezed_are_refused(tiny_llama):
    model = tiny_llama(max_position_embeddings=32)
    cache = EvictionCache(model, "h2o", 12, positions="interpolated")
    with refuses(UserError, "interpolated", "sequence 1", "33", "32", "blocks:14", "cache.reset()"):
        feed(cache, model, [ROWS[1][:5], torch.cat(ROWS)], [(5, 33)])
    cache.reset()
    feed(cache, model, [torch.cat(ROWS)], [(32,), (14,)])  # in the context, and in a part that is short enough


# ---- sequences that go back, come and go


@pytest.mark.parametrize(("positions", "policy"), [("slot", "knorm@heads"), ("interpolated", "knorm")])
@torch.no_grad()
def test_tokens_that_are_taken_back_leave_no_trace(tiny_llama, positions, policy):
    """A fork of the cache takes a draft back; it goes on as the cache, which never had one."""
    model = tiny_llama(max_position_embeddings=36)
    cache = EvictionCache(model, policy, 12, "steps:9", positions=positions)
    feed(cache, model, [ROWS[0]], [(33,)])
    model(ROWS[0][None, :1], past_key_values=cache)
    fork = copy.deepcopy(cache)
    model(ROWS[0][None, 5:10], past_key_values=fork)
    fork.crop(-5)
    for ids in (ROWS[1][None, :2], ROWS[1][None, 2:9]):
        hold(*(model(ids, past_key_values=one).logits for one in (fork, cache)), 4 * of_logits(model))


# ---- what is refused


@pytest.mark.parametrize("positions", ["slot", "interpolated"])
def test_types_that_turns_wear_out_are_refused(tiny_llama, positions):
    model = tiny_llama()
    with refuses(UserError, f"positions={positions}", "int8", "float32", "positions=original"):
        EvictionCache(model, "h2o", 12, positions=positions, kv_dtype="int8")
    pool = Pool(tiny_llama().bfloat16(), 2**20)
    with refuses(UserError, f"positions={positions}", "bfloat16", "float32", "pool="):
        EvictionCache(tiny_llama().bfloat16(), "h2o", 12, positions=positions, pool=pool)


@pytest.mark.parametrize("positions", ["slot", "interpolated"])
def test_rotations_that_change_or_are_partial_are_refused(tiny_llama, positions):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = tiny_llama(rope_parameters=rope)
    with refuses(UnsupportedModelError, f"positions={positions}", "dynamic", "positions=original"):
        EvictionCache(model, "streaming_llm", budget=24, positions=positions)
    EvictionCache(model, "streaming_llm", budget=24)
    config = PhiConfig(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    with refuses(UnsupportedModelError, "PhiModel", "8", "16"):
        EvictionCache(PhiForCausalLM(config), "streaming_llm", budget=24, positions=positions)


def test_sliding_windows_are_refused(tiny_mistral, tiny_qwen2):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny_qwen2(use_sliding_window=True, sliding_window=9, layer_types=kinds)
    with refuses(UserError, "positions=slot", "Qwen2Model", "window of 9"):
        EvictionCache(model, "h2o", budget=24, positions="slot")
    EvictionCache(tiny_mistral(sliding_window=None), "h2o", budget=24, positions="slot")
