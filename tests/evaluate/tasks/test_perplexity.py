"""Perplexity and divergence against the plain model and token by token."""

import random
import string

import numpy as np
import pytest
import torch

import ag
from ag.errors import UserError
from ag.evaluate.tasks import make
from ag.evaluate.tasks.perplexity import COMPARED, first_tokens
from tests.support.blocks import slots
from tests.support.bounds import hold, of_logits, of_nats
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

rng = random.Random(1)
TEXTS = ["".join(rng.choices(string.ascii_letters + " ", k=n)) for n in (300, 40, 120, 59, 60)]
SLOT = 2 * 16 * 4  # bytes of a key and a value of one head, float32


@pytest.fixture
def root(write):
    write("corpus/validation", [{"text": text} for text in TEXTS], zipped=True)
    return write("pg19_style/test", [{"text": text} for text in TEXTS])


@pytest.fixture
def stream(root, tiny_llama, tiny_tokenizer):
    """`stream(policy, **options)`: the outcome of the first book, and its tokens."""

    def run(policy, model=None, **options):
        task = make("ppl_stream", root, block=50, **options)
        [book] = task.load(tiny_tokenizer, 1, 512).samples
        [(_, outcome)] = task.run(model or tiny_llama(), tiny_tokenizer, [policy], [book])
        return outcome, book

    return run


@pytest.mark.slow
def test_a_continuation(tiny_llama, tiny_tokenizer, root, plain, step_by_step):
    model = tiny_llama()
    task = make("ppl", root, prompt=40, continuation=20)
    loaded = task.load(tiny_tokenizer, None, 512)
    assert (loaded.too_long, loaded.too_short) == (0, 2)
    policies = [ag.policy("full"), ag.policy("h2o", 0.25), ag.policy("tova", 10, "every")]
    outcomes = list(task.run(model, tiny_tokenizer, policies, loaded.samples))
    assert [(index, one.sample) for index, one in outcomes] == [(i, s) for s in ("0", "2", "4") for i in range(3)]
    for (index, outcome), text in zip(outcomes, np.repeat([TEXTS[0], TEXTS[2], TEXTS[4]], 3), strict=True):
        ids = tiny_tokenizer(str(text))["input_ids"]
        prompt, following = ids[:40], ids[40:60]
        if index == 0:
            hold(outcome.score, -plain(model, prompt, following).mean(), of_nats(model))
            assert (outcome.tokens, outcome.kept, outcome.kv_bytes) == (40, 1.0, 3 * 2 * 3 * 16 * (SLOT + 4))
            assert (outcome.tags["kl"], outcome.tags["same_top1"]) == (0.0, 1.0)
        else:
            nats = step_by_step(model, ag.EvictionCache(model, policies[index]), prompt, following)
            hold(outcome.score, -nats.mean(), of_nats(model))
            assert outcome.kept == 0.25


@torch.no_grad()
def by_hand(model, policy, sample, step):
    """The logits before each token that follows, fed so many at once; the first is the prompt's last."""
    cache = ag.EvictionCache(model, policy)
    logits = [model(torch.tensor([sample.prompt]), past_key_values=cache).logits[0, -1:]]
    for part in torch.tensor(sample.target_tokens).split(step):
        logits.append(model(part[None], past_key_values=cache).logits[0])
    return torch.cat(logits)[: len(sample.target_tokens)].double()


def check_distance(outcome, wanted, found, model):
    full, mine = (x.log_softmax(-1) for x in (wanted, found))
    kl = (full.exp() * (full - mine)).sum(-1).mean()
    # logits that are off by d move a log-probability by 2 d, and the divergence by that of its own terms and weights
    moved = 2 * of_logits(model) * (2 + float((full - mine).abs().max()))
    assert float(kl) > 10 * moved, "the policy changes nothing"
    hold(outcome.tags["kl"], kl, moved)
    assert outcome.tags["same_top1"] == pytest.approx(float((full.argmax(-1) == mine.argmax(-1)).float().mean()))


def test_divergence_of_a_continuation_from_a_full_cache(tiny_llama, tiny_tokenizer, root):
    model, policy = tiny_llama(), ag.policy("knorm", 8)
    task = make("ppl", root, prompt=40, continuation=20)
    [sample] = task.load(tiny_tokenizer, 1, 512).samples
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [sample])
    check_distance(outcome, *(by_hand(model, one, sample, 20) for one in ("full", policy)), model)


def test_divergence_of_a_stream(stream, tiny_llama):
    """One token of 64, in passes of other sizes than the full cache's; none beyond the model's context."""
    model, policy = tiny_llama(), ag.policy("knorm", 8, "steps:5")
    outcome, book = stream(policy, model, tokens=170, step=16)
    full, mine = (by_hand(model, *how)[::COMPARED] for how in (("full", book, 16), (policy, book, 5)))
    check_distance(outcome, full, mine, model)
    short, policy = tiny_llama(max_position_embeddings=100), ag.policy("streaming_llm", 8, "steps:9", positions="slot")
    assert "kl" not in stream(policy, short, tokens=110)[0].tags


