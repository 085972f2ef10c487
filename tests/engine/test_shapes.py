"""Models shaped as others than Llama: what was dropped is as if it were masked, or they are refused before they run."""

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

import ag
from ag.model.structure import UnsupportedModelError
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.held import run
from tests.support.refused import refuses
from tests.support.shapes import shaped

PROMPTS, STEPS = (33, 21), 4
ROWS = [torch.randint(3, 128, (p + STEPS,), generator=torch.Generator().manual_seed(p)) for p in PROMPTS]
POLICIES = {
    "full": {},
    "h2o": {"schedule": "every"},
    "streaming_llm": {"schedule": "blocks:8+every", "sinks": 2},
    "snapkv": {"window": 4, "kernel": 3},
    "h2o+vatp": {"sinks": 2, "recent": 2},
    "tova+caote@heads": {"schedule": "every", "floor": 0.0},
    "h2o+criticalkv@heads": {"schedule": "every", "floor": 0.0},
    "h2o+obcache_joint@preference": {"tau1": 1.0},
    "knorm@global": {},
    "kvzip": {"normalize": True, "sinks": 1, "chunk": 9},
    "gates@heads": {"schedule": "every"},
}
SEEN: dict[int, torch.Tensor] = {}  # by layer, the keys that each query of a KV head sees, [Hkv, T, T] bool


def attention_under_masks(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **rest):
    """What a model's own code runs: its attention in the masks of SEEN, written out for caps and sink logits."""
    group = query.shape[1] // key.shape[1]
    key, value, seen = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), SEEN[module.layer_idx]
    scores = query @ key.mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    exponentials = scores.exp().masked_fill(~seen.repeat_interleave(group, 0), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    total = total if s_aux is None else total + s_aux.exp()[:, None, None]
    return (exponentials / total @ value).transpose(1, 2), None


AttentionInterface.register("under_masks", attention_under_masks)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, marks=[] if quick else [pytest.mark.slow, pytest.mark.nightly])
        for number, name in enumerate(["mixtral", "deepseek_v3", "phi3", "smollm3", "gpt_oss", "gemma2"])
        for at, spec in enumerate(POLICIES)
        for quick in [at % 6 == number]
    ],
)
def test_what_is_dropped_is_as_if_it_were_masked(name, spec):
    dense = {"first_k_dense_replace": 3} if name == "deepseek_v3" else {}  # its router computes in float32
    model, plain = (shaped(name, **dense).double() for _ in range(2))
    plain.set_attn_implementation("under_masks")
    for one in (model, plain):
        one.set_experts_implementation("eager")  # the other way knows no float64
    bound, options = of_logits(model), dict(POLICIES[spec])
    if spec.startswith("gates"):
        ag.attach(model, gates_for(model, kind="linear", scope="causal"))
    policy = ag.policy(spec, None if spec == "full" else 12, **options)
    result = run(model, policy, ROWS, PROMPTS)
    dropped = 0
    for b, row in enumerate(ROWS):
        SEEN.update({layer: result.visible(layer, b, len(row)) for layer in range(3)})
        dropped += sum(int((~seen).sum()) for seen in SEEN.values()) - 3 * len(SEEN[0]) * len(row) * (len(row) - 1) // 2
        with torch.no_grad():
            wanted = plain(row[None], use_cache=False).logits[0]
        hold(result.logits[b], wanted, bound)
    assert (dropped > 0) == (spec != "full")


@pytest.mark.parametrize(
    ("name", "spec", "options", "parts"),
    [
        ("deepseek_v3", "expected_attention", {}, ["DeepseekV3Model", "8", "24", "Use another policy"]),
        ("smollm3", "h2o", {"positions": "slot"}, ["SmolLM3Model", "layer 2", "positions=original"]),
    ],
)
def test_refused_before_the_first_forward_pass(name, spec, options, parts):
    model = shaped(name)
    with refuses(UnsupportedModelError, *parts) as caught:
        ag.EvictionCache(model, spec, 12, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_without_eviction_it_is_the_models_own_attention(name):
    """Eager attention of transformers, beside a cache that is fed in one pass, in several, and token by token."""
    model, plain, row = shaped(name), shaped(name), ROWS[0][None].repeat(1, 2)[:, :40]
    plain.set_attn_implementation("eager")
    cache, found = ag.EvictionCache(model, "h2o", 64), []
    with torch.no_grad():
        for part in row.split([30, 1, 1, 8], 1):
            found.append(model(part, past_key_values=cache).logits)
        wanted = plain(row, use_cache=False).logits
    for one in (model, plain):
        one.set_experts_implementation("eager")
    hold(torch.cat(found, 1), wanted, of_logits(plain))


def test_a_layer_that_attends_twice():
    model = shaped("diffllama")
    with refuses(UnsupportedModelError, "DiffLlamaAttention", "twice", "layer 0", "Qwen3"), torch.no_grad():
        model(ROWS[0][None], past_key_values=ag.EvictionCache(model, "full"))


def test_layers_that_hold_something_else(tiny_llama):
    model = tiny_llama()
    model.config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    with refuses(UnsupportedModelError, "LlamaModel", "layer 1", "indexed_attention", "full_attention"):
        ag.EvictionCache(model, "full")
    model.config.layer_types = None
    model.model.layers[2].self_attn.__class__ = type("Own", (torch.nn.Module,), {})
    with refuses(UnsupportedModelError, "LlamaModel", "layer 2", "Own", "attention interface"):
        ag.EvictionCache(model, "full")


@pytest.mark.parametrize(
    ("spec", "options"), [("h2o+criticalkv", {}), ("kvzip", {"normalize": True}), ("kvzip+criticalkv@heads", {})]
)
def test_a_projection_under_another_name(tiny_llama, spec, options):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.mixed = layer.self_attn.o_proj
        del layer.self_attn.o_proj
    with refuses(ValueError, "LlamaAttention", "o_proj", "wo"):
        ag.EvictionCache(model, spec, 12, **options)
    ag.EvictionCache(model, "kvzip", 12)
