"""Norms of values behind the output projection, of a plain model and of one with LoRA."""

import peft
import pytest
import torch
from refused import refuses

from ag.errors import UserError
from ag.model.projection import output_weight, projected_norms


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3"])
def test_the_output_projection_of_a_model(family, request):
    """Also with LoRA beside it, which is merged by hand here."""
    model = request.getfixturevalue(family)()
    attention = model.get_decoder().layers[1].self_attn
    project = attention.o_proj.weight.detach().double().clone()
    got = output_weight(attention, 4)
    assert got.shape == (4, 16, 64)
    v = torch.randn(2, 2, 5, 16)
    for order in (1, 2):
        norms = projected_norms(v, got, order)
        for h in range(4):
            wanted = v[:, h // 2].double() @ project[:, h * 16 : (h + 1) * 16].T
            torch.testing.assert_close(norms[:, h].double(), wanted.norm(p=order, dim=-1), rtol=1e-5, atol=1e-6)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    beside = tuned.get_base_model().get_decoder().layers[1].self_attn.o_proj
    low, high = beside.lora_A["default"].weight.double(), beside.lora_B["default"].weight.double()
    merged = (project + beside.scaling["default"] * high @ low).T.unflatten(0, (4, 16))
    torch.testing.assert_close(output_weight(attention, 4).double(), merged.detach(), rtol=1e-5, atol=1e-5)


def test_a_layer_without_a_known_projection_is_named():
    with refuses(UserError, "Identity", "o_proj", "out_proj"):
        output_weight(torch.nn.Identity(), 4)
