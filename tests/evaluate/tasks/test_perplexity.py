"""Perplexity against the plain model and token by token."""

import random
import string

import numpy as np
import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.evaluate.tasks.perplexity import first_tokens
from ag.gates.gating import Gating
from tests.support.blocks import slots
from tests.support.bounds import hold, of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

rng = random.Random(1)
TEXTS = ["".join(rng.choices(string.ascii_letters + " ", k=n)) for n in (300, 40, 120, 59, 60)]
ROWS = [{"text": text} for text in TEXTS]
SLOT = 2 * 16 * 4  # bytes of a key and a value of one head, float32


def test_continuation_after_a_full_cache(tiny_llama, tiny_tokenizer, write, plain):
    model = tiny_llama()
    task = make("ppl", write("corpus/validation", ROWS, zipped=True), prompt=40, continuation=20)
    loaded = task.load(tiny_tokenizer, None, 512)
    assert (loaded.too_long, loaded.too_short) == (0, 2)
    outcomes = [outcome for _, outcome in task.run(model, tiny_tokenizer, [ag.policy("full")], loaded.samples)]
    assert [outcome.sample for outcome in outcomes] == ["0", "2", "4"]
    for outcome, text in zip(outcomes, (TEXTS[0], TEXTS[2], TEXTS[4]), strict=True):
        ids = tiny_tokenizer(text)["input_ids"]
        hold(outcome.score, -plain(model, ids[:40], ids[40:60]).mean(), of_nats(model))
        assert (outcome.tokens, outcome.kept, outcome.kv_bytes) == (40, 1.0, 3 * 2 * 3 * 16 * (SLOT + 4))


@pytest.mark.parametrize(
    ("limit", "ids", "left_out"), [(1, ["0"], 0), (2, ["0", "2"], 1), (3, ["0", "2", "4"], 2), (9, ["0", "2", "4"], 2)]
)
def test_a_limit_counts_what_can_be_run(tiny_tokenizer, write, limit, ids, left_out):
    root = write("corpus/validation", ROWS)
    loaded = make("ppl", root, prompt=40, continuation=20).load(tiny_tokenizer, limit, 512)
    assert ([sample.id for sample in loaded.samples], loaded.too_short) == (ids, left_out)
    books = make("ppl_stream", root, block=59, data="corpus").load(tiny_tokenizer, limit, 512)
    assert ([book.id for book in books.samples], books.too_short) == (ids, left_out)


def test_continuation_after_eviction(tiny_llama, tiny_tokenizer, write, step_by_step):
    model = tiny_llama()
    task = make("ppl", write("corpus/validation", ROWS), prompt=40, continuation=20)
    policies = [ag.policy("h2o", 0.25), ag.policy("tova", 10, "every")]
    samples = task.load(tiny_tokenizer, 1, 512).samples
    for (index, outcome), policy in zip(task.run(model, tiny_tokenizer, policies, samples), policies, strict=True):
        ids = tiny_tokenizer(TEXTS[0])["input_ids"]
        nats = step_by_step(model, ag.EvictionCache(model, policy), ids[:40], ids[40:60])
        hold(outcome.score, -nats.mean(), of_nats(model), index)
        assert outcome.kept == 0.25


def test_lengths_that_do_not_fit(tiny_tokenizer, write):
    root = write("corpus/validation", ROWS)
    with refuses(UserError, "prompt=512", "continuation=64", "512"):
        make("ppl", root).load(tiny_tokenizer, None, 512)
    with refuses(UserError, "prompt=0"):
        make("ppl", root, prompt=0)


def test_first_tokens(tiny_tokenizer):
    """Only as much of a text is tokenised as surely has enough tokens; where it had not, all of it."""
    words = "abc " * 100
    assert first_tokens(tiny_tokenizer, words, 5) == tiny_tokenizer("abc a")["input_ids"]
    assert first_tokens(tiny_tokenizer, words, None) == tiny_tokenizer(words)["input_ids"]

    class Dense:  # 100 letters a token
        bos_token_id = 0

        def __call__(self, texts, **_):
            split = [[len(text[i : i + 100]) for i in range(0, len(text), 100)] for text in texts]
            return {"input_ids": split if isinstance(texts, list) else split[0]}

    assert first_tokens(Dense(), "x" * 950, 7) == [100] * 7
    assert first_tokens(Dense(), "x" * 250, 7) == [100, 100, 50]


def test_a_stream_with_a_full_cache(tiny_llama, tiny_tokenizer, write, plain):
    model = tiny_llama()
    task = make("ppl_stream", write("pg19_style/test", ROWS), block=50, tokens=290, bin=100)
    loaded = task.load(tiny_tokenizer, None, 512)
    assert (len(loaded.samples), loaded.too_short) == (4, 1)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], loaded.samples[:1])
    ids = tiny_tokenizer(TEXTS[0])["input_ids"][:290]
    nats = -plain(model, ids[:50], ids[50:])
    hold(outcome.score, nats.mean(), of_nats(model))
    curve = {"nats@50": nats[:100].mean(), "nats@150": nats[100:200].mean(), "nats@250": nats[200:].mean()}
    held = {"held@50": 1.0, "held@150": 1.0, "held@250": 1.0, "held@end": 1.0, "kl": 0.0, "same_top1": 1.0}
    for name, wanted in curve.items():
        hold(outcome.tags[name], wanted, of_nats(model), name)
    assert {name: x for name, x in outcome.tags.items() if name not in curve} == held
    assert outcome.blocks == {int(name[5:]): outcome.tags[name] for name in curve}
    assert (outcome.tokens, outcome.kept) == (290, 1.0)


