"""KVzip against a second reading written out with dense masks, and what a cache does around it."""

import copy
import math

import pytest
import torch

import ag
from ag.engine.block_pool import Pool, PoolFullError
from ag.engine.cache import EvictionCache
from ag.engine.prompt import read_prompt
from ag.engine.scorers.kvzip import KVzip
from ag.errors import UserError
from ag.kernels.pages import read as pages_read
from ag.model.hooks import decoder_of
from tests.support.batches import columns, padded, positions, read
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
        found[seen.layer] = score(self, seen)
        return found[seen.layer]

    monkeypatch.setattr(KVzip, "score", recording)
    return found


CASES = {
    "instructions": OPTIONS,
    "more overlap than a chunk has": OPTIONS | {"chunk": 7, "overlap": 9},
    "one chunk": {"chunk": 100, "sinks": 0},
    "plus": OPTIONS | {"normalize": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), [*(("tiny_llama", x) for x in CASES.values()), ("tiny_qwen3", OPTIONS)])
def test_equals_a_second_reading_by_hand(family, options, request, monkeypatch):
    model, found = request.getfixturevalue(family)(), scores_of(monkeypatch)
    cache = read(model, ROW, "kvzip@heads", 12, **options)
    wanted, bound = in_float64(model, ROW[0].tolist(), **options)
    assert sorted(found) == [0, 1, 2]
    for layer, score in found.items():
        hold(score[0], wanted[layer], bound)
    assert cache.store.held.sum((1, 2)).tolist() == [24] * 3


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


@pytest.mark.parametrize("lengths", [(4,), (3, 20)])
def test_prompts_of_sinks_alone(tiny_llama, lengths):
    """Nothing of them is repeated, and nothing can go, which is said; a longer text beside them loses its share."""
    model, rows = tiny_llama(), [ROW[0, :n] for n in lengths]
    cache = EvictionCache(model, "kvzip@uniform", 0.5, **OPTIONS | {"sinks": 4})
    with pytest.warns(ag.BudgetWarning), torch.no_grad():
        model(**padded(rows), past_key_values=cache)
    assert cache.over_budget.tolist() == [n < 20 for n in lengths]
    for heads in columns(cache):
        assert [len(head) for row in heads for head in row] == [n if n < 20 else 10 for n in lengths for _ in range(2)]


@torch.no_grad()
def test_nothing_of_a_repetition_stays(tiny_llama):
    """With a budget of everything the cache is that of full, to the bit, and goes on like it."""
    model = tiny_llama()
    caches = [EvictionCache(model, "full"), EvictionCache(model, "kvzip", 1.0, **OPTIONS)]
    outs = [model(ROW, past_key_values=cache).logits for cache in caches]
    assert torch.equal(*outs)
    for layer in range(3):
        mine, other = (pages_read(cache.store.pages(layer), cache.store.ledger(layer)[0][..., :30]) for cache in caches)
        assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))
    assert [cache.seen_tokens for cache in caches] == [30, 30]
    assert [cache.pool.num_used for cache in caches] == [3 * 2 * 2] * 2
    assert torch.equal(caches[0].valid, caches[1].valid)
    nexts = [model(torch.tensor([[17]]), past_key_values=cache).logits for cache in caches]
    assert torch.equal(*nexts)


def test_generate_repeats_once_and_goes_on_from_the_prompt(tiny_llama, monkeypatch):
    model, found = tiny_llama(), scores_of(monkeypatch)
    greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cache = EvictionCache(model, "kvzip@global", 0.5, **OPTIONS)
    out = model.generate(ROW, past_key_values=cache, **greedy)
    assert len(found) == 3
    # half of the prompt, and what was generated but for the last token
    assert int(cache.store.held.sum()) == 6 * (15 + 5)
    assert cache.report().seconds[0] > 0
    found.clear()
    whole = model.generate(torch.cat([out, ROW[:, :4]], 1), past_key_values=cache, **greedy)
    assert whole.shape == (1, 46) and not found  # a later turn is not repeated
    chunked = EvictionCache(model, "kvzip@global", 0.5, **OPTIONS)
    assert torch.equal(model.generate(ROW, past_key_values=chunked, prefill_chunk_size=7, **greedy), out)
    full = EvictionCache(model, "kvzip", 1.0)
    plain = model.generate(ROW, **greedy)
    assert torch.equal(model.generate(ROW, past_key_values=full, **greedy), plain)


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


def test_instructions_come_from_a_tokenizer(tiny_tokenizer):
    policy = ag.policy("kvzip+criticalkv", 0.5, ask="3 4").with_tokenizer(tiny_tokenizer)
    scorer = policy.scorer.inner
    assert scorer.ask == "3 4"
    said = tiny_tokenizer.decode([int(x) for x in scorer.ask_part.split()])
    assert said.strip().startswith("Repeat the part of the context above")
    assert tiny_tokenizer.decode([int(x) for x in scorer.answer.split()]) == "\n"
    assert ag.policy("h2o", 0.5).with_tokenizer(tiny_tokenizer) == ag.policy("h2o", 0.5)


