"""Masks and padding: logits at real tokens are those of transformers' own cache, or a call is refused in words."""

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GenerationMixin

import ag
from ag.errors import UserError
from tests.support.batches import columns, padded, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

SMALL = settings(max_examples=60, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": None}
#: Whether this transformers reads chunks of a later turn under the beginning of their mask.
FROM_ZERO = "past_length = 0" in inspect.getsource(GenerationMixin._prefill)
LOGITS = {"return_dict_in_generate": True, "output_logits": True}
IDS = torch.stack([row(40, 1), row(40, 2), row(40, 3)])


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return tiny_llama()


def state(cache):
    """What is left of a cache that a refused call must not change."""
    return cache.seen_tokens, cache.valid.tolist(), columns(cache), cache.nbytes


@st.composite
def texts(draw):
    """Zeros anywhere in a mask, how it is cut into passes, and in which pass an earlier column changes."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, 30))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))).view(rows, -1)
    if draw(st.booleans()):  # padding on the left alone
        mask = torch.arange(length) >= torch.tensor([draw(st.integers(0, length - 1)) for _ in range(rows)])[:, None]
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=6)))
    changed = draw(st.one_of(st.none(), st.integers(0, len(cuts))))
    return mask, [0, *cuts, length], changed, draw(st.booleans())


@torch.no_grad()
def as_transformers(llama, mask, cuts, changed, by_mask):
    """Read a text in passes under a mask, of which an earlier column changes in one of them."""
    ours, theirs = ag.EvictionCache(llama, "full"), DynamicCache(config=llama.config)
    for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        at = (mask.long().cumsum(1) - 1).clamp_min(0)[:, start:end] if by_mask else None
        given = {"input_ids": IDS[: len(mask), start:end], "position_ids": at}
        if number == changed and start:
            before, other = state(ours), mask[:, :end].clone()
            place = divmod(changed * 7 % (len(mask) * start), start)
            other[place] = ~other[place]
            with refuses(UserError, f"column {place[1]}", f"sequence {place[0]}", "cache.reset()"):
                llama(**given, attention_mask=other.long(), past_key_values=ours)
            assert state(ours) == before
        given["attention_mask"] = mask[:, :end].long()
        want = llama(**given, past_key_values=theirs).logits
        real = mask[:, start:end]
        hold(llama(**given, past_key_values=ours).logits[real], want[real], of_logits(llama))
    assert ours.valid.tolist() == mask.tolist()


@pytest.mark.slow
@given(texts())
@SMALL
def test_any_mask_in_any_passes(llama, text):
    as_transformers(llama, *text)


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 5, 9]])
@pytest.mark.parametrize("row", ["001111111", "111111100", "110011011", "100000001", "000010000"])
def test_masks_beside_a_text_without_padding(llama, row, cuts):
    for other in ("111111111", "011111111"):
        mask = torch.tensor([[x == "1" for x in text] for text in (row, other)])
        as_transformers(llama, mask, cuts, len(cuts) - 2, by_mask=True)


@st.composite
def turns(draw):
    """Masks of up to three turns of ``generate``, the size of chunks, and how each turn is given."""
    rows = draw(st.integers(1, 3))

    def one():
        length, zeros = draw(st.integers(1, 12)), draw(st.sampled_from(["none", "left", "any"]))
        if zeros == "any":
            drawn = draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
            return torch.tensor(drawn).view(rows, -1)
        first = [draw(st.integers(0, length - 1)) if zeros == "left" else 0 for _ in range(rows)]
        return torch.arange(length) >= torch.tensor(first)[:, None]

    many = draw(st.integers(1, 3))
    return [(one(), draw(st.sampled_from(["whole", "new", "changed"]))) for _ in range(many)], draw(
        st.sampled_from([None, None, 1, 3, 8])
    )


@pytest.mark.slow
@given(turns())
@SMALL
def test_any_mask_in_any_turns(llama, drawn):
    """A text that ends with padding is refused, as is one with another past; else logits are those of transformers."""
    parts, chunk = drawn
    told = GREEDY | LOGITS | ({"prefill_chunk_size": chunk} if chunk else {})
    ours, theirs = ag.EvictionCache(llama, "full"), DynamicCache(config=llama.config)
    ids, mask = IDS[: len(parts[0][0]), :0], parts[0][0][:, :0]
    for new, how in parts:
        seen = ours.seen_tokens
        coming = torch.cat([ids[:, seen:], IDS[: len(new), 7 : 7 + new.shape[1]]], 1)
        whole = torch.cat([ids[:, :seen], coming], 1)
        # what was generated last was not read yet
        masked = torch.cat([mask, torch.ones(len(new), ids.shape[1] - mask.shape[1], dtype=torch.bool), new], 1)
        before = state(ours)
        if not masked[:, -1].all():
            with refuses(UserError, "attention_mask", "padding_side"):
                llama.generate(whole, attention_mask=masked.long(), past_key_values=ours, **told)
            assert state(ours) == before
            break
        if how == "changed" and seen:
            other = masked.clone()
            other[0, seen // 2] = ~other[0, seen // 2]
            with refuses(UserError, f"column {seen // 2}", "cache.crop"):
                llama.generate(whole, attention_mask=other.long(), past_key_values=ours, **told)
            assert state(ours) == before
        given = {"input_ids": coming if how == "new" and seen else whole, "attention_mask": masked.long()}
        if chunk and seen and FROM_ZERO:  # a mask that is too short
            with refuses(UserError, "attention_mask"):
                llama.generate(**given, past_key_values=ours, **told)
            assert state(ours) == before
            break
        want = llama.generate(**given, past_key_values=theirs, **told)
        got = llama.generate(**given, past_key_values=ours, **told)
        full = masked.any(1)  # a sequence without a token has no words
        hold(torch.stack(got.logits)[:, full], torch.stack(want.logits)[:, full], of_logits(llama))
        ids = torch.cat([whole, want.sequences[:, given["input_ids"].shape[1] :]], 1)
        mask = torch.cat([masked, torch.ones(len(new), GREEDY["max_new_tokens"] - 1, dtype=torch.bool)], 1)
        if not torch.equal(got.sequences, want.sequences):  # two words as likely as each other
            break


def test_padding_behind_a_shorter_answer(llama):
    """It was read as text: the mask of the next turn is refused until the cache is told."""
    cache, whole = ag.EvictionCache(llama, "full"), IDS[:2, :20]
    llama.generate(whole, past_key_values=cache, **GREEDY | {"max_new_tokens": 6})
    text, mask = IDS[:2, :32], torch.ones(2, 32, dtype=torch.long)
    text = torch.cat([cache.sequences.ids.ids[:, :25], text[:, 25:]], 1)
    mask[1, 22:25] = 0
    with refuses(UserError, "column 22", "sequence 1", "cache.crop"):
        llama.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY)
    cache.crop([0, 3])
    told = GREEDY | LOGITS
    got = llama.generate(text, attention_mask=mask, past_key_values=cache, **told)
    want = llama.generate(text, attention_mask=mask, **told)
    hold(torch.stack(got.logits), torch.stack(want.logits), of_logits(llama))


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


BESIDE_GAPS = [
    ("tiny_llama", "h2o", 8, {}, {}),
    ("tiny_llama", "snapkv@heads", 8, {"window": 4}, {}),
    ("tiny_llama", "tova", 8, {"schedule": "blocks:7+every"}, {}),
    ("tiny_llama", "streaming_llm", 8, {"positions": "slot"}, {}),
    ("tiny_llama", "flags", None, {}, {"recent_tokens": 5, "sink_tokens": 2}),
    ("tiny_llama", "flags", None, {}, {"recent_tokens": 5, "window": 6, "covers": "all", "prefill": "dense"}),
    ("tiny_llama", "gates", 8, {}, {"window": 6}),
    ("tiny_llama", "gates", 8, {}, {"scope": "prompt"}),
    ("tiny_mistral", "full", None, {}, {}),
    ("tiny_mistral", "flags", None, {}, {"recent_tokens": 5}),
]


@pytest.mark.parametrize(("family", "spec", "budget", "options", "gates"), BESIDE_GAPS)
@torch.no_grad()
def test_a_sequence_with_gaps_is_as_alone(request, family, spec, budget, options, gates):
    """Whatever counts distances, counts tokens: the model's windows, recents of gates, and scorers."""
    model = request.getfixturevalue(family)()
    if spec in ("flags", "gates"):
        ag.attach(model, gates_for(model, **gates))
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[0, [3, 4, 9, 20, 21, 22]], mask[1, :7], mask[1, 12:19] = 0, 0, 0
    new, at = row(9, 5).view(3, 3), (torch.cat([mask, torch.ones(3, 3)], 1).cumsum(1).long() - 1).clamp_min(0)

    def fed(ids, mask, new, at):
        cache, out, length = ag.EvictionCache(model, ag.policy(spec, budget, **options)), [], ids.shape[1]
        for part in (ids, *new.split(1, 1)):
            seen = cache.seen_tokens
            whole = torch.cat([mask, torch.ones(len(mask), seen + part.shape[1] - length, dtype=torch.long)], 1)
            places = at[:, seen : seen + part.shape[1]]
            out.append(model(part, attention_mask=whole, position_ids=places, past_key_values=cache).logits)
        return torch.cat(out, 1), columns(cache)

    logits, held = fed(IDS[:, :30], mask, new, at)
    for b in range(3):
        own = mask[b].nonzero().flatten()
        ids, places = IDS[b : b + 1, own], torch.arange(len(own) + 3)[None]
        want, kept = fed(ids, torch.ones_like(ids), new[b : b + 1], places)
        hold(logits[b][torch.cat([own, torch.arange(30, 33)])], want[0], of_logits(model))
        assert [layer[b] for layer in held] == [layer[0] for layer in kept]


# ---- what transformers infers


def padding(where, chunk):
    """Ids of which a few are a pad token, and what ``generate`` is told of it."""
    ids, pad = IDS[:2, :24].clone(), 5
    ids[ids == pad] = 6
    ids[1, {"inside": slice(5, 8), "right": slice(11, None)}.get(where, slice(11))] = pad
    told = GREEDY | {"pad_token_id": None if where == "off" else pad, "eos_token_id": pad if where == "ends" else 127}
    return ids, ids.ne(pad).long(), told | ({} if chunk is None else {"prefill_chunk_size": chunk})


@pytest.mark.parametrize("chunk", [None, 3, 8, 16])
@pytest.mark.parametrize("where", ["left", "inside", "ends", "off"])
def test_a_pad_token_in_ids_without_a_mask(llama, chunk, where):
    """It is padding unless it ends texts too; the cache keeps what it keeps under that mask."""
    ids, mask, told = padding(where, chunk)
    mask = torch.ones_like(ids) if where in ("ends", "off") else mask
    caches = [ag.EvictionCache(llama, "h2o", 0.5) for _ in range(2)]
    out = llama.generate(ids, past_key_values=caches[0], **told)
    assert torch.equal(out, llama.generate(ids, attention_mask=mask, past_key_values=caches[1], **told))
    assert columns(caches[0]) == columns(caches[1]) and torch.equal(caches[0].valid, caches[1].valid)
    counts = [[len(head) for head in heads] for heads in columns(caches[0])[1]]
    after = caches[0].seen_tokens - 24
    assert counts == [[int(n) // 2 + after] * 2 for n in mask.sum(1)]


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_text_that_ends_with_pad_tokens(llama, chunk):
    ids, _, told = padding("right", chunk)
    cache = ag.EvictionCache(llama, "h2o", 0.5)
    with refuses(UserError, "attention_mask", "padding_side"):
        llama.generate(ids, past_key_values=cache, **told)
    assert cache.seen_tokens == 0


# ---- where a prompt ends


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
@pytest.mark.parametrize("how", ["chunks", "blocks", "whole"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_flags_of_gates_in_a_batch_see_what_each_sees_alone(tiny_llama, prefill, how, side):
    """Each sequence closes at the end of its prompt, in whichever part its last token came."""
    model = tiny_llama()
    ag.attach(model, gates_for(model, prefill=prefill, scope="causal", recent_tokens=3))
    rows, lengths = [row(40, 1), row(40, 2), row(40, 3)], (30, 13, 21)
    policy = ag.policy("flags", schedule="blocks:7" if how == "blocks" else "prefill")
    batch, together = padded([r[:n] for r, n in zip(rows, lengths, strict=True)], side), ag.EvictionCache(model, policy)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    together.expect(mask.bool())
    at = (mask.cumsum(1) - 1).clamp_min(0)
    for part in torch.arange(30).split(9 if how == "chunks" else 30):
        given = {"attention_mask": mask[:, : part[-1] + 1], "position_ids": at[:, part]}
        model(ids[:, part], **given, past_key_values=together)
    new, got = torch.stack([r[n : n + 4] for r, n in zip(rows, lengths, strict=True)]), []
    for tokens in new.split(1, 1):
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -1:]}
        got.append(model(tokens, **given, past_key_values=together).logits)
    for b, n in enumerate(lengths):
        alone = ag.EvictionCache(model, policy)
        alone.expect(torch.ones(1, n, dtype=torch.bool))
        for part in torch.arange(n).split(9 if how == "chunks" else n):
            model(rows[b][None, part], past_key_values=alone)
        want = [model(token.view(1, 1), past_key_values=alone).logits[0] for token in new[b]]
        hold(torch.cat(got, 1)[b], torch.cat(want), of_logits(model))
        assert [layer[b] for layer in columns(together)] == [layer[0] for layer in columns(alone)]
        assert min(len(head) for own in columns(alone) for head in own[0]) < n


@pytest.mark.parametrize("spec", ["h2o", "snapkv", "kvzip"])
@torch.no_grad()
def test_no_part_of_a_prompt_is_taken_back_before_it_is_evicted_from(llama, spec):
    """Else what is left would be taken for the whole prompt."""
    cache, alone = ag.EvictionCache(llama, spec, 8), ag.EvictionCache(llama, spec, 8)
    cache.expect(torch.ones(1, 40, dtype=torch.bool))
    llama(IDS[:1, :20], past_key_values=cache)
    with refuses(UserError, "sequence 0", "20 of the 40 tokens", "cache.reset()"):
        cache.crop(-5)
    llama(IDS[:1, 20:], past_key_values=cache)
    llama(IDS[:1], past_key_values=alone)
    assert columns(cache) == columns(alone) and cache.kept_share() < 1


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
    cache = ag.EvictionCache(llama, "full")
    text = llama.generate(IDS[:1, :10], past_key_values=cache, **GREEDY)
    refused, other = (torch.cat([text, IDS[:1, at : at + 4]], 1) for at in (20, 30))
    with pytest.raises(ValueError):
        llama.generate(refused, past_key_values=cache, **GREEDY, no_such_argument=1)
    with torch.no_grad():
        llama(other[:, 13:16], past_key_values=cache)  # what comes is another text than the one that was refused
    assert llama.generate(other, past_key_values=cache, **GREEDY).shape == (1, 22)


def test_a_prompt_for_several_policies_is_padded_on_the_left(llama):
    with refuses(UserError, "attention_mask", "padding_side"):
        ag.engine.read_prompt(llama, ["full", ag.policy("h2o", 4)], **padded([row(9), row(5)], "right"))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 4] = 0
    with refuses(UserError, "attention_mask", "left"):
        ag.engine.read_prompt(llama, ["full", ag.policy("h2o", 4)], IDS[:2, :9], mask)
    with refuses(UserError, "packing"):
        ag.Gating(gates_for(llama), mask)
