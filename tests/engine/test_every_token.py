"""Gates that act on every token (``gate.covers=all``): inference against the training forward and an oracle."""

import copy
import re

import pytest
import torch

import ag
from ag.engine.layer import EXPIRED
from ag.errors import UserError
from tests.support import ROOT, batches, by_hand
from tests.support.bounds import hold, of_logits
from tests.support.dense import masked
from tests.support.gates_for import gates_for
from tests.support.held import feed
from tests.support.refused import refuses

LENGTHS = (100, 61)
KINDS = {
    "attention": {},
    "window": {"window": 20, "shortcut": True, "granularity": "query_head"},
    "linear": {"kind": "linear"},
    "mlp": {"kind": "mlp", "hidden": 16},
}
PASSES = {
    "decode": [[60, 21], *[[1, 1]] * 40],
    "chunks-7": [[7, 7 if n >= 6 else 0] for n in range(13)] + [[9, 12]],
    "blocks:9": [[100, 61]],
    "chunks-64": [[64, 25], [36, 36]],
    "turns": [[50, 26], *[[1, 1]] * 15, [30, 11], [5, 4], [0, 1], [0, 3], [0, 1]],
    "pauses": [[60, 34], *[[1, n % 3 > 0] for n in range(40)], [0, 1]],
}


def everywhere(model, **changes):
    """Gates on every token, attached."""
    gates = gates_for(model, covers="all", **{"recent_tokens": 9, "sink_tokens": 2} | changes)
    ag.attach(model, gates)
    return gates


def rows_of(lengths=LENGTHS, seed=0):
    return [batches.row(n, n + seed) for n in lengths]


@torch.no_grad()
def trained(model, gates, row, prompt=None):
    """Logits ``[T, V]`` of a packed row through the training forward, and the flags by layer ``[Hkv, T]``."""
    gating = ag.Gating(gates, torch.ones(1, len(row)), None if prompt is None else torch.tensor([prompt]))
    logits = model(row[None], gating=gating, use_cache=False).logits[0]
    return logits, {layer: gates.flags(found)[0] for layer, found in gating.logits.items()}


CASES = [
    ("tiny_llama", "window", "turns", "right"),
    ("tiny_llama", "window", "pauses", "left"),
    ("tiny_llama", "linear", "chunks-7", "any"),
    ("tiny_mistral", "window", "chunks-64", "left"),
    ("tiny_qwen3", "mlp", "blocks:9", "right"),
    ("tiny_gemma3", "attention", "decode", "left"),
]


@pytest.mark.parametrize(("family", "kind", "passes", "side"), CASES, ids=lambda value: value)
def test_logits_are_those_of_the_training_forward(family, kind, passes, side, request):
    model = request.getfixturevalue(family)()
    gates, rows = everywhere(model, **KINDS[kind]), rows_of()
    whole, blocks = passes.startswith(("chunks", "blocks")), passes.startswith("blocks")
    cache = ag.EvictionCache(model, ag.policy("gates", schedule=passes if blocks else "prefill"))
    result = feed(cache, model, rows, PASSES[passes], side, parts=len(PASSES[passes]) if whole else 0)
    for b, row in enumerate(rows):
        assert len(result.logits[b]) == len(row)
        want, flags = trained(model, gates, row)
        hold(result.logits[b], want, of_logits(model))
        share = torch.stack([*flags.values()]).float().mean()
        assert 0.1 < share < 0.9, "flags are mixed"