TURN = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}A:BLOCK{% endif %}"
EMPTY = "<think>\n\n</think>\n\n"
BLOCKS = {
    "without thoughts": ("", ""),
    # Qwen3's: the block is there where the caller says false, and not where he says nothing
    "asked for": ("{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY + "{% endif %}", EMPTY),
    "always": (EMPTY, EMPTY),
}


@pytest.mark.parametrize(("block", "written"), BLOCKS.values(), ids=BLOCKS)
def test_an_answer_begins_behind_the_empty_thinking_block_of_a_template(tiny_tokenizer, monkeypatch, block, written):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TURN.replace("BLOCK", block))
    answer = ag.policy("kvzip", 0.5).with_tokenizer(tiny_tokenizer).scorer.answer
    assert tiny_tokenizer.decode([int(x) for x in answer.split()]) == f">A:{written}"


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
    assert scorer.inputs(list(range(9))) == [
        (range(2, 5), [90, 70, 2, 3, 4]),
        (range(5, 8), [80, 81, 2, 3, 4, 70, 5, 6, 7]),  # the chunk before has 3 tokens
        (range(8, 9), [80, 81, 5, 6, 7, 70, 8]),
    ]
    assert KVzip(sinks=4).inputs([1, 2, 3]) == []


# ---- what a repetition leaves behind, and what it needs


@torch.no_grad()
def test_the_prompt_is_evicted_then_and_cannot_be_cropped(tiny_llama):
    model = tiny_llama()
    cache = read(model, ROW, "kvzip", 12, **OPTIONS)
    assert cache.sequences.evicted_at.tolist() == [30] and cache.sequences.num_held.tolist() == [12]
    assert all(not records for records in cache.store.records)
    model(ROW[:, :3], past_key_values=cache)
    cache.crop(-3)
    assert cache.sequences.num_held.tolist() == [12]
    with refuses(UserError, "30", "evicted"):
        cache.crop(-1)


@torch.no_grad()
def test_a_repetition_takes_room_in_one_layer_at_a_time(tiny_llama):
    """A pool for the prompt (2 blocks a row) and one layer's repetition (1 more of each) is enough; a smaller one is
    refused, and the cache is empty then."""
    model = tiny_llama()
    roomy = EvictionCache(model, "full").pool
    sizes = {blocks: blocks * roomy.block_nbytes() for blocks in (14, 13)}
    alone = read(model, ROW, "kvzip", 0.4, **OPTIONS)
    cache = read(model, ROW, "kvzip", 0.4, pool=Pool(model, sizes[14]), **OPTIONS)
    assert columns(cache) == columns(alone)
    tight = EvictionCache(model, "kvzip", 0.4, pool=Pool(model, sizes[13]), **OPTIONS)
    with pytest.raises(PoolFullError):
        model(ROW, past_key_values=tight)
    assert not tight.seen_tokens and tight.pool.num_used == 0


@torch.no_grad()
def test_sequences_change_places_while_the_prompt_is_read(tiny_llama):
    """Each is repeated as what it is: after a selection, and in a fork, whose prompt ends otherwise."""
    model = tiny_llama()
    rows = torch.stack([ROW[0], ROW[0].flip(0)])
    alone = [columns(read(model, row, "kvzip", 0.4, **OPTIONS)) for row in rows]
    cache = EvictionCache(model, "kvzip", 0.4, **OPTIONS)
    cache.expect(torch.ones(2, 30, dtype=torch.bool))
    model(rows[:, :20], past_key_values=cache)
    fork = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1, 0]))
    model(rows[[1, 0], 20:], past_key_values=cache)
    other = rows.clone()
    other[:, 20:] = 40
    model(other[:, 20:], past_key_values=fork)
    assert [[layer[b] for layer in columns(cache)] for b in (1, 0)] == [[layer[0] for layer in held] for held in alone]
    assert columns(fork) == columns(read(model, other, "kvzip", 0.4, **OPTIONS))


@torch.no_grad()
def test_what_follows_a_prompt_in_its_pass_is_refused(tiny_llama):
    model = tiny_llama()
    cache = EvictionCache(model, "kvzip", 0.4, **OPTIONS)
    cache.expect(torch.ones(1, 26, dtype=torch.bool))
    with refuses(UserError, "30", "26", "before anything follows it"):
        model(ROW, past_key_values=cache)


@torch.no_grad()
def test_a_repetition_beyond_the_context_is_not_squeezed(tiny_llama):
    model = tiny_llama(max_position_embeddings=40)
    cache = EvictionCache(model, "kvzip", 0.4, positions="interpolated", **OPTIONS)
    with refuses(UserError, "context of 40 tokens", "prompt of 30 tokens", "repetition of up to 17"):
        model(ROW, past_key_values=cache)
