"""The schedule ``buffer:n``: something goes whenever n tokens more than the budget are held, and down to the budget."""

import pytest
import torch

import ag
from ag.errors import UserError
from tests.support.batches import row
from tests.support.held import alone_too, feed
from tests.support.refused import refuses

BUDGET, BUFFER = 20, 5
PROMPTS = (33, 22, 9)  # more than both, more than the budget, less
STEPS = 24  # and tokens of the turns
#: Each token once: two of a kind have keys of one norm in layer 0, up to rounding.
ROWS = [torch.randperm(125, generator=torch.Generator().manual_seed(p))[: p + STEPS] + 3 for p in PROMPTS]
POLICIES = {
    "h2o": {},
    "streaming_llm": {"sinks": 2},
    "snapkv": {"window": 4, "kernel": 3},
    "tova@heads": {},
    "knorm@global": {},
    "cake@preference": {"window": 4, "kernel": 3},
}


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return tiny_llama()


def counts(prompt, passes):
    """Tokens of a sequence that are held after its prompt and after each pass, the mean over heads and layers."""
    held, found = 0, []
    for new in (prompt, *passes):
        held += new
        held = BUDGET if held >= BUDGET + BUFFER else held
        found.append(held)
    return found


@pytest.mark.parametrize(
    ("passes", "side"), [([1] * STEPS, "left"), ([2, 1, 7, 1, 1, 9, 3], "right")], ids=["steps", "turns"]
)
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_held(llama, name, passes, side):
    """In a batch as alone, and of each sequence as many tokens as a count of them says."""
    policy = ag.policy(name, BUDGET, f"buffer:{BUFFER}", **POLICIES[name])
    rows = [tokens[: prompt + sum(passes)] for tokens, prompt in zip(ROWS, PROMPTS, strict=True)]
    result = alone_too(llama, policy, rows, [PROMPTS, *([n] * len(rows) for n in passes)], side)
    for b, prompt in enumerate(PROMPTS):
        for held, count in zip(result.held, counts(prompt, passes), strict=True):
            by_layer = [[len(head) for head in layer[b]] for layer in held]
            assert sum(map(sum, by_layer)) == 3 * 2 * count
            if "@" not in name:
                assert by_layer == [[count] * 2] * 3


def test_a_share_is_a_share_of_the_prompt(llama):
    """0.25 of 40 tokens are 10; a buffer of 50 is full after 20 tokens more."""
    tokens = row(70)
    result = feed(ag.EvictionCache(llama, "h2o", 0.25, "buffer:50"), llama, [tokens], [[40], *[[1]] * 30])
    assert [len(held[0][0][0]) for held in result.held] == [*range(40, 60), 10, *range(11, 21)]


@pytest.mark.parametrize(
    ("schedule", "options", "parts"),
    [
        ("buffer:0", {}, "buffer:0 buffer:n"),
        ("buffer:4+every", {}, "buffer:4+every buffer:n"),
    ],
)
def test_what_is_refused(schedule, options, parts):
    with refuses(UserError, *parts.split()):
        ag.policy("h2o", 0.5, schedule, **options)
    with refuses(UserError, "budget"):
        ag.policy("h2o", schedule="buffer:4")
