"""What stays of a prompt in vLLM is what `ag.EvictionCache` keeps of it; without vLLM."""

import pytest
import torch

import ag
from ag.errors import UserError
from ag.vllm.placement import Geometry, kept_tokens
from ag.vllm.ranking import prompt_keep_mask
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
    geometry = Geometry(settings, 16, heads, layers, layers, layers, apart=False)
    kept = kept_tokens(geometry, TOKENS, protected)
    mask = prompt_keep_mask(settings.made_policy, kept, protected, [*range(layers)], keys.__getitem__, logits)
    assert torch.equal(mask, kept_by_cache(model, ids, text, protected, **options))
    assert int(mask.sum()) == kept * layers * heads


def test_score_that_is_not_finite(model):
    policy = ag.policy("knorm", budget=0.5)
    keys = [torch.zeros(2, 10, 4), torch.full((2, 10, 4), float("nan"))]
    with refuses(UserError, "layer 1", "knorm"):
        prompt_keep_mask(policy, 5, 0, [0, 1], keys.__getitem__, None)
