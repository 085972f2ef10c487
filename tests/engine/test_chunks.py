"""A prompt in chunks of any sizes is scored, and kept, as one that comes whole.

This is so of every scorer, wrapper and allocator under ``prefill``: what they look at is defined by the prompt, and
none asks where a chunk ended. Left out are ``kvzip``, which repeats the prompt once it is whole, and gates with
``scope=prompt``, which refuse chunks. Under ``blocks:m`` expected attention counts queries that come with a decision.
"""

import random

import pytest
import torch

import ag
from ag.engine.decide import Decision
from tests.support.bounds import hold, of_float32
from tests.support.gates_for import gates_for
from tests.support.held import everything
from tests.support.pairs import covering

LENGTHS, LOOK = (41, 35), 4
#: Scorers, under options with which the last LOOK queries and more decide, and wrappers of some.
POLICIES = {
    "streaming_llm": {},
    "h2o": {},
    "h2o-window": {"window": LOOK, "normalize": "count", "recent": 3},
    "scissorhands": {"window": LOOK, "recent": 3},
    "tova": {},
    "snapkv": {"window": LOOK, "kernel": 3},
    "cake": {"window": LOOK, "kernel": 3},
    "rkv": {"window": LOOK, "kernel": 3},
    "keydiff": {},
    "knorm": {},
    "gates": {"recent": 2},
    "expected_attention": {"window": LOOK, "sinks": 2, "future": 8},
    "snapkv+vatp": {"window": LOOK, "kernel": 3, "sinks": 2},
    "snapkv+caote": {"window": LOOK, "kernel": 3},
    "snapkv+criticalkv": {"window": LOOK, "kernel": 3},
    "h2o+obcache_joint": {},
    "cake+obcache_key": {"window": LOOK, "kernel": 3},
}
#: Those that tests try each time.
QUICK = ("tova", "snapkv", "cake+obcache_key", "expected_attention")
ALLOCATORS = ["uniform", "pyramid", "heads", "global", "preference"]
WINDOWS = [None, 7, 15]
#: Each token once: equal ones have keys of one norm in layer 0.
ROWS = [torch.randperm(125, generator=torch.Generator().manual_seed(n))[:n] + 3 for n in LENGTHS]


def chunks(last, draw):
    """Sizes of chunks of a prompt, of which the last one is given, and so is the one before."""
    sizes, left = [], max(LENGTHS) - 2 * last
    while left:
        sizes.append(draw.randint(1, min(left, 15)))
        left -= sizes[-1]
    return [*sizes, last, last]


@torch.no_grad()
def read(model, policy, side, sizes):
    """What is kept of two prompts, and by layer the scores of what competed for that, by rank."""
    scores, candidates, longest = {}, Decision._candidates, max(LENGTHS)

    def shown(self, seen, due, records):
        made = candidates(self, seen, due, records)
        found = torch.full((*made.score.shape[:2], longest), -1e9, dtype=torch.float64)
        competes = made.valid & ~made.protected
        found[(*competes.nonzero(as_tuple=True)[:2], seen.key_ranks[competes])] = made.score[competes].double()
        scores[seen.layer] = found.where(due[:, None, None], scores.get(seen.layer, found))
        return made

    ids, mask = torch.zeros(2, longest, dtype=torch.long), torch.zeros(2, longest, dtype=torch.long)
    for b, tokens in enumerate(ROWS):
        place = slice(longest - len(tokens), longest) if side == "left" else slice(0, len(tokens))
        ids[b, place], mask[b, place] = tokens, 1
    cache, seen = ag.EvictionCache(model, policy), 0
    cache.expect(mask.bool())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decision, "_candidates", shown)
        for part in ids.split(sizes, 1):
            seen += part.shape[1]
            model(part, attention_mask=mask[:, :seen], past_key_values=cache)
    return everything(cache), scores


def check(policy, side, model, exact, gates=None):
    """Read prompts whole and in chunks, and assert that scores and what is kept are the same."""
    kept, wanted = read(model, policy, side, [max(LENGTHS)])
    if gates is not None:
        gates.double()
    _, exact_scores = read(exact, policy, side, [max(LENGTHS)])
    draw = random.Random(0)
    for last in range(1, LOOK + 2):
        sizes = chunks(last, draw)
        found, scores = read(model, policy, side, sizes)
        for layer, score in scores.items():
            hold(score, wanted[layer], of_float32(wanted[layer], exact_scores[layer]), name=(sizes, layer))
        assert found == kept, sizes


@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
@pytest.mark.parametrize(
    ("name", "allocator", "window", "side"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in QUICK or case[2] == 15))
        for case in covering(name=list(POLICIES), allocator=ALLOCATORS, window=WINDOWS, side=["left", "right"])
    ],
)
def test_what_is_kept_does_not_depend_on_chunks(tiny_llama, tiny_mistral, name, allocator, window, side):
    """Whose last one has any size up to one more than the queries that are looked back at."""
    options = POLICIES[name] | ({"observers": LOOK} if allocator == "preference" else {})
    models, gates = [tiny_mistral(sliding_window=window, num_hidden_layers=2) for _ in range(2)], None
    for model in models:
        gates = gates_for(model)
        ag.attach(model, gates)
    policy = ag.policy(f"{name.partition('-')[0]}@{allocator}", 6, **options)
    check(policy, side, models[0], models[1].double(), gates)
