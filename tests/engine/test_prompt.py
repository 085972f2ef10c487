"""Several policies that read a prompt together are as each is alone."""

import gc
import weakref

import pytest
import torch

import ag
from ag.engine import reconstruction
from ag.engine.cache import EvictionCache
from ag.engine.prompt import read_prompt
from ag.model.structure import decoder_of
from tests.model.test_architectures import tiny
from tests.support.batches import columns
from tests.support.bounds import hold, of_logits, of_pass
from tests.support.gates_for import gates_for

POLICIES = [
    ag.policy("h2o", 0.5),
    ag.policy("snapkv+caote@preference", 9, window=4),
    ag.policy("tova", 6, schedule="blocks:5+every"),
    ag.policy("gates"),
    ag.policy("gates", 0.3),
]


def test_together_is_as_alone(tiny_llama):
    model = tiny_llama().eval()
    ag.attach(model, gates_for(model, prefill="sparse"))
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    bound = of_pass(model, lambda: decoder_of(model)(ids, mask, positions, use_cache=False).last_hidden_state)
    passes = []
    handle = decoder_of(model).register_forward_hook(lambda *_: passes.append(1))
    together = read_prompt(model, POLICIES, ids, mask, positions)
    handle.remove()
    assert len(passes) == 3
    for one, (cache, last) in zip(POLICIES, together, strict=True):
        alone = EvictionCache(model, one)
        with torch.no_grad():
            states = decoder_of(model)(ids, mask, positions, past_key_values=alone).last_hidden_state[:, -1]
        hold(last, states, bound)
        assert cache.nbytes == alone.nbytes
        assert columns(cache) == columns(alone)
        following = torch.tensor([[5, 6, 7], [8, 9, 10]])
        both = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
        with torch.no_grad():
            logits = [
                model(following, both, both.cumsum(1)[:, -3:] - 1, past_key_values=x).logits for x in (cache, alone)
            ]
        hold(*logits, of_logits(model))


@torch.no_grad()
def test_a_prompt_longer_than_a_chunk_of_attention_is_read_alone():
    """Llama 4 reads it chunk by chunk, and layers with full attention see the chunks before."""
    kinds = ["chunked_attention", "full_attention"]
    layers = {"num_hidden_layers": 2, "layer_types": kinds, "no_rope_layers": [1, 0], "moe_layers": [0, 1]}
    model, ids = tiny("llama4_text", attention_chunk_size=16, **layers), torch.randint(3, 90, (1, 40))
    [(together, _), _] = read_prompt(model, [ag.policy("knorm", 10), ag.policy("h2o", 10)], ids)
    alone = EvictionCache(model, "knorm", 10)
    model(ids, past_key_values=alone)
    assert columns(together) == columns(alone)
    following = torch.tensor([[5]])
    logits = [model(following, past_key_values=cache).logits for cache in (together, alone)]
    hold(*logits, of_logits(model))


@pytest.mark.parametrize("given", [True, False], ids=["position_ids", "none"])
def test_together_is_as_alone_whatever_keys_are_rotated_by(tiny_llama, given):
    """Beside each other, in a padded batch, and for one of them beyond the context."""
    model = tiny_llama(max_position_embeddings=16).eval()
    kinds = ["slot", "original", "interpolated", "slot"]
    schedules = {"interpolated": "blocks:7"}  # of a longer part some keys would have to be squeezed within it
    policies = [
        ag.policy("snapkv", n, schedules.get(kind, "prefill"), window=4, positions=kind)
        for n, kind in enumerate(kinds, 8)
    ]
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0) if given else None
    following, both = torch.tensor([[5], [8]]), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    for one, (cache, last) in zip(policies, read_prompt(model, policies, ids, mask, positions), strict=True):
        alone = EvictionCache(model, one)
        with torch.no_grad():
            states = decoder_of(model)(ids, mask, positions, past_key_values=alone).last_hidden_state[:, -1]
            hold(model.lm_head(last), model.lm_head(states), of_logits(model))
            after = [model(following, both, past_key_values=x).logits for x in (cache, alone)]
        hold(*after, of_logits(model))
        assert columns(cache) == columns(alone)


def test_a_reread_is_of_what_is_held(tiny_llama, monkeypatch):
    """Of codes where codes are attended to: scores are those that the cache has alone, to the bit."""
    model, ids = tiny_llama().eval(), torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    found, evict = [], reconstruction._evict
    monkeypatch.setattr(reconstruction, "_evict", lambda *args: found.append(args[2].scores[1]) or evict(*args))
    wanted = [ag.policy("kvzip", 0.5, chunk=16, kv_dtype=kind) for kind in ("float", "int8", "float")]
    read_prompt(model, wanted, ids)
    for one in wanted:
        with torch.no_grad():
            decoder_of(model)(ids, past_key_values=EvictionCache(model, one))
    assert all(torch.equal(*pair) for pair in zip(found[:3], found[3:], strict=True))
    assert found[0] is found[2] and not torch.equal(found[0], found[1])


@pytest.mark.parametrize("spec", ["snapkv@preference", "gates"])
def test_memory_goes_with_the_cache(tiny_llama, spec):
    """At once, without the garbage collector."""
    model = tiny_llama().eval()
    ag.attach(model, gates_for(model))
    policy = ag.policy(spec) if spec == "gates" else ag.policy(spec, 40, "blocks:16+every")
    gc.collect()
    gc.disable()
    try:
        ((cache, _),) = read_prompt(model, [policy], torch.randint(3, 128, (1, 60)))
        with torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=cache)
        held = weakref.ref(cache.setup.pool)
        del cache
        assert held() is None
    finally:
        gc.enable()


def test_layers_in_two_places(tiny_llama, tmp_path):
    """Two layers whose weights accelerate fetches from the disk, as ``device_map="auto"`` does."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: .venv/bin/pip install accelerate")
    ids, found = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0)), []
    for offload in (False, True):
        model = tiny_llama().eval()
        gates = gates_for(model, prefill="sparse")
        if offload:
            places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
            places |= {"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "cpu"}
            model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
            assert next(model.model.layers[1].parameters()).device.type == "meta"
        ag.attach(model, gates)
        cache = EvictionCache(model, "gates")
        text = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False, pad_token_id=0)
        found.append((text.tolist(), columns(cache)))
        ag.detach(model)
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert found[0] == found[1]
