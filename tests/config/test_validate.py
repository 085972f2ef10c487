"""Combinations of keys that make no sense, and their neighbours that do."""

import pytest

from ag.commands.fit import main
from ag.config import Config
from ag.config.clashes import CONDITION
from ag.config.gate import CLASHES as GATE
from ag.config.validate import CLASHES as WHOLE
from ag.config.validate import RARELY_MEANT
from tests.support.refused import names
from tests.support.schemas import KEYS, fit

TEXT = "data.kind=text data.name=c"
PACKED, REPEATED = (f"{TEXT} data.packing={how}" for how in ("packed", "repeated"))
#: Keys that make sense by themselves; those that clash, which the error names, -> and what else it names, as the fix.
CLASHES = f"""
loss.objective=kl; train=lora -> loss.objective=lm
warmup.regress_steps=11 trainer.max_steps=10
trainer.max_steps=10; loss.anneal_steps=8 warmup.regress_steps=3 -> trainer.max_steps=10
loss.share_high=0.05 -> loss.share_low=0.1
loss.share_low=0.2 -> loss.share_high
lora.targets=[] -> train=gates
export.push_to_hub=me/gates; train=lora -> export.push_to_hub
data.kind=sft -> data.name=facts data.root=FOLDER
data.eos=true -> data.kind=facts data.kind=sft
{PACKED}; gate.scope=prompt -> data.packing=packed gate.scope=causal
{PACKED}; data.cross_documents=false warmup.regress_steps=5 -> data.cross_documents=true
{TEXT}; data.max_length=575 -> data.prompt_max=512 data.continuation=64
trainer.strategy=fsdp2 model.quantization=nf4 -> trainer.strategy=ddp
gate.window=3 gate.kind=mlp -> gate.kind=attention
gate.layer_offset=1 -> gate.first_layer=0 gate.first_layer=1
"""
NEIGHBOURS = f"""
{PACKED} gate.scope=prompt data.cross_documents=false train=lora
{TEXT} data.max_length=576
warmup.regress_steps=10 optim.warmup_steps=10 trainer.max_steps=10
loss.anneal_steps=7 warmup.regress_steps=3 trainer.max_steps=10
train=lora loss.anneal_steps=11 trainer.max_steps=10
train=gates lora.targets=[]
data.kind=worked data.name=sorting data.solution_min=400 data.solution_max=400
gate.layer_offset=1 gate.first_layer=1
loss.share_low=0.3 loss.share_high=0.3 warmup.regress_steps=3
model.quantization=nf4 trainer.precision=bf16-mixed model.dtype=bfloat16
{PACKED} warmup.target=reread warmup.regress_steps=5
"""


@pytest.mark.parametrize("clash", CLASHES.strip().splitlines())
def test_combinations_that_make_no_sense(error, clash):
    first, _, also = clash.partition(" -> ")
    others, _, keys = first.rpartition("; ")
    names(error(*others.split(), *keys.split()), *keys.split(), *also.split())


@pytest.mark.parametrize("given", NEIGHBOURS.strip().splitlines())
def test_their_neighbours_do(given):
    assert isinstance(fit(*given.split()), Config)


@pytest.mark.parametrize("row", [*WHOLE, *RARELY_MEANT, *GATE])
def test_a_row_names_keys_and_values_that_there_are(row):
    """A key or a choice that is misspelt would never clash."""
    assert row[1], row
    prefix = "gate." if row in GATE else ""
    conditions = CONDITION.findall(row[0])
    assert len(conditions) == 1 + row[0].count(";") + row[0].count(" if ")
    for name, sign, wanted in conditions:
        key = KEYS[prefix + name.split("+")[0]]
        if sign in ("=", "!=") and "|" in key.expected():
            assert all(choice in key.expected() for choice in wanted.split("|"))


@pytest.mark.parametrize(
    ("argv", "warned"),
    [("loss.beta=0.51", True), ("loss.beta=0.5", False), ("loss.beta=0.51 loss.mean=hard", False)],
)
def test_a_target_above_the_threshold_is_a_warning(capsys, argv, warned):
    with pytest.raises(SystemExit, match="0"):
        main([*argv.split(), "--print"])
    err = capsys.readouterr().err
    assert err.startswith("ag.fit: warning: loss.beta=0.51 with gate.threshold=0.5: ") == warned
    assert err.count("\n") == warned
