"""Models whose tokens have several positions (Qwen2.5-VL): served by those that come, else refused."""

import pytest
import torch
from transformers import DynamicCache, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import ag
from ag.errors import UserError
from tests.support.batches import row
from tests.support.bounds import hold, of_pass
from tests.support.refused import refuses

TEXT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
VISION |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0]}
IDS = torch.stack([row(20, 1), row(20, 2)])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tokens = {name: 120 + i for i, name in enumerate(("image_token_id", "video_token_id", "vision_start_token_id"))}
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, vision_end_token_id=123, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def positions():
    """Those of a text with an image of 3 by 4 in the middle, ``[3, 2, 20]``, and of the next token."""
    places = torch.arange(20).repeat(3, 1)
    places[0, 5:17], places[1, 5:17], places[2, 5:17] = 5, 5 + torch.arange(12) // 4, 5 + torch.arange(12) % 4
    places[:, 17:] = 9 + torch.arange(3)
    return places[:, None].expand(-1, 2, -1), torch.full((3, 2, 1), 12)


@pytest.mark.parametrize("told", [{"spec": "full"}, {"spec": "h2o", "budget": 1.0, "schedule": "blocks:6"}], ids=str)
@pytest.mark.parametrize("padding", [0, 7])
@torch.no_grad()
def test_the_positions_that_come_are_used(model, told, padding):
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, :padding] = 0
    places, after = positions()

    def read(cache):
        given = {"position_ids": places, "attention_mask": mask[:, :20], "past_key_values": cache}
        out = (
            model(IDS, **given).logits,
            model(IDS[:, :1], position_ids=after, attention_mask=mask, past_key_values=cache),
        )
        return torch.cat([out[0], out[1].logits], 1)[mask.bool()]

    got = read(ag.EvictionCache(model, **told))
    hold(got, read(DynamicCache(config=model.config)), of_pass(model, lambda: read(DynamicCache(config=model.config))))


@torch.no_grad()
def test_what_takes_lengths_for_positions_is_refused(model):
    for spec, told in (("streaming_llm", {"positions": "slot"}), ("expected_attention", {}), ("kvzip", {})):
        with refuses(UserError, "positions", "Qwen2_5_VLTextModel"):
            ag.EvictionCache(model, spec, 8, **told)
    pool = ag.Pool(model, 2**20)
    one, other = (ag.EvictionCache(model, "full", pool=pool) for _ in range(2))
    for cache in (one, other):
        model(IDS, position_ids=positions()[0], past_key_values=cache)
    with refuses(UserError, "add", "positions"):
        one.add(other)
    with refuses(UserError, "crop([1, 0])", "positions"):
        one.crop([1, 0])
    with refuses(UserError, "StepRunner", "positions"):
        ag.StepRunner(model, one)(IDS[:, :1])
    assert one.valid.shape == other.valid.shape == (2, 20)
    one.crop(-3)
    assert one.seen_tokens == 17
