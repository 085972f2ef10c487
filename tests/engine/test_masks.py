"""Masks and padding: logits at real tokens are those of transformers' own cache, or a call is refused in words."""

import pytest
import torch
from transformers import DynamicCache

import ag
from ag.errors import UserError
from tests.support.batches import columns, padded, row
from tests.support.bounds import hold, of_logits
from tests.support.refused import refuses

GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": None}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}
IDS = torch.stack([row(40, 1), row(40, 2), row(40, 3)])


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return tiny_llama()


def state(cache):
    """What is left of a cache that a refused call must not change."""
    return cache.seen_tokens, cache.valid.tolist(), columns(cache), cache.nbytes


@torch.no_grad()
def as_transformers(llama, mask, cuts, changed, by_mask):
    """Read a text in passes under a mask, of which an earlier column changes in one of them."""
    ours, theirs = ag.EvictionCache(llama, "full"), DynamicCache(config=llama.config)
    for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        at = (mask.long().cumsum(1) - 1).clamp_min(0)[:, start:end] if by_mask else None
        given = {"input_ids": IDS[: len(mask), start:end], "position_ids": at}
        if number == changed and start:
            before, past = state(ours), mask[:, :start]
            for row, column in [*past.nonzero()[:1].tolist(), *(~past).nonzero()[:1].tolist()]:
                other = mask[:, :end].clone()
                other[row, column] = ~other[row, column]
                with refuses(UserError, f"column {column}", f"sequence {row}", "cache.reset()"):
                    llama(**given, attention_mask=other.long(), past_key_values=ours)
                assert state(ours) == before
        given["attention_mask"] = mask[:, :end].long()
        want = llama(**given, past_key_values=theirs).logits
        real = mask[:, start:end]
        hold(llama(**given, past_key_values=ours).logits[real], want[real], of_logits(llama))
    assert ours.valid.tolist() == mask.tolist()


@pytest.mark.parametrize("text", ["111111100", "110011011"])
def test_masks_beside_a_text_without_padding(llama, text):
    mask = torch.tensor([[x == "1" for x in each] for each in (text, "111111111", "011111111")])
    as_transformers(llama, mask, [0, 4, 5, 9], 2, by_mask=True)


