"""torch.compile and CUDA graphs around a decoding step."""

import pytest
import torch

import ag
from ag.errors import UserError
from ag.kernels.gated_attention import gated_attention
from tests.gpu.cases import DEVICE, FEW, REHEARSAL, arguments, draw, run
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for

pytestmark = pytest.mark.gpu
MODES = [None] if REHEARSAL else ["default", "reduce-overhead"]  # the latter: CUDA graphs of what lies between


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decoded(model, forward, policy, steps=2 if REHEARSAL else 6):
    """The logits of a prompt and of some tokens, one at a time."""
    ids = torch.randint(3, 128, (2, 20 if REHEARSAL else 40), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    cache, logits = ag.EvictionCache(model, *policy), []
    with torch.no_grad():
        logits.append(model(ids, past_key_values=cache).logits[:, -1])
        for t in range(steps):
            logits.append(forward(ids[:, t : t + 1], past_key_values=cache).logits[:, -1].clone())
    return torch.stack(logits), cache.kept_share()


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_model_decodes_as_the_plain_one(tiny_llama, triton_only, fresh, mode):
    """The engine stays outside of what is compiled, and of what is captured."""
    model = tiny_llama(**{"num_hidden_layers": 2} | FEW).to(DEVICE)
    ag.attach(model, gates_for(model))
    compiled = torch.compile(model, backend="eager") if mode is None else torch.compile(model, mode=mode)
    others = [] if REHEARSAL else [("snapkv@heads", 0.5, "prefill")]
    for policy in [("gates",), *others]:
        given = policy if policy[0] == "gates" else (ag.policy(*policy, window=8),)
        want, share = decoded(model, model, given)
        got, compiled_share = decoded(model, compiled, given)
        assert share == compiled_share < 1
        hold(got, want, of_logits(model), policy[0])


def test_capturing_a_step_is_refused(tiny_llama, triton_only, monkeypatch):
    """A replayed graph would store every token in the slot of the captured one."""
    model = tiny_llama(num_hidden_layers=1).to(DEVICE)
    ids, cache = torch.full((1, 20), 5, device=DEVICE), ag.EvictionCache(model, "full")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        if REHEARSAL:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(UserError, match="CUDA graph"):
                model(ids[:, :1], past_key_values=cache)
        else:
            with pytest.raises(UserError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(ids[:, :1], past_key_values=cache)
    assert cache.seen_tokens == 20


def test_compiled_attention_and_its_gradients(triton_only, fresh):
    tensors, keep, options = arguments(length=33, group=4, dim=64, dtype=torch.float32, recent=3)
    compiled = torch.compile(gated_attention, backend="eager" if REHEARSAL else "inductor")
    weight = draw(*tensors[0].shape)
    want = run(gated_attention, [*tensors, keep], weight, options)
    got = run(compiled, [*tensors, keep], weight, options)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
