import copy
import threading
import time

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import ag
from ag.model import hooks
from ag.model.rope import changing_length
from tests.support.gates_for import gates_for
from tests.support.memory import storages
from tests.support.refused import refuses

IDS = torch.arange(3, 43)[None].repeat(2, 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attached_model_without_cache_is_untouched_and_detach_restores_it(tiny_llama, implementation):
    model = tiny_llama(attn_implementation=implementation)
    state, hooks = copy.deepcopy(model.state_dict()), [len(m._forward_pre_hooks) for m in model.modules()]
    mask = torch.ones_like(IDS)
    mask[1, :7] = 0
    calls = ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": mask})
    plain = [model(**call).logits for call in calls]
    text = model.generate(IDS, max_new_tokens=5, do_sample=False)
    ag.attach(model, gates_for(model))
    for call, want in zip(calls, plain, strict=True):
        assert torch.equal(model(**call).logits, want)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), text)
    assert model.config._attn_implementation == implementation
    assert model.state_dict().keys() == state.keys()
    ag.detach(model)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(layer.self_attn.config is model.config for layer in model.model.layers)
    for call, want in zip(calls, plain, strict=True):
        assert torch.equal(model(**call).logits, want)
    ag.detach(model)


def test_attaching_twice_and_wrong_gates_are_errors(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model))
    with refuses(ValueError, "ag.detach"):
        ag.attach(model, gates_for(model))
    with refuses(ValueError, "(2, 39)", "(2, 40)"):
        model(IDS, gating=ag.Gating(gates_for(model), torch.ones(2, 39)), use_cache=False)
    ag.detach(model)
    other = gates_for(tiny_llama(num_hidden_layers=2))
    with refuses(ValueError, "num_layers 2", "3"):
        ag.attach(model, other)


@pytest.mark.parametrize(("estimator", "offset"), [("ste", 1), ("soft", 0)])
def test_gradients_are_the_same_under_gradient_checkpointing(tiny_llama, estimator, offset):
    def gradients(checkpointing):
        model = tiny_llama().requires_grad_(False)
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        gates = gates_for(model, estimator=estimator, layer_offset=offset, first_layer=offset).train()
        ag.attach(model, gates)
        torch.manual_seed(7)
        gating = ag.Gating(gates, torch.ones_like(IDS), torch.tensor([30, 25]))
        logits = model(IDS, gating=gating, use_cache=False).logits
        loss = logits[:, 30:].logsumexp(-1).mean() + sum(x.sigmoid().mean() for x in gating.logits.values())
        loss.backward()
        return [p.grad for p in gates.parameters()] + [model.model.layers[0].self_attn.q_proj.weight.grad]

    plain, again = gradients(False), gradients(True)
    assert all(grad is not None and grad.abs().sum() > 0 for grad in plain)
    for got, want in zip(again, plain, strict=True):
        assert torch.equal(got, want)


def test_gradient_checkpointing_holds_nothing_of_the_second_run(tiny_llama):
    """What gates compute again for the backward pass of their layer is freed with it."""

    def held(checkpointing):
        model = tiny_llama(num_hidden_layers=4).requires_grad_(False).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        gates = gates_for(model).train()
        ag.attach(model, gates)
        before = storages()
        gating = ag.Gating(gates, torch.ones_like(IDS))
        model(IDS, gating=gating, use_cache=False).logits.sum().backward()
        assert len(gating.logits) == 4
        return sum(size for at, size in storages().items() if at not in before)

    embedded = 2 * 40 * 64 * 4  # bytes of the input of the first layer
    assert held(True) == held(False) + embedded


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_hooks_of_accelerate_run_with_the_cache_and_survive_detach(tiny_llama, when):
    """They replace the decoder's forward, before or after this library does."""
    model, ids, calls = tiny_llama(), torch.arange(3, 23)[None], []

    class Counting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    for step in ("before", "library", "after"):
        if step == when:
            add_hook_to_module(model.model, Counting())
        elif step == "library":
            cache = ag.EvictionCache(model, "tova", budget=6)
    model(ids, past_key_values=cache)
    assert (len(calls), len(cache.kept_positions(0)[0][0])) == (1, 6)
    ag.detach(model)
    assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    assert len(calls) == 2
    remove_hook_from_module(model.model)
    assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    assert len(calls) == 2


def test_a_copy_of_a_model_stands_on_its_own(tiny_llama):
    model, ids = tiny_llama(), torch.arange(3, 23)[None]
    ag.EvictionCache(model, "full")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        wanted = copied(ids, past_key_values=ag.EvictionCache(copied, "tova", budget=6)).logits
        for parameter in model.parameters():
            parameter.zero_()
        got = copied(ids, past_key_values=ag.EvictionCache(copied, "tova", budget=6)).logits
    assert torch.equal(got, wanted)
    assert bool(got.any())
    ag.detach(copied)
    assert "forward" in vars(model.model)


def test_threads_that_make_the_first_caches_of_a_model(tiny_llama, monkeypatch):
    """One of them installs the hooks, and the others wait for it."""
    model, barrier, found = tiny_llama(), threading.Barrier(3), []

    def pause(decoder):
        time.sleep(0.2)  # for the other threads to come here, if they can
        return changing_length(decoder)

    def make_cache():
        barrier.wait()
        ag.EvictionCache(model, "full")
        found.append(model.model._ag_attachment)

    monkeypatch.setattr(hooks, "changing_length", pause)
    threads = [threading.Thread(target=make_cache) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len({*map(id, found)}) == 1
    assert [len(layer.self_attn._forward_pre_hooks) for layer in model.model.layers] == [1, 1, 1]
