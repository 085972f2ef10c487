"""KVzip against a second reading written out with dense masks, and what a cache does around it."""

import math
from contextlib import suppress

import pytest
import torch

import ag
from ag.engine import reconstruction
from ag.engine.cache import EvictionCache
from ag.engine.prompt import read_prompt
from ag.engine.scorers.kvzip import KVzip
from ag.errors import UserError
from ag.model.structure import decoder_of
from tests.support.batches import columns, padded, positions, read, row
from tests.support.bounds import hold, of_logits, of_pass
from tests.support.dense import masked
from tests.support.refused import refuses

OPTIONS = {"chunk": 11, "overlap": 3, "sinks": 2, "ask": "7 8 9", "ask_part": "5 6", "answer": "11"}
ROW = torch.randint(12, 128, (1, 30), generator=torch.Generator().manual_seed(3))


def numbers(text):
    return [int(x) for x in text.split()] if text else []


@torch.no_grad()
def by_hand(model, context, *, sinks, chunk, overlap=8, ask="", ask_part="", answer="", normalize=False):
    """Scores ``[L, Hkv, n]`` of a prompt, pair by pair from dense attention of context and repetition."""
    n = len(context)
    scores = torch.zeros(len(model.get_decoder().layers), model.config.num_key_value_heads, n, dtype=torch.float64)
    for start in range(sinks, n, chunk):
        stop = min(start + chunk, n)
        asked = numbers(ask)
        if start > sinks:
            asked = numbers(ask_part)
            preceding = context[start - chunk : start]
            asked += preceding[max(len(preceding) - overlap, 0) :] if ask_part else []
        row = torch.tensor(context + asked + numbers(answer) + context[start:stop])
        causal, read = torch.ones(1, len(row), len(row), dtype=torch.bool).tril(), []
        masked(model, row, lambda *_, seen=causal: seen, lambda *given, read=read: read.append(given))
        for index, (q, k, v, hidden) in enumerate(read):
            project = model.get_decoder().layers[index].self_attn.o_proj.weight
            group, dim = len(q) // len(k), q.shape[-1]
            for h in range(len(q)):
                for i in range(n, len(row)):
                    seen = [*range(sinks), *range(start, stop), *range(n, i + 1)]
                    logits = [float(q[h, i] @ k[h // group, p]) / math.sqrt(dim) for p in seen]
                    total = sum(map(math.exp, logits))
                    for p, s in zip(seen, logits, strict=True):
                        if start <= p < stop:
                            weight = math.exp(s) / total
                            if normalize:
                                written = project[:, h * dim : (h + 1) * dim] @ v[h // group, p]
                                weight *= float(written.norm() / hidden[i].norm())
                            scores[index, h // group, p] = max(scores[index, h // group, p], weight)
    return scores


def in_float64(model, context, **options):
    """Those scores in float64, and how far others may be from them."""
    bound = of_pass(model, lambda: by_hand(model, context, **options))
    scores = by_hand(model.double(), context, **options)
    model.float()
    return scores, bound


def scores_of(monkeypatch):
    """By layer, the scores of every decision that comes."""
    found, score = {}, KVzip.score

    def recording(self, seen):
        found[seen.layer] = score(self, seen).clone()  # the eviction moves the records
        return found[seen.layer]

    monkeypatch.setattr(KVzip, "score", recording)
    return found


CASES = {
    "instructions": OPTIONS,
    "plus": OPTIONS | {"normalize": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), [("tiny_llama", CASES["plus"]), ("tiny_qwen3", CASES["instructions"])])
def test_equals_a_second_reading_by_hand(family, options, request, monkeypatch):
    model, found = request.getfixturevalue(family)(), scores_of(monkeypatch)
    cache = read(model, ROW, "kvzip@heads", 12, **options)
    wanted, bound = in_float64(model, ROW[0].tolist(), **options)
    assert sorted(found) == [0, 1, 2]
    for layer, score in found.items():
        hold(score[0], wanted[layer], bound)
    assert cache.state.stores[0].lengths_cpu.sum((1, 2)).tolist() == [24] * 3


@torch.no_grad()
def test_sequences_of_a_batch_are_repeated_apart(tiny_llama):
    """Other lengths, other numbers of chunks, padding anywhere: each keeps what it does alone."""
    model = tiny_llama()
    rows = [ROW[0], ROW[0, 3:20], ROW[0, 5:17]]
    alone = [columns(read(model, row, "kvzip", 0.4, **OPTIONS)) for row in rows]
    batch, cache = padded(rows, "any"), EvictionCache(model, "kvzip", 0.4, **OPTIONS)
    model(**batch, position_ids=positions(batch["attention_mask"], 33), past_key_values=cache)
    for b, held in enumerate(alone):
        assert [layer[b] for layer in columns(cache)] == [layer[0] for layer in held]


@torch.no_grad()
def test_a_prompt_in_parts_that_are_padding_of_a_sequence(tiny_llama):
    """Chunks of a prompt padded on the right: the shorter sequence is repeated from where it ended."""
    model, held = tiny_llama(), []
    ids, mask = ROW.repeat(2, 1), torch.ones(2, 30, dtype=torch.long)
    ids[1, 17:], mask[1, 17:] = 0, 0
    for size in (30, 9):
        cache = EvictionCache(model, "kvzip", 0.4, **OPTIONS)
        cache.expect(mask.bool(), ids)
        for start in range(0, 30, size):
            stop = min(start + size, 30)
            model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        held.append(columns(cache))
    assert held[0] == held[1]


@torch.no_grad()
def test_prefill_and_repetition_are_shared_with_other_policies(tiny_llama):
    model, passes = tiny_llama(), []
    alike = [ag.policy("kvzip", 0.5, **OPTIONS), ag.policy("kvzip@heads", 0.3, **OPTIONS)]
    alike += [ag.policy("kvzip+criticalkv", 0.3, **OPTIONS), ag.policy("kvzip", 0.2, positions="slot", **OPTIONS)]
    policies = [ag.policy("h2o", 0.5), *alike, ag.policy("kvzip", 0.5, **OPTIONS | {"normalize": True})]
    handle = decoder_of(model).register_forward_hook(lambda *_: passes.append(1))
    together = read_prompt(model, policies, ROW)
    shared = len(passes)
    read_prompt(model, alike[:1], ROW)
    handle.remove()
    bound = of_pass(model, lambda: decoder_of(model)(ROW, use_cache=False).last_hidden_state)
    assert shared == 1 + 2 * (len(passes) - shared - 1)  # the prompt, and what two scorers repeat
    for policy, (cache, last) in zip(policies, together, strict=True):
        ((alone, state),) = read_prompt(model, [policy], ROW)
        hold(last, state, bound)
        assert min(cache.report().seconds) > 0 and cache.kept_share() == alone.kept_share()
        assert columns(cache) == columns(alone)
        for token in ([[17]], [[4]]):
            logits = [model(torch.tensor(token), past_key_values=x).logits for x in (cache, alone)]
            hold(*logits, of_logits(model))


TURN = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}A:BLOCK{% endif %}"
EMPTY = "<think>\n\n</think>\n\n"
#: Qwen3's: the block is there where the caller says false, and not where it says nothing.
BLOCK = "{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY + "{% endif %}"


def test_an_answer_begins_behind_the_empty_thinking_block_of_a_template(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TURN.replace("BLOCK", BLOCK))
    answer = ag.policy("kvzip", 0.5).with_tokenizer(tiny_tokenizer).scorer.answer
    assert tiny_tokenizer.decode([int(x) for x in answer.split()]) == f">A:{EMPTY}"


@torch.no_grad()
def test_embeddings_drafts_and_windows_are_refused(tiny_llama, tiny_mistral):
    model = tiny_llama()
    with refuses(UserError, "input_ids", "inputs_embeds"):
        model(inputs_embeds=torch.randn(1, 9, 64), past_key_values=EvictionCache(model, "kvzip", 0.5))
    with refuses(UserError, "assistant model"):
        model.generate(ROW, past_key_values=EvictionCache(model, "kvzip", 0.5), prompt_lookup_num_tokens=2)
    windowed = tiny_mistral()
    with refuses(UserError, "window of 16 tokens", "prompt of 30 tokens"):
        windowed(ROW, past_key_values=EvictionCache(windowed, "kvzip", 0.5))


def test_the_rows_that_are_read():
    scorer = KVzip(sinks=2, chunk=3, overlap=7, ask="90", ask_part="80 81", answer="70")
    assert scorer.chunks_to_repeat(list(range(9))) == [
        (range(2, 5), [90, 70, 2, 3, 4]),
        (range(5, 8), [80, 81, 2, 3, 4, 70, 5, 6, 7]),  # the chunk before has 3 tokens
        (range(8, 9), [80, 81, 5, 6, 7, 70, 8]),
    ]
    assert KVzip(sinks=4).chunks_to_repeat([1, 2, 3]) == []


# ---- what a repetition leaves behind, and what it needs


@torch.no_grad()
def test_no_tokens_are_held_for_the_repetition(tiny_llama, monkeypatch):
    """Beside the blocks: neither queries, keys and values of the prompt's pass nor its attention."""
    model, noted = tiny_llama(), []
    monkeypatch.setattr(
        reconstruction,
        "measure_reconstruction",
        lambda state, batch: noted.extend(state.recorded_prompt.calls.values()),
    )
    with suppress(AttributeError):  # as nothing was measured
        read_prompt(model, [ag.policy("kvzip", 0.5), ag.policy("h2o", 0.5)], ROW)
    assert len(noted) == 3
    for call in noted:
        tensors = [x for x in vars(call).values() if isinstance(x, torch.Tensor)]
        assert len(tensors) == 3 and {x.untyped_storage().nbytes() for x in tensors} == {0}


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[64], [32, 32]], ids=str)
def test_a_pool_without_room_for_the_repetition(tiny_llama, sizes):
    model = tiny_llama()
    blocks = 3 * 2 * 4  # of the prompt
    pool = ag.Pool(model, (blocks + 3) * ag.Pool(model, 10**5).block_nbytes())
    cache = EvictionCache(model, "kvzip", 0.5, pool=pool)
    cache.expect(torch.ones(1, 64))
    with pytest.raises(ag.PoolFullError):
        for part in row(64)[None].split(sizes, 1):
            model(part, past_key_values=cache)
    assert (cache.seen_tokens, pool.num_used) == (0, 0)
    model(row(16)[None], past_key_values=cache)
    assert cache.seen_tokens == 16


@torch.no_grad()
def test_what_follows_a_prompt_in_its_pass_is_refused(tiny_llama):
    model = tiny_llama()
    cache = EvictionCache(model, "kvzip", 0.4, **OPTIONS)
    cache.expect(torch.ones(1, 26, dtype=torch.bool))
    with refuses(UserError, "30", "26", "before anything follows it"):
        model(ROW, past_key_values=cache)
