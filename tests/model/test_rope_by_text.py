"""RoPE whose frequencies depend on the longest position of a pass: a text's are those that it has alone."""

import random

import pytest
import torch
from torch.nn import functional as F

import ag
from ag import EvictionCache
from ag.config import Config, GateConfig, LossConfig
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.gates.gating import Gating
from ag.model.hooks import restore
from ag.serve import Request, Scheduler
from ag.training.module import make_loss
from tests.model.test_architectures import SUMS, text, tiny
from tests.support import batches, served
from tests.support.batches import positions
from tests.support.refused import refuses

CHANGES = 32  # tokens beyond which texts have other frequencies
LENGTHS = (25, 40, 47)  # of texts on both sides, and of two on the far one
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": CHANGES},
    **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 8.0]},
}
SCALED = {"short_mscale": 1.0, "long_mscale": 1.3}  # of PhiMoE, which scales by the longest position too
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": CHANGES},
    "phimoe": {"rope_parameters": LONGROPE | SCALED},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": CHANGES},
}
pytestmark = pytest.mark.filterwarnings("ignore")


def made(name):
    return tiny(name, **MODELS[name])


def rows():
    return [text(length, seed) for seed, length in enumerate(LENGTHS)]


@torch.no_grad()
def alone(name, row, dtype=torch.float32):
    """What transformers computes for a text in one pass, in a model that has read nothing before it."""
    return made(name).to(dtype)(row[None], use_cache=False).logits[0]


def rounding(name):
    row = rows()[1]
    return SUMS * float((alone(name, row) - alone(name, row, torch.float64)).abs().max())


