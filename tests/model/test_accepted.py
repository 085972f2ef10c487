"""A model that an eviction cache accepts runs under it and has its own logits; others are refused in words."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ag
from ag.errors import UserError
from tests.model.test_architectures import ARCHITECTURES, SMALL, SUMS, text

TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in ARCHITECTURES]  # those have a test each
LARGEST, LENGTH = 3_000_000, 24


def tiny(name: str) -> Any:
    """A random model of a type, or None where its configuration cannot be told to be small."""
    kind = type(AutoConfig.for_model(name))
    known = {word for base in kind.__mro__ for word in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(kind.__init__).parameters)
    config = kind(**{word: value for word, value in SMALL.items() if word in known})
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        return None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def outcome(name: str) -> str:
    """What came of a type: ``untried`` where the model does not run by itself, ``refused``, ``served`` or ``wrong``."""
    ids = text(LENGTH, 4)[None]
    try:
        model = tiny(name)
        if model is None:
            return "untried"
        own = model(ids, use_cache=False).logits
        more = model.double()(ids, use_cache=False).logits
        model.float()
    except Exception:  # of transformers, whatever it is
        return "untried"
    bound = SUMS * float((own - more).abs().max())
    try:
        cache = ag.EvictionCache(model, "full")
        got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([LENGTH - 3, 2, 1], 1)], 1)
        evicting = ag.EvictionCache(model, "h2o", 0.5)
        model.generate(ids, past_key_values=evicting, max_new_tokens=2, do_sample=False)
    except UserError:
        return "refused"
    return "served" if float((got - own).abs().max()) <= bound else "wrong"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_type_of_transformers_is_served_right_or_refused() -> None:
    found: dict[str, str] = {}
    for name in TYPES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = outcome(name)
            except Exception as error:  # every one is named at the end
                found[name] = f"{type(error).__name__}: {error}"[:200]
    strange = {name: said for name, said in found.items() if said not in ("untried", "refused", "served")}
    assert strange == {}
    assert sum(said != "untried" for said in found.values()) >= 30


@pytest.mark.parametrize("name", ["gemma3", "paligemma", "gemma4_text", "gemma3n_text"])
def test_what_cannot_be_served_is_refused_before_the_first_pass(name: str) -> None:
    """Masks made for images beside text, heads whose sizes differ by layer, and keys taken from other layers."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {**{key: value for key, value in SMALL.items() if "expert" not in key}, "layer_types": kinds}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    given: dict[str, Any] = {
        "gemma3": {"text_config": sizes, "vision_config": vision},
        "paligemma": {
            "text_config": sizes | {"model_type": "gemma2"},
            "vision_config": vision | {"projection_dim": 32},
            "projection_dim": 32,
        },
        "gemma4_text": sizes | {"global_head_dim": 16, "num_kv_shared_layers": 0} | per_layer,
        "gemma3n_text": sizes
        | per_layer
        | {"num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
        | {"num_hidden_layers": 4, "layer_types": kinds * 2},
    }[name]
    config = type(AutoConfig.for_model(name))(**given)
    if name == "paligemma":
        from transformers import PaliGemmaForConditionalGeneration

        model: Any = PaliGemmaForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="masks|heads of 16|another layer"):
        ag.EvictionCache(model, "full")
    if name == "gemma4_text":
        with pytest.raises(UserError, match="differ in size"):
            ag.AttentionGates(model.config, ag.GateConfig())
