"""Models for images beside text: the tokens of an image are tokens of the prompt, and may be evicted."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.cache_utils import Cache

from ag import EvictionCache
from ag.errors import UserError
from tests.support.refused import refuses

IMAGE = 100
TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN = {"hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
QWEN |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0]}
CONFIGS = {
    "smolvlm": {
        **{"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
        **{"scale_factor": 2, "image_token_id": IMAGE},
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        **{"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_id": IMAGE},
    },
    "qwen3_vl": {
        **{"text_config": TEXT | {"rope_parameters": ROPE}, "image_token_id": IMAGE, "vision_start_token_id": 101},
        **{"vision_config": QWEN | {"num_position_embeddings": 64}, "vision_end_token_id": 102, "video_token_id": 103},
    },
}
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=CONFIGS, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(type(AutoConfig.for_model(name))(**CONFIGS[name])).eval()


def prompt(name, before=10):
    """A row of ids with an image of four tokens, and what a processor gives beside them."""
    image = torch.full((4,), IMAGE)
    if name == "qwen3_vl":
        image = torch.cat([torch.tensor([101]), image, torch.tensor([102])])
    ids = torch.cat([torch.arange(10, 10 + before), image, torch.arange(30, 45)])[None]
    draw, kind = torch.Generator().manual_seed(1), (ids == IMAGE).long()
    if name == "qwen3_vl":
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=draw)
        return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": kind}
    if name == "gemma3":
        return ids, {"pixel_values": torch.randn(1, 3, 32, 32, generator=draw), "token_type_ids": kind}
    return ids, {"pixel_values": torch.randn(1, 1, 3, 32, 32, generator=draw)}


@torch.no_grad()
def test_full_is_the_model(model, name):
    """To the bit: both attend by the same function, under the same mask, to the same keys."""
    ids, beside = prompt(name)
    cache = EvictionCache(model, "full")
    assert torch.equal(model(ids, past_key_values=cache, **beside).logits, model(ids, **beside).logits)
    got = model.generate(ids, past_key_values=EvictionCache(model, "full"), **beside, **GREEDY)
    assert torch.equal(got, model.generate(ids, **beside, **GREEDY))


@torch.no_grad()
def test_tokens_of_an_image_go_unless_they_are_protected(model, name):
    ids, beside = prompt(name)
    image = ids == IMAGE
    first, last = (int(x) for x in image[0].nonzero()[[0, -1], 0])
    shares = []
    for spans in ([], [(first, last + 1)]):
        cache = EvictionCache(model, "streaming_llm", 0.4)
        if spans:
            cache.protect(spans)
        model(ids, past_key_values=cache, **beside)
        model(torch.tensor([[7]]), past_key_values=cache)
        shares.append(cache.report({"image": image, "text": ~image}).kinds)
    assert shares[0]["image"] < 0.6 and shares[1]["image"] == 1.0 and shares[1]["text"] < shares[0]["text"]
    assert "100.0% of image held" in str(cache.report({"image": image.long()}))
    with refuses(UserError, "report: image (1, 99)", "expected columns of the text"):
        cache.report({"image": torch.ones(1, 99, dtype=torch.bool)})


@pytest.mark.parametrize("name", ["gemma3"], scope="module")
@torch.no_grad()
def test_tokens_of_an_image_that_see_later_ones(model, name):
    """The mask of Gemma 3 acts on a whole prompt, in a padded batch too; a prompt in parts is refused."""
    ids, beside = prompt(name)
    causal = model(ids, pixel_values=beside["pixel_values"], token_type_ids=torch.zeros_like(ids)).logits
    assert not torch.allclose(model(ids, **beside).logits, causal)
    both = torch.cat([torch.nn.functional.pad(ids, (5, 0)), prompt(name, 15)[0]])
    mask = torch.ones_like(both)
    mask[0, :5] = 0
    given = {"pixel_values": beside["pixel_values"].repeat(2, 1, 1, 1), "token_type_ids": (both == IMAGE).long()}
    given |= {"attention_mask": mask, **GREEDY}
    got = model.generate(both, past_key_values=EvictionCache(model, "full"), **given)
    assert torch.equal(got, model.generate(both, **given))
    refused = [(EvictionCache(model, "h2o", 8, "blocks:12"), {})]
    if hasattr(Cache, "get_conv_state"):  # older transformers make causal masks for the parts of a prompt
        refused.append((EvictionCache(model, "full"), {"prefill_chunk_size": 12}))
    for cache, more in refused:
        with refuses(UserError, "Gemma3TextModel", "see later ones", "one pass"):
            model.generate(ids, past_key_values=cache, **beside, **GREEDY, **more)
