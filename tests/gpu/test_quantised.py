"""A base in NF4: forward, backward and resuming on bitsandbytes."""

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import ag
from tests.gpu.cases import DEVICE, FEW
from tests.gpu.runs import check_losses, continued, train, weights
from tests.support.bounds import hold, of_float32, of_logits
from tests.support.gates_for import gates_for

pytestmark = pytest.mark.gpu
pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


@pytest.fixture
def model(tiny_llama, tmp_path):
    """A tiny Llama in 4 bits that computes in float32."""
    tiny_llama(**FEW).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    return LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, device_map={"": DEVICE}).eval()


def dequantised(model, tiny_llama):
    """The same model with the weights that its 4 bits stand for."""
    import bitsandbytes as bnb

    plain = tiny_llama(**FEW).to(DEVICE)
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            exact = bnb.functional.dequantize_4bit(module.weight, module.weight.quant_state)
            plain.get_submodule(name).weight.data.copy_(exact)
    return plain


def test_forward_and_backward(model, tiny_llama):
    """Logits, and the gradients that reach the gates through 4-bit layers, are those of the dequantised weights."""
    ids = torch.randint(3, 128, (2, 33), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    results = []
    for one in (model, dequantised(model, tiny_llama), dequantised(model, tiny_llama).double()):
        gates = gates_for(one, scope="causal").to(next(one.parameters()).dtype if results else torch.float32)
        ag.attach(one, gates)
        gating = ag.Gating(gates, torch.ones_like(ids))
        logits = one(ids, gating=gating, use_cache=False).logits
        logits.log_softmax(-1).gather(2, ids[:, :, None]).mean().backward()
        results.append((logits.detach(), {name: p.grad for name, p in gates.named_parameters()}))
    (logits, grads), (plain, plain_grads), (want, want_grads) = results
    hold(logits, want, of_float32(plain, want), "logits")
    for name, grad in grads.items():
        hold(grad, want_grads[name], of_float32(plain_grads[name], want_grads[name]), name)
        assert float(grad.abs().sum()) > 0


def test_a_prompt_under_gates_and_what_follows(model, tiny_llama):
    """Evicting and masking agree."""
    gates = gates_for(model, recent_tokens=2, prefill="sparse", scope="prompt")
    ag.attach(model, gates)
    ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    cache = ag.EvictionCache(model, "gates")
    with torch.no_grad():
        served = [model(ids[:, :30], past_key_values=cache).logits[0, -1:]]
        served += [model(ids[:, t : t + 1], past_key_values=cache).logits[0] for t in range(30, 40)]
        gating = ag.Gating(gates, torch.ones_like(ids), torch.tensor([30], device=DEVICE), hard=True)
        masked = model(ids, gating=gating, use_cache=False).logits[0, 29:]
    assert 0.2 < cache.kept_share() < 0.95
    hold(torch.cat(served), masked, of_logits(dequantised(model, tiny_llama)), "logits")


def test_a_run_resumes(recipe, tmp_path):
    """LoRA and gates on a 4-bit base, gradient checkpointing, 4 steps; then again from the second."""
    run = train(recipe, tmp_path, "model.quantization=nf4", "trainer.deterministic=true")
    check_losses(run)
    again = continued(run, tmp_path / "again")
    torch.testing.assert_close(weights(again), weights(run), rtol=0, atol=0)
