"""A training step on a card: gradients of gates against plain PyTorch, whole runs that resume."""

import pytest
import torch

import ag
from tests.gpu.cases import DEVICE, here
from tests.gpu.runs import check_losses, continued, train, weights
from tests.support.bounds import hold, of_float32
from tests.support.gates_for import gates_for

pytestmark = pytest.mark.gpu


def gradients(model, gates, ids, valid, first):
    gating = ag.Gating(gates, valid, first=first)
    logits = model(ids, gating=gating, use_cache=False).logits
    loss = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).mean()
    gates.zero_grad()
    (loss + sum(gates.probability(x).mean() for x in gating.logits.values())).backward()
    return {name: parameter.grad.clone() for name, parameter in gates.named_parameters()}


@pytest.mark.parametrize("case", ["plain", "padding", "documents"])
def test_gradients_of_gates_are_those_of_the_formula(tiny_llama, triton_only, monkeypatch, case):
    length = here(127)
    model = tiny_llama(num_hidden_layers=2).to(DEVICE)
    gates = gates_for(model, scope="causal", recent_tokens=3)
    ag.attach(model, gates)
    ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    valid = torch.ones_like(ids)
    if case == "padding":
        valid[1, : length // 3] = 0
    rows = torch.arange(length, device=DEVICE).expand(2, -1)
    first = (rows >= length // 2).long() * (length // 2) if case == "documents" else None
    got = gradients(model, gates, ids, valid, first)
    monkeypatch.setenv("AG_KERNELS", "reference")
    plain = gradients(model, gates, ids, valid, first)
    want = gradients(model.double(), gates.double(), ids, valid, first)
    assert len(got) > 4
    for name, mine in got.items():
        hold(mine, want[name], of_float32(plain[name], want[name]), name)
        assert float(want[name].abs().sum()) > 0


def test_a_run_resumes_where_it_was(recipe, tmp_path):
    """Gates and LoRA, gradient checkpointing, packed rows; in bfloat16 on a card."""
    run = train(recipe, tmp_path, "trainer.deterministic=true")
    check_losses(run)
    again = continued(run, tmp_path / "again")
    torch.testing.assert_close(weights(again), weights(run), rtol=0, atol=0)
    assert (run / "export" / "gates.safetensors").is_file() or any((run / "export").glob("*.safetensors"))


def test_documents_apart(recipe, tmp_path):
    check_losses(train(recipe, tmp_path, "data.cross_documents=false"))
