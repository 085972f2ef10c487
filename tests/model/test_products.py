"""Products of few tokens: where they run, and that nothing stays changed when the model is given back."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import DynamicCache
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

import ag
from ag.kernels.linear import MOST_TOKENS, cpu
from ag.kernels.rms_norm import cpu as norm_cpu
from ag.model import products
from tests.support.bounds import hold, of_logits
from tests.support.compiled import forget, needs
from tests.support.gates_for import gates_for

pytestmark = needs(cpu.KERNEL)
IDS = torch.arange(3, 23)[None]


@pytest.fixture
def calls(monkeypatch):
    """The weights that the kernel multiplied."""
    made, kernel = [], cpu.linear
    monkeypatch.setattr(cpu, "linear", lambda x, weight, bias: made.append(weight) or kernel(x, weight, bias))
    forget()
    yield made
    forget()


def linear(model):
    return [layer for layer in model.modules() if type(layer) is torch.nn.Linear]


def step(model, cache, tokens=IDS[:, :1]):
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


def test_every_weight_of_a_step_and_only_then(tiny_llama, calls):
    model = tiny_llama(attention_bias=True).bfloat16()
    cache, plain = ag.EvictionCache(model, "full"), DynamicCache(config=model.config)
    step(model, cache, IDS)
    step(model, plain, IDS)
    assert not calls, "a prompt"
    want = step(model, plain)
    assert not calls, "another cache"
    with torch.no_grad():  # a token may come as an embedding
        got = model(inputs_embeds=model.get_input_embeddings()(IDS[:, :1]), past_key_values=cache).logits
    assert len(calls) == len(linear(model)) == 3 * 7 + 1
    hold(got, want, of_logits(model))
    step(model, plain)
    assert len(calls) == len(linear(model)), "another cache, afterwards"


def test_where_they_do_not_run(tiny_llama, calls, monkeypatch):
    model = tiny_llama().requires_grad_(False)
    cache = ag.EvictionCache(model, "full")
    many = MOST_TOKENS + 1
    step(model, cache, IDS.repeat(many, 1))
    step(model, cache, IDS[:, :1].repeat(many, 1))
    assert not calls, "many sequences"
    cache.reset()
    step(model, cache, IDS)
    model(IDS[:, :1], past_key_values=cache)
    assert not calls, "gradients could be recorded"
    with torch.autocast("cpu", torch.bfloat16):
        mixed = ag.EvictionCache(model, "full")
        step(model, mixed, IDS)
        step(model, mixed)
    assert not calls, "autocast chooses types"
    monkeypatch.setenv("AG_KERNELS", "reference")
    step(model, cache)
    assert not calls, "the reference is asked for"
    monkeypatch.delenv("AG_KERNELS")
    step(model, cache)
    assert calls


def test_nothing_stays_after_an_error_or_detaching(tiny_llama, calls, monkeypatch):
    model = tiny_llama()
    gates = gates_for(model, kind="mlp", covers="all", scope="causal", recent_tokens=4)
    hooks = [len(part._forward_hooks) for part in model.modules()]
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, "gates")
    step(model, cache, IDS)
    step(model, cache)
    assert len(calls) == len(linear(model)) + len(linear(gates)) == 22 + 3 * 2
    with monkeypatch.context() as patch:
        patch.setattr(cache.interceptor, "attend", lambda call: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, cache)
    assert calls, "the first layer's products ran"
    calls.clear()
    step(model, DynamicCache(config=model.config))
    assert not calls, "another cache"
    ag.detach(model)
    assert not any("forward" in vars(layer) for layer in (*model.modules(), *gates.modules()))
    assert [len(part._forward_hooks) for part in model.modules()] == hooks


def test_layers_that_a_library_runs_in_its_own_way_are_left_alone(tiny_llama, calls):
    model = tiny_llama()
    own = linear(model)[0]
    add_hook_to_module(own, ModelHook())
    forward = own.forward
    half = linear(model)[1]
    half.weight = torch.nn.Parameter(half.weight.T.contiguous().T)
    cache = ag.EvictionCache(model, "full")
    step(model, cache, IDS)
    step(model, cache)
    assert len(calls) == len(linear(model)) - 2
    assert own.forward is forward


def test_norms_of_one_token_are_one_operation_each(tiny_llama, monkeypatch):
    """In float32 bit by bit what the model computes; norms of another formula are left alone."""
    model, calls = tiny_llama(), []
    for norm in model.modules():
        if type(norm).__name__ == "LlamaRMSNorm":
            torch.nn.init.normal_(norm.weight)
    cache, plain = ag.EvictionCache(model, "full"), ag.EvictionCache(model, "full")
    one, two = IDS.repeat(2, 1), IDS[:, :1].repeat(2, 1)
    step(model, cache, one)
    step(model, plain, one)
    with monkeypatch.context() as patch:
        patch.setattr(products, "_is_rms_norm", lambda kind: False)
        want = step(model, plain, two)
    ag.detach(model)
    cache = ag.EvictionCache(model, "full")
    step(model, cache, one)
    own = torch.nn.functional.rms_norm

    def counted(*args):
        calls.append(1)
        return own(*args)

    monkeypatch.setattr("torch.nn.functional.rms_norm", counted)
    assert torch.equal(step(model, cache, two), want)
    assert len(calls) == 2 * 3 + 1
    calls.clear()
    assert products._is_rms_norm(MistralRMSNorm) and not products._is_rms_norm(Gemma3RMSNorm)
    names = {}
    exec("class SomeRMSNorm:\n    def forward(self, x): return x", names)  # as in a notebook: no file has its source
    assert not products._is_rms_norm(names["SomeRMSNorm"])


def test_norms_in_bfloat16_run_in_c_plus_plus_in_prompts_and_steps(tiny_llama, monkeypatch):
    model, made, kernel = tiny_llama().bfloat16(), [], norm_cpu.rms_norm
    monkeypatch.setattr(norm_cpu, "rms_norm", lambda x, *rest: made.append(x.shape[1]) or kernel(x, *rest))
    forget()
    cache, plain = ag.EvictionCache(model, "full"), DynamicCache(config=model.config)
    for tokens in (IDS, IDS[:, :1]):
        want = step(model, plain, tokens)
        made.clear()
        got = step(model, cache, tokens)
        assert made == [tokens.shape[1]] * (2 * 3 + 1)
        hold(got, want, of_logits(model))
    monkeypatch.setenv("AG_KERNELS", "reference")
    made.clear()
    step(model, cache)
    assert not made
    forget()