def test_what_gates_cannot_do_is_refused_and_loses_nothing(tiny_llama):
    model, (row,) = tiny_llama(), rows_of([40])
    gates = gates_for(model, scope="prompt")
    ag.attach(model, gates)
    with refuses(UserError, "gate.scope=prompt", "one forward pass", "schedule"):
        ag.EvictionCache(model, "gates", budget=9, schedule="blocks:8")
    ag.detach(model)
    with refuses(ValueError, "gate.covers=all", "gate.scope=prompt"):
        everywhere(model, scope="prompt")
    gates = everywhere(model)
    cache = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        model(row[None, :30], past_key_values=cache)
        ag.detach(model)
        with refuses(UserError, "ag.detach"):
            model(row[None, 30:31], past_key_values=cache)
        ag.attach(model, gates)
        got = model(row[None, 30:], past_key_values=cache).logits[0]
    hold(got, trained(model, gates, row)[0][30:], of_logits(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recent", "sinks", "prefill"),
    [("tiny_llama", 1, 0, "dense"), ("tiny_mistral", 24, 1, "sparse")],
)
def test_kept_positions_at_every_step(family, recent, sinks, prefill, request):
    """Beside them the bytes: what left a row since something was last removed there, a token more and the rest of its
    block, a free block, ranks and flags."""
    model = request.getfixturevalue(family)()
    gates = everywhere(model, recent_tokens=recent, sink_tokens=sinks, window=6, prefill=prefill)
    (row,), window = rows_of([150]), getattr(model.config, "sliding_window", None)
    passes, judged = [40, *[1] * 70, 12, *[1] * 28], []
    judge = ag.AttentionGates.flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ag.AttentionGates, "flags", lambda self, x: judged.append(judge(self, x)[0]) or judge(self, x))
        result = feed(ag.EvictionCache(model, "gates"), model, [row], [[n] for n in passes])
    assert len(judged) == 3 * len(passes)
    flags = [torch.cat(judged[layer::3], 1) for layer in range(3)]
    tokens = 0
    for number, (size, held) in enumerate(zip(passes, result.held, strict=True)):
        tokens += size
        first = tokens - size if number else tokens
        for layer in range(3):
            assert held[layer][0] == by_hand.kept(gates, flags[layer], 0, tokens, first, window)
    cache = result.cache
    held = sum(len(head) for layer in result.held[-1] for head in layer[0])
    late = EXPIRED + (recent if window is None else window) + 1
    blocks = sum(-(-(n + late) // 16) + 1 for layer in result.held[-1] for n in map(len, layer[0]))
    memory = 3 * 6 * 2 * 2 * 8 * 4
    assert held * 2 * 16 * 4 + memory <= cache.nbytes <= blocks * 16 * (2 * 16 * 4 + 4 + 1) + memory
    assert cache.kept_share() == held / (3 * 2 * 150)
    assert sum(map(sum, cache.report().kept)) == held


@torch.no_grad()
def test_copies_crops_and_beams(tiny_llama):
    """Copies of one cache go on as the text of each demands: cut, with others' questions, in another order."""
    model = tiny_llama()
    gates = everywhere(model, window=6)
    context, other = rows_of([60, 60])[0], rows_of([60], 1)[0]
    questions = rows_of([23], 2)[0], rows_of([23], 3)[0]
    cache = ag.EvictionCache(model, "gates")
    model(torch.stack([context, other]), past_key_values=cache)
    for new in (7, 8, 9):
        model(torch.full((2, 1), new), past_key_values=cache)
    start = [torch.cat([x, torch.tensor([7, 8, 9])]) for x in (context, other)]
    want = {(i, j): trained(model, gates, torch.cat([start[i], questions[j]]))[0][63:] for i in (0, 1) for j in (0, 1)}

    def ask(cache, order, asked, sizes):
        ids = torch.stack([questions[j] for j in asked])
        out = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)], 1)
        for got, i, j in zip(out, order, asked, strict=True):
            hold(got, want[i, j], of_logits(model))

    def draft(cache, size):
        model(torch.full((len(cache.valid), size), 5), past_key_values=cache)
        cache.crop(-size)

    ask(copy.deepcopy(cache), (0, 1), (1, 0), [1] * 23)
    for size in (1, 9):
        drafted = copy.deepcopy(cache)
        draft(drafted, size)
        draft(drafted, 5)
        ask(drafted, (0, 1), (0, 1), [1, 1, 1, 20])
    waiting = copy.deepcopy(cache)  # with a pass that is not settled
    model(torch.full((2, 6), 5), past_key_values=waiting)
    waiting.crop(-6)
    ask(copy.deepcopy(waiting), (0, 1), (1, 1), [3, 20])
    beams = copy.deepcopy(cache)
    beams.reorder_cache(torch.tensor([1, 1]))
    ask(beams, (1, 1), (0, 1), [1, 22])
    picked = copy.deepcopy(cache)
    draft(picked, 3)
    picked.batch_repeat_interleave(2)
    picked.batch_select_indices(torch.tensor([3, 0, 1]))
    ask(picked, (1, 0, 0), (0, 0, 1), [1, 1, 21])
    ask(cache, (0, 1), (0, 0), [23])


