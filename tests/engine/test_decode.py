"""Decoding reads ragged rows where they lie, whatever wraps the model."""

import pytest
import torch

import ag
from ag.engine import layer
from ag.errors import UserError
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

PROMPT, NEW = 60, 3


def logits(model, forward, *policy, **options):
    """The logits of a batch of two after the prompt and after each further token, and what was held at the end."""
    ids = torch.randint(3, 128, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    cache = ag.EvictionCache(model, *policy, **options)
    with torch.no_grad():
        out = [forward(ids[:, :PROMPT], past_key_values=cache).logits[:, -1]]
        out += [forward(ids[:, t : t + 1], past_key_values=cache).logits[:, -1] for t in range(PROMPT, PROMPT + NEW)]
    return torch.stack(out), cache.store.held.flatten(1).tolist()


def test_uneven_heads_are_not_gathered(tiny_llama, monkeypatch):
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=5))
    ids = torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    for policy in (("gates",), ("snapkv@heads", 40)):
        cache = ag.EvictionCache(model, *policy)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            assert any(len(set(held.flatten().tolist())) > 1 for held in cache.store.held)
            with monkeypatch.context() as patch:
                patch.setattr(layer, "read", lambda *_: pytest.fail("the layer was gathered"))
                for _ in range(NEW):
                    model(ids[:, :1], past_key_values=cache)
        assert cache.seen_tokens == PROMPT + NEW


@pytest.mark.parametrize("policy", [("full",), ("h2o", 20, "every"), ("gates",)], ids=str)
def test_gradients_do_not_go_through_a_cache(tiny_llama, policy):
    """Not from its weights, and not from what it is given; without either the cache goes on."""
    model = tiny_llama()
    ag.attach(model, gates_for(model, recent_tokens=5))
    ids = torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with refuses(UserError, "gradients", "torch.no_grad()"):
        model(ids, past_key_values=ag.EvictionCache(model, *policy))
    model.requires_grad_(False)
    cache = ag.EvictionCache(model, *policy)
    model(ids, past_key_values=cache)
    with refuses(UserError, "gradients", "torch.no_grad()"):
        embeds = model.get_input_embeddings()(ids[:, :1]).requires_grad_()
        model(inputs_embeds=embeds, past_key_values=cache)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_compiled_model_equals_the_plain_one(tiny_llama):
    """The engine stays outside of what is compiled."""
    model = tiny_llama(num_hidden_layers=2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for policy in (("full",), ("snapkv@heads", 40), ("tova", 30, "every")):
        expected, held = logits(model, model, *policy)
        found, held_compiled = logits(model, compiled, *policy)
        assert held == held_compiled
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