def test_each_book_that_fits_is_compared_with_a_full_cache(root, tiny_llama, tiny_tokenizer, monkeypatch):
    """Whatever the other books are; the log-probabilities of one that does not fit are not computed."""
    model, policy = tiny_llama(max_position_embeddings=128), ag.policy("streaming_llm", 8, "steps:9", positions="slot")
    task, sizes = make("ppl_stream", root, block=50), []
    score = type(task)._score_stream

    def record(*given):
        scored = score(*given)
        sizes.append(len(scored[2]))
        return scored

    monkeypatch.setattr(type(task), "_score_stream", record)
    books = task.load(tiny_tokenizer, None, 512).samples
    assert [task.length(book) > 128 for book in books] == [True, False, False, False]
    together = [outcome.tags for _, outcome in task.run(model, tiny_tokenizer, [policy], books)]
    assert ["kl" in tags for tags in together] == [False, True, True, True]
    assert sizes == [0, *[-(-len(book.target_tokens) // COMPARED) for book in books[1:] for _ in ("full", policy)]]
    [(_, alone)] = task.run(model, tiny_tokenizer, [policy], books[1:2])
    assert alone.tags == together[1]


@pytest.mark.parametrize(
    ("limit", "ids", "left_out"), [(2, ["0", "2"], 1), (3, ["0", "2", "4"], 2), (9, ["0", "2", "4"], 2)]
)
def test_a_limit_counts_what_can_be_run(tiny_tokenizer, root, limit, ids, left_out):
    loaded = make("ppl", root, prompt=40, continuation=20).load(tiny_tokenizer, limit, 512)
    assert ([sample.id for sample in loaded.samples], loaded.too_short) == (ids, left_out)
    books = make("ppl_stream", root, block=59, data="corpus").load(tiny_tokenizer, limit, 512)
    assert ([book.id for book in books.samples], books.too_short) == (ids, left_out)


def test_lengths_that_do_not_fit(tiny_tokenizer, root):
    with refuses(UserError, "prompt=512", "continuation=64", "512"):
        make("ppl", root).load(tiny_tokenizer, None, 512)


def test_first_tokens(tiny_tokenizer):
    """A part of a text is tokenised, and all of it if the part has too few tokens; the last token may be cut."""
    words = "abc " * 100
    assert first_tokens(tiny_tokenizer, words, 5) == tiny_tokenizer("abc a")["input_ids"]
    assert first_tokens(tiny_tokenizer, words, None) == tiny_tokenizer(words)["input_ids"]

    class Dense:  # 100 letters a token
        bos_token_id = 0

        def __call__(self, texts, **_):
            split = [[len(text[i : i + 100]) for i in range(0, len(text), 100)] for text in texts]
            return {"input_ids": split if isinstance(texts, list) else split[0]}

    assert first_tokens(Dense(), "x" * 950, 7) == [100] * 7
    assert first_tokens(Dense(), "x" * 950, 1) == [100]
    assert first_tokens(Dense(), "x" * 250, 7) == [100, 100, 50]


def test_a_stream_with_a_full_cache(stream, tiny_llama, plain):
    model = tiny_llama()
    outcome, book = stream(ag.policy("full"), model, tokens=290, bin=100, step=64)
    nats = -plain(model, book.prompt, book.target_tokens)
    hold(outcome.score, nats.mean(), of_nats(model))
    curve = {"nats@50": nats[:100].mean(), "nats@150": nats[100:200].mean(), "nats@250": nats[200:].mean()}
    for name, wanted in curve.items():
        hold(outcome.tags[name], wanted, of_nats(model), name)
    rest = {name: x for name, x in outcome.tags.items() if name not in curve | {"kl": 0}}
    assert rest == {"held@50": 1.0, "held@150": 1.0, "held@250": 1.0, "held@end": 1.0, "same_top1": 1.0}
    assert outcome.parts == {"position": {"nats": {name[5:]: outcome.tags[name] for name in curve}}}
    assert (outcome.tokens, outcome.kept) == (290, 1.0)


def passes(first, last, step):
    """For each token from `first` on, the tokens seen after the pass that it comes with."""
    return [min(last, first + (number // step + 1) * step) for number in range(last - first)]


@pytest.mark.parametrize(("schedule", "positions"), [("every", "slot"), ("blocks:10+steps:8", "original")])
def test_a_stream_keeps_its_size(stream, tiny_llama, step_by_step, schedule, positions):
    """And goes beyond the model's context, where positions allow it."""
    model = tiny_llama(max_position_embeddings=64) if positions == "slot" else tiny_llama()
    policy = ag.policy("streaming_llm", 20, schedule, positions=positions)
    outcome, book = stream(policy, model, tokens=90, bin=20)
    held = np.array([20 / seen for seen in passes(50, 90, policy.steps)])
    assert outcome.kept == pytest.approx(held.mean()) and outcome.tags["held@end"] == pytest.approx(20 / 90)
    found = [outcome.tags["held@50"], outcome.tags["held@70"]]
    assert found == pytest.approx([held[:20].mean(), held[20:].mean()])
    assert outcome.kv_bytes <= (SLOT + 4) * 3 * 2 * slots(50, 20)
    if schedule == "every":
        nats = step_by_step(model, ag.EvictionCache(model, policy), book.prompt, book.target_tokens)
        hold(outcome.score, -nats.mean(), of_nats(model))


def test_policies_that_cannot_stream(tiny_llama, tiny_tokenizer, write):
    model = tiny_llama()
    task = make("ppl_stream", write("pg19_style/test", [{"text": "x" * 600}]), block=50)
    samples = task.load(tiny_tokenizer, None, 512).samples
    ag.attach(model, gates_for(model))
    for policy, parts in (
        (ag.policy("h2o", 20, "every"), ("600 tokens", "512", "positions=slot", "tokens=512")),
        (ag.policy("h2o", 20), ("schedule=every",)),
        (ag.policy("gates"), ("gate.covers=prompt", "gate.covers=all")),
    ):
        with refuses(UserError, *parts):
            next(task.run(model, tiny_tokenizer, [policy], samples))
    assert torch.is_grad_enabled()