def passes(first, last, step):
    """For each token from `first` on, the tokens seen after the pass that it comes with."""
    return [range(min(last, first + (number // step + 1) * step)) for number in range(last - first)]


@pytest.mark.parametrize("schedule", ["every", "blocks:10+every", "steps:8"])
def test_a_stream_keeps_its_size(tiny_llama, tiny_tokenizer, write, step_by_step, schedule):
    model = tiny_llama()
    task = make("ppl_stream", write("pg19_style/test", ROWS), block=50, tokens=114)
    policy = ag.policy("streaming_llm", 20, schedule)
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], task.load(tiny_tokenizer, 1, 512).samples)
    assert outcome.tags["held@end"] == pytest.approx(20 / 114)
    assert outcome.kept == pytest.approx(np.mean([20 / len(seen) for seen in passes(50, 114, policy.steps)]))
    assert outcome.kv_bytes <= (SLOT + 4) * 3 * 2 * slots(50, 20)
    if policy.steps == 1:
        ids = tiny_tokenizer(TEXTS[0])["input_ids"]
        nats = step_by_step(model, ag.EvictionCache(model, policy), ids[:50], ids[50:114])
        hold(outcome.score, -nats.mean(), of_nats(model))


def test_a_stream_measures_the_share_that_is_held(tiny_llama, tiny_tokenizer, write):
    """Held is the mean over tokens of what a pass left; here 15 tokens, 30 % of the first block, and the last pass."""
    root = write("pg19_style/test", ROWS)
    task = make("ppl_stream", root, block=50, tokens=130, bin=40)
    policies = [ag.policy(name, 0.3, "steps:8") for name in ("streaming_llm", "h2o", "tova")]
    samples = task.load(tiny_tokenizer, 1, 512).samples
    share = np.array([15 / len(seen) for seen in passes(50, 130, 8)])
    for _, outcome in task.run(tiny_llama(), tiny_tokenizer, policies, samples):
        assert outcome.kept == pytest.approx(share.mean())
        assert [outcome.tags["held@50"], outcome.tags["held@90"]] == pytest.approx(
            [share[:40].mean(), share[40:].mean()]
        )
        assert outcome.tags["held@end"] == pytest.approx(15 / 130)


def test_every_size_of_a_pass_gives_the_same_without_eviction(tiny_llama, tiny_tokenizer, write):
    root, model = write("pg19_style/test", ROWS), tiny_llama()
    found = []
    for step in (1, 7, 64, 500):
        task = make("ppl_stream", root, block=50, tokens=114, step=step)
        [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("full")], task.load(tiny_tokenizer, 1, 512).samples)
        found.append(outcome.score)
    for score in found[1:]:
        hold(score, found[0], of_nats(model))


@pytest.mark.slow
def test_positions_by_slot_go_beyond_the_context(tiny_llama, tiny_tokenizer, write, step_by_step):
    model = tiny_llama(max_position_embeddings=64)
    task = make("ppl_stream", write("pg19_style/test", ROWS), block=30, tokens=80)
    policy = ag.policy("streaming_llm", 20, "every", positions="slot")
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], task.load(tiny_tokenizer, 1, 64).samples)
    ids = tiny_tokenizer(TEXTS[0])["input_ids"]
    nats = step_by_step(model, ag.EvictionCache(model, policy), ids[:30], ids[30:80])
    hold(outcome.score, -nats.mean(), of_nats(model))
    assert outcome.tags["held@end"] == pytest.approx(20 / 80)


def test_policies_that_cannot_stream(tiny_llama, tiny_tokenizer, write):
    model = tiny_llama()
    root = write("pg19_style/test", [{"text": "x" * 600}])
    task = make("ppl_stream", root, block=50)
    samples = task.load(tiny_tokenizer, None, 512).samples
    with refuses(UserError, "600 tokens", "512", "positions=slot", "tokens=512"):
        next(task.run(model, tiny_tokenizer, [ag.policy("h2o", 20, "every")], samples))
    with refuses(UserError, "schedule=every"):
        next(task.run(model, tiny_tokenizer, [ag.policy("h2o", 20)], samples))
    ag.attach(model, gates_for(model))
    with refuses(UserError, "gate.covers=prompt", "gate.covers=all"):
        next(task.run(model, tiny_tokenizer, [ag.policy("gates")], samples))
    ag.detach(model)
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_gates_that_act_on_every_token(tiny_llama, tiny_tokenizer, write, kind):
    """Fed in passes of any size they score a book as one forward pass under their flags does, and hold few tokens."""
    root, model = write("pg19_style/test", ROWS), tiny_llama()
    window = 16 if kind == "attention" else 0
    gates = gates_for(model, kind=kind, window=window, covers="all", recent_tokens=8, sink_tokens=2)
    ag.attach(model, gates)
    ids = torch.tensor([tiny_tokenizer(TEXTS[0])["input_ids"][:120]])
    with torch.no_grad():
        logits = model(ids, gating=Gating(gates, torch.ones_like(ids), hard=True), use_cache=False).logits[0].float()
    nats = torch.nn.functional.cross_entropy(logits[49:-1], ids[0, 50:])
    held = []
    for step in (1, 7, 64):
        task = make("ppl_stream", root, block=50, tokens=120, step=step)
        samples = task.load(tiny_tokenizer, 1, 512).samples
        [(_, outcome)] = task.run(model, tiny_tokenizer, [ag.policy("gates")], samples)
        hold(outcome.score, nats, of_nats(model))
        held.append(outcome.kept)
    assert held[0] <= held[1] <= held[2] < 0.9  # a pass of several tokens holds them until the next one