@pytest.mark.parametrize("side", ["left", "right", "any"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_text_has_the_frequencies_of_itself_beside_others(name, side):
    """In prompts and in steps, whatever was read before; the texts differ by more than rounding under others."""
    model, bound, token = made(name), rounding(name), torch.tensor([[5], [6], [7]])
    given = batches.padded(rows(), side)
    ids, mask = given["input_ids"], given["attention_mask"]
    cache = EvictionCache(model, "full")
    got = [batches.step(model, cache, ids, mask)]
    got.append(batches.step(model, cache, token, F.pad(mask, (0, 1), value=1)))
    for index, row in enumerate(rows()):
        single = EvictionCache(model, "full")
        want = model(row[None], past_key_values=single).logits[0]
        assert float((want - alone(name, row)).abs().max()) <= bound
        assert float((got[0][index, mask[index].bool()] - want).abs().max()) <= bound
        step = model(token[index : index + 1], past_key_values=single).logits[0]
        assert float((got[1][index] - step).abs().max()) <= bound
    plain = model(**given, position_ids=positions(mask, mask.shape[1]), use_cache=False).logits
    assert float((plain[0, mask[0].bool()] - alone(name, rows()[0])).abs().max()) > bound  # transformers' own batch


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_prompt_in_parts_has_the_frequencies_of_the_whole(name):
    model, bound = made(name), rounding(name)
    for row in rows():
        cache = EvictionCache(model, "full")
        cache.expect(torch.ones(1, len(row), dtype=torch.bool))
        got = torch.cat([model(part[None], past_key_values=cache).logits[0] for part in row.split(9)])
        assert float((got - alone(name, row)).abs().max()) <= bound
    words = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    given = batches.padded(rows())
    whole, parts = (
        model.generate(**given, past_key_values=EvictionCache(model, "h2o", 20), **words, **more)
        for more in ({}, {"prefill_chunk_size": 9})
    )
    assert torch.equal(whole, parts)
    for row, answer in zip(rows(), whole, strict=True):
        single = model.generate(row[None], past_key_values=EvictionCache(model, "h2o", 20), **words)
        assert torch.equal(single[0, len(row) :], answer[-5:])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_shorter_text_that_shares_the_begin_of_a_long_one_is_read_anew(name):
    """The keys that are held have the frequencies of the long text."""
    model, long = made(name), text(47, 3)
    cache, words = EvictionCache(model, "full"), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model.generate(long[None], past_key_values=cache, **words)
    short = torch.cat([long[:10], text(8, 4)])[None]
    assert cache.rewind(short) == 0
    model.generate(short, past_key_values=cache, **words)
    assert int(cache.state.sequences.text_len) == short.shape[1]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_text_that_outgrows_its_frequencies_is_refused_and_nothing_changes(name, tmp_path):
    model, row = made(name), text(CHANGES - 1, 3)
    cache = EvictionCache(model, "full")
    model(row[None], past_key_values=cache)
    cache.save(tmp_path / "cache")
    for held in (cache, EvictionCache.load(tmp_path / "cache", model)):
        model(row[None, :1], past_key_values=held)
        with refuses(UserError, str(CHANGES), "frequencies", "cache.reset()"):
            model(row[None, :1], past_key_values=held)
        assert held.seen_tokens == CHANGES and not held.state.pass_open
    longer = torch.cat([row, row[:1], row[:9]])
    assert cache.rewind(longer[None]) == 0
    words = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    got = model.generate(longer[None], past_key_values=cache, **words)
    assert torch.equal(got, model.generate(longer[None], past_key_values=EvictionCache(model, "full"), **words))
    part = EvictionCache(model, "full")
    part.expect(torch.ones(1, len(longer), dtype=torch.bool))
    model(longer[None, :9], past_key_values=part)
    part.expect(torch.ones(1, CHANGES, dtype=torch.bool))
    with refuses(UserError, str(CHANGES), "frequencies"):
        model(longer[None, 9:12], past_key_values=part)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_rows_of_training_have_the_frequencies_of_each_alone(name):
    model, bound, (short, long, _) = made(name), rounding(name), rows()
    ag.attach(model, ag.AttentionGates(model.config, ag.GateConfig()))
    given = batches.padded([short, long], "right")
    valid = given["attention_mask"]
    got = model(input_ids=given["input_ids"], gating=Gating(None, valid), use_cache=False).logits
    packed, first = torch.cat([short, long]), torch.tensor([0] * len(short) + [len(short)] * len(long))
    gating = Gating(None, torch.ones(1, len(packed)), first=first[None])
    documents = model(input_ids=packed[None], gating=gating, use_cache=False).logits[0].split([len(short), len(long)])
    for index, row in enumerate((short, long)):
        assert float((got[index, : len(row)] - alone(name, row)).abs().max()) <= bound
        assert float((documents[index] - alone(name, row)).abs().max()) <= bound


@pytest.mark.parametrize("name", MODELS)
def test_answers_of_a_server_are_those_of_each_request_alone(name, tiny_tokenizer):
    """Requests on both sides begin with the same tokens, and are read in parts and answered together."""
    changes, more = 96, {"max_position_embeddings": 96 if name == "llama" else 256}
    if name != "llama":
        rope = MODELS[name]["rope_parameters"] | {"original_max_position_embeddings": changes}
        more |= {"rope_parameters": rope, "original_max_position_embeddings": changes}
    model = tiny(name, **MODELS[name] | more)
    draw, policy = random.Random(0), ag.policy("h2o", 24)
    scheduler = Scheduler(model, tiny_tokenizer, policy, ag.Pool(model, 1 << 21), prefill_tokens=24)
    scheduler.context_length = None if name == "llama" else scheduler.context_length  # transformers reads beyond it
    system = served.text(draw, 70)
    requests = [Request(tokens=system + served.text(draw, more), max_tokens=6) for more in (5, 60, 9, 64, 7)]
    streams = [stream for request in requests for stream in scheduler.submit(request)]
    served.finish(scheduler)
    assert [served.read(stream) for stream in streams] == [served.alone(model, policy, x) for x in requests]
    assert scheduler.counts.cached
    with refuses(UserError, str(changes + 1), "RoPE"):
        scheduler.submit(Request(tokens=system, max_tokens=28))


def test_such_a_rope_beside_others_is_refused():
    model = tiny("llama")
    model.model.rotary_emb.rope_type = {"full_attention": "dynamic", "sliding_attention": "default"}
    with refuses(UserError, "LlamaModel", "dynamic", "longest"):
        EvictionCache(model, "full")
    assert "forward" not in vars(model.model)  # nothing was changed
    for name in ("llama4_text", "deepseek_v2"):
        with refuses(UserError, "dynamic", "complex", "cosines and sines"):
            EvictionCache(tiny(name, rope_parameters=DYNAMIC), "full")


@torch.no_grad()
def test_a_restored_model_rotates_as_transformers_does():
    model, row = made("llama"), rows()[1][None]
    EvictionCache(model, "full")
    restore(model)
    assert "forward" not in vars(model.model.rotary_emb)
    assert torch.equal(model(row, use_cache=False).logits, made("llama")(row, use_cache=False).logits)


def gated_loss(model, **loss):
    """The loss under gates that evict nothing, or by replay."""
    gate = GateConfig(kind="mlp", hidden=8, bias=100.0, covers="all")
    config = Config(train="gates", gate=gate, loss=LossConfig(objective="kl", **loss))
    return make_loss(config, model, AttentionGates(model.config, gate))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_training_rotates_each_row_as_inference_does(name):
    """Open gates change nothing in a batch of texts on both sides, and a row has the loss that it has alone."""
    model, given = made(name).requires_grad_(False), batches.padded(rows()[:2], "right")
    batch = {name: given[name] for name in ("input_ids", "attention_mask")}
    batch["labels"] = given["input_ids"].where(given["attention_mask"].bool(), -100).clone()
    batch["labels"][:, :12] = -100
    batch |= {"attention_mask": given["attention_mask"].bool(), "prompt_length": torch.tensor([12, 12])}
    loss, bound = gated_loss(model, alpha=0.0), rounding(name)
    assert float(loss.loss(batch, 0).values["kl_loss"]) <= bound
    alone = {name: x[:1, : LENGTHS[0]] if x.ndim == 2 else x[:1] for name, x in batch.items()}
    together, single = (loss.run_decoder(x)[:1, : LENGTHS[0]] for x in (batch, alone))
    assert float((together - single).abs().max()) <= bound


@torch.no_grad()
def test_replay_reads_a_prompt_alone_where_its_context_has_other_frequencies():
    model, context = made("phi3").requires_grad_(False), text(47, 3)
    loss = gated_loss(model, replay=True, share_high=0.7, share_low=0.1)

    def prompt_of(context_length):
        batch = {"input_ids": context[None], "attention_mask": torch.ones(1, 47, dtype=torch.bool)}
        lengths = {"prompt_length": torch.tensor([20]), "context_length": torch.tensor([context_length])}
        return loss.split_row(batch | lengths | {"labels": context[None].clone()}, 0)[0]

    alone = prompt_of(20)
    for context_length in (30, 47):
        keys = prompt_of(context_length).keys
        assert all(float((keys[layer] - x).abs().max()) <= rounding("phi3") for layer, x in alone.keys.items())


@torch.no_grad()
def test_experts_are_not_drawn_while_gates_train():
    """PhiMoE draws them in training mode; its student, its teacher and inference would differ."""
    model = made("phimoe").requires_grad_(False)
    loss = gated_loss(model, alpha=0.0)
    model.train()
    batch = {"input_ids": text(20, 3)[None], "attention_mask": torch.ones(1, 20, dtype=torch.bool)}
    first, second = (loss.teacher(batch) for _ in range(2))
    assert torch.equal(first, second) and model.training
    model.eval()
    assert torch.equal(first, loss.teacher(batch))
