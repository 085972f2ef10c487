"""Steps on a card: what is recorded as a CUDA graph and replayed is what the model computes."""

import copy

import pytest
import torch

import ag
from ag.engine.block_pool import BLOCK
from ag.engine.step_runner import StepRunner, cuda_graph
from tests.gpu.cases import DEVICE, FEW, REHEARSAL
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for

pytestmark = pytest.mark.gpu
PROMPT, NEW = (30, 2) if REHEARSAL else (40, 2 * BLOCK)
POLICIES = {
    "full": (("full",), None),
    "h2o": (("h2o", 24, "every"), None),
    "tova@heads": (("tova@heads", 24, "every"), None),
    "streaming_llm": (("streaming_llm", 24, "every"), None),
    "gates": (("flags",), {"covers": "all", "kind": "mlp", "scope": "causal"}),
    "gates that look back": (("flags",), {"covers": "all", "window": 8, "scope": "causal"}),
}


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_computes_what_the_model_does(tiny_llama, triton_only, policy, batch):
    given, gates = POLICIES[policy]
    model, recorded = tiny_llama(**FEW).to(DEVICE), []
    if gates is not None:
        ag.attach(model, gates_for(model, recent_tokens=4, **gates).to(DEVICE))
    cache = ag.EvictionCache(model, *given)
    make, bound = torch.Generator().manual_seed(batch), of_logits(model)
    ids = torch.randint(3, 128, (batch, PROMPT + NEW), generator=make).to(DEVICE)
    model(ids[:, :PROMPT], past_key_values=cache)
    plain = copy.deepcopy(cache)

    def record(run):
        recorded.append(1)
        return cuda_graph(run, model.device)

    mine = StepRunner(model, cache, None if REHEARSAL else record)
    for t in range(PROMPT, ids.shape[1]):
        want = model(ids[:, t : t + 1], past_key_values=plain).logits[:, -1]
        hold(mine(ids[:, t : t + 1]), want, bound, "logits")
    assert cache.kept_positions(-1)[0][0].tolist() == plain.kept_positions(-1)[0][0].tolist()
    assert REHEARSAL or bool(recorded) == (policy != "tova@heads")  # which asks the card how many tokens stayed
