"""Norms of values behind the output projection, of a plain model and of one with LoRA."""

import peft
import pytest
import torch

from ag.errors import UserError
from ag.model.projection import output_weight, projected_norms
from tests.support.bounds import near, right
from tests.support.refused import refuses


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3"])
def test_the_output_projection_of_a_model(family, request):
    """Also with LoRA beside it, which is merged by hand here."""
    model = request.getfixturevalue(family)()
    attention = model.get_decoder().layers[1].self_attn
    project, v = attention.o_proj.weight.detach().clone(), torch.randn(2, 2, 5, 16)
    got = output_weight(attention, 4)
    assert got.shape == (4, 16, 64)

    def norms(v, project, order):
        by_head = [v[:, h // 2] @ project[:, h * 16 : (h + 1) * 16].T for h in range(4)]
        return [torch.stack(by_head, 1).norm(p=order, dim=-1)]

    for order in (1, 2):
        near(projected_norms(v, got, order), *right(lambda *x, order=order: norms(*x, order), v, project))
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    beside = tuned.get_base_model().get_decoder().layers[1].self_attn.o_proj
    low, high = (part["default"].weight for part in (beside.lora_A, beside.lora_B))
    merged = lambda project, low, high: [(project + beside.scaling["default"] * high @ low).T]  # noqa: E731
    near(output_weight(attention, 4).flatten(0, 1), *right(merged, project, low, high))


def test_a_layer_without_a_known_projection_is_named():
    with refuses(UserError, "Identity", "o_proj", "out_proj"):
        output_weight(torch.nn.Identity(), 4)
