"""What stays of a prompt in vLLM is what `ag.EvictionCache` keeps of it; without vLLM."""

import pytest
import torch

import ag
from ag.errors import UserError
from ag.vllm.placement import Geometry, kept_tokens, place
from ag.vllm.ranking import Candidates, keep_mask
from ag.vllm.settings import Settings
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

TOKENS = 90


class Seen:
    """Keys that layers get, and hidden states that enter attention."""

    def __init__(self, model):
        self.keys, self.hidden = {}, {}
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        self.hidden[module.layer_idx] = (args[0] if args else kwargs["hidden_states"])[0].detach()


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama()


def keys_of(model, ids):
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


def kept_by_cache(model, ids, policy, protected, **options):
    cache = ag.EvictionCache(model, policy, **options)
    if protected:
        cache.protect([(0, protected)])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    keep = torch.zeros(model.config.num_hidden_layers, model.config.num_key_value_heads, ids.shape[1], dtype=bool)
    for layer in range(len(keep)):
        for head, (row,) in enumerate(zip(*cache.kept_positions(layer), strict=True)):
            keep[layer, head, row] = True
    return keep


def whole(keys, logits=None, protected=0):
    """The tokens of a prompt in all layers."""
    heads, tokens = keys[0].shape[:2]
    indices = torch.arange(tokens).expand(len(keys), heads, -1)
    return Candidates([*range(len(keys))], indices, tokens, tokens, protected, keys.__getitem__, logits)


@pytest.mark.parametrize("protected", [0, 50])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("gates:mlp", {"budget": 0.3}),
        ("gates:retention", {"budget": 0.3}),
        ("gates:affine@uniform", {"budget": 0.3, "sinks": 3}),
        ("gates:linear", {"budget": 40, "recent": 5}),
        ("knorm", {"budget": 0.5, "sinks": 2}),
        ("keydiff", {"budget": 0.5}),
        ("keydiff@global", {"budget": 30, "recent": 4}),
        ("streaming_llm", {"budget": 0.4}),
        ("random", {"budget": 0.5, "seed": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_as_the_cache(model, tmp_path, policy, options, protected):
    name, _, kind = policy.partition("@")[0].partition(":")
    if kind:
        gates_for(model, kind=kind, sink_tokens=2, recent_tokens=4).save_pretrained(tmp_path / kind)
    text = policy.replace(f"{name}:", f"{name}:{tmp_path}/")
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    seen = Seen(model)
    keys = keys_of(model, ids)
    settings = Settings.parse({"ag": {"policy": text, **options}}, {})
    logits = None
    if settings.made_policy.gates is not None:
        found = settings.made_policy.gates
        with torch.no_grad():
            logits = torch.stack(
                [found.stored(found.layers[str(x)](seen.hidden[x][None]))[0] for x in range(len(keys))]
            )
    layers, heads = len(keys), keys[0].shape[0]
    geometry = Geometry(settings, 16, heads, layers, layers, longest=TOKENS, apart=False)
    kept = kept_tokens(geometry, TOKENS, protected, TOKENS)
    mask = keep_mask(settings.made_policy, whole(keys, logits, protected), kept, None)
    assert torch.equal(mask, kept_by_cache(model, ids, text, protected, **options))
    assert int(mask.sum()) == kept * layers * heads


def test_score_that_is_not_finite(model):
    policy = ag.policy("knorm", budget=0.5)
    keys = [torch.zeros(2, 10, 4), torch.full((2, 10, 4), float("nan"))]
    with refuses(UserError, "layer 1", "knorm"):
        keep_mask(policy, whole(keys), 5, None)


@pytest.mark.parametrize("protected", [0, 30, TOKENS])
@pytest.mark.parametrize("policy", ["random", "random@global", "streaming_llm@global"])
@pytest.mark.parametrize("schedule", ["steps:6", "blocks:20", "blocks:32+steps:3", "every"])
@pytest.mark.parametrize("budget", [0.4, 95])
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_again_as_the_cache(model, policy, schedule, budget, protected):
    """Scores by the place in the text, so that rows need no keys: what stays after each eviction."""
    settings = Settings(policy, budget, f'{{"schedule": "{schedule}", "recent": 5}}')
    layers, heads, count = model.config.num_hidden_layers, model.config.num_key_value_heads, 25
    geometry = Geometry(settings, 16, heads, layers, layers, longest=TOKENS + count, apart=False)
    placement = place(geometry, TOKENS, protected)
    held, totals = torch.zeros(layers, heads, TOKENS + count, dtype=bool), None
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS + count), generator=torch.Generator().manual_seed(1))
    cache = ag.EvictionCache(model, policy, budget=budget, schedule=schedule, recent=5)
    if protected:
        cache.protect([(0, protected)])
    unread = torch.zeros(heads, TOKENS + count, 1)
    for tokens in range(1, TOKENS + count + 1):
        held[..., tokens - 1] = True
        if placement is not None and placement.evicts_at(tokens):
            indices = torch.arange(held.shape[-1]).where(held, -1)
            candidates = Candidates([*range(layers)], indices, tokens, TOKENS, protected, lambda _: unread, None)
            if totals is None:
                totals = torch.full((layers,), kept_tokens(geometry, TOKENS, protected, TOKENS) * heads)
            kept = kept_tokens(geometry, TOKENS, protected, tokens)
            held = keep_mask(settings.made_policy, candidates, kept, totals if tokens > TOKENS else None)
            totals = held.sum((1, 2)) if tokens <= TOKENS else totals
        if tokens < TOKENS:
            continue
        with torch.no_grad():
            model(ids[:, :TOKENS] if tokens == TOKENS else ids[:, tokens - 1 : tokens], past_key_values=cache)
        for layer in range(layers):
            for head, (row,) in enumerate(zip(*cache.kept_positions(layer), strict=True)):
                assert held[layer, head].nonzero()[:, 0].tolist() == sorted(row)
