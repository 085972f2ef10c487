"""Gates of a hybrid model by the commands: trained for two steps, exported, read again, and evicting."""

from pathlib import Path

import pytest
import torch
from transformers.cache_utils import Cache

import ag
from ag.config import ModelConfig
from ag.model.base import load_base
from tests.integration.conftest import RECIPE
from tests.model.test_architectures import text, tiny
from tests.support.command import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="hybrid models need transformers 5.23"),
]


@pytest.mark.parametrize("what", ["gates", "gates+lora"])
def test_a_run_of_two_steps(what, tmp_path: Path, tiny_data, tiny_tokenizer) -> None:
    base = tmp_path / "base"
    tiny("qwen3_5_text").save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    recipe = tmp_path / "hybrid.yaml"
    recipe.write_text(RECIPE.format(model=base, data=tiny_data))
    run = train(recipe, tmp_path / "runs", f"train={what}", "trainer.max_steps=2", "lora.targets=[q_proj,v_proj]")
    model = load_base(ModelConfig(name=str(base)), "cpu")[0]
    if what == "gates":
        cache = ag.EvictionCache(model, f"gates:{run / 'export'}", 0.5)
        with torch.no_grad():
            model(text(40, 1)[None], past_key_values=cache)
            assert cache.kept_share() == 0.5
            assert model(text(1, 2)[None], past_key_values=cache).logits.isfinite().all()
    else:
        assert (run / "export" / "adapter").is_dir()