@pytest.mark.parametrize("what", ["StepRunner", "add", "crop"])
@torch.no_grad()
def test_what_goes_on_at_the_length_of_a_text(llama, what):
    """It is refused behind padding that the positions of a prompt count; else logits are those of transformers."""
    new, mask, pool = IDS[:2, 20:21], torch.ones(2, 21, dtype=torch.long), ag.Pool(llama, 2**20)
    mask[1, :7] = 0
    at = (mask.cumsum(1) - 1).clamp_min(0)

    def read(cache, counted):
        told = {} if counted else {"position_ids": at[:, :20]}
        llama(IDS[:2, :20], attention_mask=mask[:, :20], **told, past_key_values=cache)
        return cache

    def go_on(cache, other):
        if what == "StepRunner":
            return ag.StepRunner(llama, cache)(new)
        if what == "add":
            cache.add(other)
            return llama(new.repeat(2, 1), past_key_values=cache).logits[:, -1]
        llama(new, attention_mask=mask, position_ids=at[:, 20:], past_key_values=cache)
        cache.crop([1, 1])
        return llama(new, past_key_values=cache).logits[:, -1]

    theirs = read(DynamicCache(), counted=False)
    want = llama(new, attention_mask=mask, position_ids=at[:, 20:], past_key_values=theirs).logits[:, -1]
    for counted in (True, False):
        ours = [read(ag.EvictionCache(llama, "full", pool=pool), counted) for _ in range(2)]
        if not counted:
            got = go_on(*ours)
            hold(got, want.repeat(len(got) // 2, 1), of_logits(llama))
            continue
        with refuses(UserError, what, "position_ids"):
            ours[0].crop([1, 2]) if what == "crop" else go_on(*ours)
        assert [cache.valid.tolist() for cache in ours] == [mask[:, :20].bool().tolist()] * 2


# ---- what transformers infers


def padding(where, chunk):
    """Ids of which a few are a pad token, and what ``generate`` is told of it."""
    ids, pad = IDS[:2, :24].clone(), 5
    ids[ids == pad] = 6
    ids[1, {"inside": slice(5, 8), "right": slice(11, None)}.get(where, slice(11))] = pad
    told = GREEDY | {"pad_token_id": pad, "eos_token_id": pad if where == "ends" else 127}
    return ids, ids.ne(pad).long(), told | ({} if chunk is None else {"prefill_chunk_size": chunk})


@pytest.mark.parametrize(("where", "chunk"), [("left", None), ("inside", 8), ("ends", 3)])
def test_a_pad_token_in_ids_without_a_mask(llama, where, chunk):
    """It is padding unless it ends texts too; the cache keeps what it keeps under that mask."""
    ids, mask, told = padding(where, chunk)
    mask = torch.ones_like(ids) if where == "ends" else mask
    caches = [ag.EvictionCache(llama, "h2o", 0.5) for _ in range(2)]
    out = llama.generate(ids, past_key_values=caches[0], **told)
    assert torch.equal(out, llama.generate(ids, attention_mask=mask, past_key_values=caches[1], **told))
    assert columns(caches[0]) == columns(caches[1]) and torch.equal(caches[0].valid, caches[1].valid)
    counts = [[len(head) for head in heads] for heads in columns(caches[0])[1]]
    after = caches[0].seen_tokens - 24
    assert counts == [[int(n) // 2 + after] * 2 for n in mask.sum(1)]


@torch.no_grad()
def test_no_part_of_a_prompt_is_taken_back_before_it_is_evicted_from(llama):
    """Else the rest would count as the whole prompt."""
    cache = ag.EvictionCache(llama, "h2o", 8)
    cache.expect(torch.ones(1, 40, dtype=torch.bool))
    llama(IDS[:1, :20], past_key_values=cache)
    with refuses(UserError, "sequence 0", "20 of the 40 tokens", "cache.reset()"):
        cache.crop(-5)


def test_a_refused_call_leaves_no_expectation(llama):
    """The next prompt is the one that comes."""
    for mistake in ({"no_such_argument": 1}, {"temperature": "warm", "do_sample": True}, {"max_new_tokens": 0}):
        cache = ag.EvictionCache(llama, "h2o", 0.5)
        with pytest.raises((ValueError, TypeError)):  # by transformers
            llama.generate(IDS[:1], past_key_values=cache, **GREEDY | mistake)
        assert cache.seen_tokens == 0
        with torch.no_grad():
            llama(IDS[:1, :30], past_key_values=cache)
        assert {len(head) for layer in columns(cache) for heads in layer for head in heads} == {15}


@pytest.mark.parametrize("chunk", [None, 8])
def test_padding_in_a_wrong_place(llama, chunk):
    """A text that ends with pad tokens; padding between tokens where a prompt is read at once, or trained on."""
    ids, _, told = padding("right", chunk)
    cache = ag.EvictionCache(llama, "h2o", 0.5)
    with refuses(UserError, "attention_mask", "padding_side"):
        llama.generate(ids, past_key_values=cache, **told)
    assert cache.seen_tokens == 0
    with refuses(UserError, "attention_mask", "padding_side"):
        ag.engine.read_prompt(llama, ["full", ag.policy("h2o", 4)], **padded([row(9), row(5)], "right"))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 4] = 0
    with refuses(UserError, "attention_mask", "left"):
        ag.engine.read_prompt(llama, ["full"], IDS[:2, :9], mask)


def test_padding_behind_a_shorter_answer(llama):
    """It was read as text: the mask of the next turn is refused until the cache is told."""
    cache, text, mask = ag.EvictionCache(llama, "full"), IDS[:2, :32], torch.ones(2, 32, dtype=torch.long)
    llama.generate(text[:, :20], past_key_values=cache, **GREEDY | {"max_new_tokens": 6})
    text = torch.cat([cache.state.sequences.ids.ids[:, :25], text[:, 25:]], 1)
    mask[1, 22:25] = 0
    with refuses(UserError, "column 22", "sequence 1", "cache.crop"):
        llama.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY)
    cache.crop([0, 3])
    got = llama.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY | LOGITS)
    want = llama.generate(text, attention_mask=mask, **GREEDY | LOGITS)
    hold(torch.stack(got.logits), torch.stack(want.logits), of_logits(llama))


@torch.no_grad()
def test_a_prompt_of_padding_alone(llama):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1] = 0
    cache = ag.EvictionCache(llama, "h2o", 4)
    with refuses(UserError, "attention_mask", "sequence 1", "padding alone"):
        llama(torch.full((2, 6), 7), attention_mask=mask, past_key_values=cache)
    llama(torch.full((1, 6), 7), past_key_values=cache)
