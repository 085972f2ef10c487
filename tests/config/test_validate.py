"""Combinations of keys that make no sense, and their neighbours that do."""

from typing import Any

import pytest
from schemas import fit

from ag.config import Config

DOCUMENTS = "data.kind=text data.name=c data.packing=packed data.cross_documents=false"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("train=lora loss.objective=regress", "there are no gates to train; use loss.objective=lm"),
        ("train=lora loss.objective=kl", "there are no gates to train; use loss.objective=lm"),
        ("train=lora warmup.regress_steps=5", "there are no gates to warm up"),
        ("loss.objective=regress", "use train=gates"),
        ("train=gates loss.objective=regress warmup.regress_steps=1", "every step is one"),
        ("trainer.max_steps=0", "nothing is trained"),
        ("warmup.regress_steps=11 trainer.max_steps=10", "raise trainer.max_steps"),
        ("optim.warmup_steps=11 trainer.max_steps=10", "lower optim.warmup_steps"),
        ("lora.targets=[]", "name linear layers, or use train=gates"),
        ("export.merge=true train=gates", "there is no adapter to merge"),
        ("export.merge=true model.quantization=nf4", "too coarse"),
        ("trainer.strategy=fsdp2 model.quantization=nf4", "silently corrupted"),
        ("export.push_to_hub=me/gates train=lora", "only gates are uploaded"),
        ("data.cache=kept", "only plain text that is read before training is kept"),
        ("data.name=piqa", "use data.kind=sft"),
        ("data.kind=sft", "name a dataset with data.name"),
        ("data.kind=sft data.name=bolq", "did you mean boolq?"),
        ("data.root=x", "that data is generated"),
        ("data.packing=packed", "only plain text is packed"),
        ("data.kind=text data.name=c data.packing=packed gate.scope=prompt", "use gate.scope=causal"),
        ("data.kind=text data.name=c data.packing=packed gate.prefill=dense", "use gate.prefill=sparse"),
        ("data.cross_documents=false", "only packed rows hold several documents"),
        ("data.kind=text data.name=c data.cross_documents=false", "use data.packing=packed"),
        (f"{DOCUMENTS} train=gates loss.objective=regress", "use data.cross_documents=true"),
        (f"{DOCUMENTS} warmup.regress_steps=5", "regression does not know where documents end"),
        ("data.streaming=true", "only plain text streams"),
        ("data.kind=text data.name=c data.streaming=true", "give trainer.max_steps"),
        ("data.prompt_min=600", "swap them"),
        ("data.max_length=511", "less than the longest row of 512 tokens"),
        ("data.kind=text data.name=c data.max_length=575", "less than the longest row of 576 tokens"),
        ("model.dtype=bfloat16 trainer.precision=16-mixed", "use trainer.precision=bf16-mixed"),
        ("model.dtype=float16 trainer.precision=bf16-mixed", "use trainer.precision=16-mixed"),
        ("model.quantization=nf4 trainer.precision=bf16-mixed", "use model.dtype=bfloat16"),
        ("trainer.accelerator=cpu trainer.precision=16-mixed", "float16 needs a GPU"),
        (
            "trainer.accelerator=cpu model.attn_implementation=flash_attention_2 model.dtype=bfloat16",
            "use sdpa",
        ),
        ("model.attn_implementation=flash_attention_2", "use model.dtype=bfloat16"),
    ],
)
def test_combinations_that_make_no_sense(error: Any, argv: str, expected: str) -> None:
    assert expected in error(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "data.kind=text data.name=c data.packing=packed gate.scope=prompt train=lora",
        f"{DOCUMENTS} loss.objective=kl",
        f"{DOCUMENTS} train=lora",
        "data.kind=text data.name=c data.max_length=576",
        "data.kind=text data.name=c data.streaming=true trainer.max_steps=1",
        "warmup.regress_steps=10 optim.warmup_steps=10 trainer.max_steps=10",
        "model.quantization=nf4 trainer.precision=bf16-mixed model.dtype=bfloat16",
        "train=gates lora.targets=[]",
        "gate.layer_offset=1 gate.first_layer=1",
    ],
)
def test_their_neighbours_do(argv: str) -> None:
    assert isinstance(fit(*argv.split()), Config)


@pytest.mark.parametrize(
    ("argv", "warned"),
    [
        ("loss.beta=0.51", True),
        ("loss.beta=0.5", False),
        ("loss.beta=0.51 loss.mean=hard", False),
        ("loss.beta=0.51 train=lora", False),
        ("loss.beta=0.51 loss.alpha=0", False),
    ],
)
def test_a_target_above_the_threshold_is_a_warning(capsys: Any, argv: str, warned: bool) -> None:
    fit(*argv.split())
    err = capsys.readouterr().err
    assert err.startswith("ag.fit: warning: loss.beta=0.51 is above gate.threshold=0.5") == warned
    assert err.count("\n") == warned