def test_crop_refuses_what_is_gone_and_loses_nothing(tiny_llama):
    model = tiny_llama()
    gates = everywhere(model, window=3)
    (row,) = rows_of([60])
    cache = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        for part in (row[:30], row[30:31], row[31:32]):
            model(part[None], past_key_values=cache)
        with refuses(UserError, "sequence 0", "first 31", "crop at most 1"):
            cache.crop(-2)
        cache.crop(-1)
        with refuses(UserError, "sequence 0", "first 31", "crop at most 0"):
            cache.crop(-1)
        got = model(row[None, 31:], past_key_values=cache).logits[0]
    hold(got, trained(model, gates, row)[0][31:], of_logits(model))
    short = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        for token in row[:8]:
            model(token[None, None], past_key_values=short)
        with refuses(UserError, "sequence 0", "first 7", "crop at most 1"):
            short.crop(-2)


@pytest.mark.parametrize(("name", "steps", "covers"), [("gates@uniform", 3, "all"), ("gates@heads", 1, "prompt")])
def test_budgets_rank_generated_tokens_by_their_own_probability(tiny_llama, name, steps, covers):
    """What stays is recomputed from the probabilities that the gates gave, token by token."""
    model, capacity, prompts = tiny_llama(), 14, [30, 21]
    ag.attach(model, gates_for(model, window=5, covers=covers))
    said, probability = [], ag.AttentionGates.probability
    rows = [row[: p + 24] for row, p in zip(rows_of(), prompts, strict=True)]
    policy = ag.policy(name, capacity, f"steps:{steps}")
    with pytest.MonkeyPatch.context() as patch:
        recorded = lambda self, x: said.append(probability(self, x)) or said[-1]  # noqa: E731
        patch.setattr(ag.AttentionGates, "probability", recorded)
        result = feed(ag.EvictionCache(model, policy), model, rows, [prompts, *[[1, 1]] * 24])
    visible = [result.visible(layer, 0, len(rows[0])) for layer in range(3)]
    hold(result.logits[0], masked(model, rows[0], lambda layer, _: visible[layer]), of_logits(model))
    assert len(said) == 3 * (25 if covers == "all" else 1)
    for layer in range(3):
        for b, prompt in enumerate(prompts):
            own = torch.ones(2, prompt + 24)
            own[:, :prompt] = said[layer][b, :, :prompt]
            if covers == "all":
                own[:, prompt:] = torch.cat([x[b] for x in said[layer + 3 :: 3]], 1)
            held = [set(head) for head in result.held[0][layer][b]]
            for step, after in enumerate(result.held[1:], 1):
                held = [head | {prompt + step - 1} for head in held]
                held = held if step % steps else best(held, own, capacity, name.endswith("heads"))
                assert [set(head) for head in after[layer][b]] == held


def best(rivals, own, capacity, heads):
    """The sets of ranks that stay; of equal ones the earlier."""
    ranked = [sorted(head, key=lambda t: (-float(own[g, t]), t)) for g, head in enumerate(rivals)]
    if not heads:
        return [set(head[:capacity]) for head in ranked]
    least = int(0.2 * capacity)
    kept = [set(head[:least]) for head in ranked]
    others = [(-float(own[g, t]), g, t) for g, head in enumerate(ranked) for t in head[least:]]
    for _, g, t in sorted(others)[: capacity * len(rivals) - least * len(rivals)]:
        kept[g].add(t)
    return kept


@pytest.mark.slow
@pytest.mark.nightly
def test_the_chat_of_the_docs_stays_bounded(tiny_llama, tiny_tokenizer, tmp_path, capsys):
    page = (ROOT / "docs" / "gates.md").read_text()
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "EvictionCache" in code)
    assert len(example.strip().splitlines()) <= 20
    model = tiny_llama(max_position_embeddings=1024)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    gates_for(model, covers="all", window=6).save_pretrained(tmp_path / "export")
    names = {}
    exec(example.replace("MODEL", str(tmp_path / "model")).replace("EXPORT", str(tmp_path / "export")), names)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" bytes")]
    sizes = [int(line.split()[-2].replace(",", "")) for line in lines]
    assert len(sizes) == 5
    block = 16 * (2 * 16 * 4 + 4 + 4)  # with a rank and what the gate said
    blocks = 3 * ((2 * (96 + 16) + 2 * 15) // 16)  # room for 16 tokens to come in each of a layer's two rows
    assert max(sizes[-2:]) <= blocks * block + 3 * 8 * 2 * 16 * 4
    cache = names["cache"]
    assert cache.seen_tokens > 300
    held = [len(head) for layer in range(3) for head in cache.kept_positions(layer)[0]]
    assert sum(held) == 96 * len(held)
