"""Combinations of keys that make no sense, and their neighbours that do."""

from typing import Any

import pytest

from ag.commands.fit import main
from ag.config import Config
from tests.support.refused import names
from tests.support.schemas import fit

TEXT = "data.kind=text data.name=c"
PACKED, REPEATED = (f"{TEXT} data.packing={how}" for how in ("packed", "repeated"))
#: Keys that make sense by themselves; those that clash, which the error names, -> and what else it names, as the fix.
CLASHES = f"""
loss.objective=regress; train=lora -> loss.objective=lm
loss.objective=kl; train=lora -> loss.objective=lm
train=lora warmup.regress_steps=5
loss.objective=regress -> train=gates+lora
train=gates; loss.objective=regress warmup.regress_steps=1
trainer.max_steps=0 -> -1
warmup.regress_steps=11 trainer.max_steps=10
optim.warmup_steps=11 trainer.max_steps=10
loss.anneal_steps=11 trainer.max_steps=10 -> warmup.regress_steps=0
trainer.max_steps=10; loss.anneal_steps=8 warmup.regress_steps=3
train=gates; loss.objective=regress loss.anneal_steps=5
loss.share_high=0.05 -> loss.share_low=0.1
loss.share_low=0.2 -> loss.share_high
loss.share_high=0.5 train=lora -> loss.share_high=0
train=gates; loss.share_high=0.5 loss.objective=regress
loss.share_high=0.5 loss.anneal_steps=3 -> loss.beta
{PACKED} warmup.regress_steps=5; warmup.target=kvzip -> data.packing=packed data.packing=repeated
{REPEATED} warmup.regress_steps=5; warmup.target=reread -> data.packing=repeated data.packing=packed
lora.targets=[] -> train=gates
export.merge=true train=gates -> export.merge=false
export.merge=true model.quantization=nf4 -> export.merge=false
trainer.strategy=fsdp2 model.quantization=nf4 -> trainer.strategy=ddp
trainer.accelerator=gpu; trainer.strategy=fsdp2 trainer.precision=16-mixed -> bf16-mixed
trainer.strategy=fsdp2 export.merge=true -> export.merge=false
export.push_to_hub=me/gates; train=lora -> export.push_to_hub
data.cache=kept -> data.kind=facts data.streaming=false
data.name=piqa -> data.kind=facts data.kind=sft
data.kind=sft -> data.name=facts data.kind=facts
data.eos=true -> data.kind=facts data.kind=sft
data.name=c; data.kind=text data.question=after
{TEXT}; data.copy_max=64 -> data.packing=repeated
data.root=x -> data.kind=facts data.kind=sft
data.name=worked; data.kind=worked data.root=x
data.kind=worked data.name=worked; data.solution_min=500 -> data.solution_max
data.kind=worked data.name=sorting data.solution_max=1024;  -> data.solution_max data.max_length
data.packing=packed -> data.kind=facts data.packing=split
{PACKED}; gate.scope=prompt -> data.packing=packed gate.scope=causal
{PACKED}; gate.prefill=dense -> data.packing=packed gate.prefill=sparse
data.packing=repeated -> data.kind=facts data.packing=split
{REPEATED}; gate.scope=prompt -> data.packing=repeated gate.scope=causal
{REPEATED}; data.cross_documents=false -> data.packing=repeated data.packing=packed
data.cross_documents=false -> data.packing=split data.packing=packed
{TEXT}; data.cross_documents=false -> data.packing=split data.packing=packed
{PACKED} train=gates; data.cross_documents=false loss.objective=regress -> data.cross_documents=true
{PACKED}; data.cross_documents=false warmup.regress_steps=5 -> data.cross_documents=true
data.streaming=true -> data.kind=facts data.streaming=false
{TEXT}; data.streaming=true -> trainer.max_steps=-1
data.prompt_min=600 -> data.prompt_max=512
data.max_length=511 -> 512 data.prompt_max
{TEXT}; data.max_length=575 -> 576 data.prompt_max
model.dtype=bfloat16 trainer.precision=16-mixed -> trainer.precision=bf16-mixed
model.dtype=float16 trainer.precision=bf16-mixed -> trainer.precision=16-mixed
model.quantization=nf4 trainer.precision=bf16-mixed -> model.dtype=float32 model.dtype=bfloat16
trainer.accelerator=cpu trainer.precision=16-mixed -> bf16-mixed
model.dtype=bfloat16; trainer.accelerator=cpu model.attn_implementation=flash_attention_2 -> sdpa
model.attn_implementation=flash_attention_2 -> model.dtype=float32 model.dtype=bfloat16
"""
NEIGHBOURS = f"""
{PACKED} gate.scope=prompt train=lora
{PACKED} data.cross_documents=false loss.objective=kl
{PACKED} data.cross_documents=false train=lora
{TEXT} data.max_length=576
{TEXT} data.streaming=true trainer.max_steps=1
warmup.regress_steps=10 optim.warmup_steps=10 trainer.max_steps=10
model.quantization=nf4 trainer.precision=bf16-mixed model.dtype=bfloat16
train=gates lora.targets=[]
loss.anneal_steps=7 warmup.regress_steps=3 trainer.max_steps=10
train=lora loss.anneal_steps=11 trainer.max_steps=10
loss.anneal_steps=7
data.kind=worked data.name=sorting data.solution_min=400 data.solution_max=400
gate.layer_offset=1 gate.first_layer=1
loss.share_high=0.1
loss.share_low=0.3 loss.share_high=1 warmup.regress_steps=3
{REPEATED} gate.prefill=dense warmup.target=kvzip
{PACKED} warmup.target=reread warmup.regress_steps=5
{REPEATED} gate.covers=all loss.share_high=0.7
"""


def lines(table: str) -> list[str]:
    return table.strip().splitlines()


@pytest.mark.parametrize("clash", lines(CLASHES))
def test_combinations_that_make_no_sense(error: Any, clash: str) -> None:
    first, _, also = clash.partition(" -> ")
    others, _, keys = first.rpartition("; ")
    names(error(*others.split(), *keys.split()), *keys.split(), *also.split())


@pytest.mark.parametrize("given", lines(NEIGHBOURS))
def test_their_neighbours_do(given: str) -> None:
    assert isinstance(fit(*given.split()), Config)


@pytest.mark.parametrize(
    ("argv", "warned"),
    [
        ("loss.beta=0.51", True),
        ("loss.beta=0.5", False),
        ("loss.beta=0.51 loss.mean=hard", False),
        ("loss.beta=0.51 train=lora", False),
        ("loss.beta=0.51 loss.alpha=0", False),
        ("loss.beta=0.51 loss.share_high=0.5", False),
    ],
)
def test_a_target_above_the_threshold_is_a_warning(capsys: Any, argv: str, warned: bool) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*argv.split(), "--print"])
    err = capsys.readouterr().err
    assert err.startswith("ag.fit: warning: loss.beta=0.51 is above gate.threshold=0.5") == warned
    assert err.count("\n") == warned
