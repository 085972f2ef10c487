"""Combinations of keys that make no sense, and their neighbours that do."""

import pytest

from ag.config import Config
from ag.config.clashes import CONDITION
from ag.config.gate import CLASHES as GATE
from ag.config.validate import CLASHES as WHOLE
from tests.support.refused import names
from tests.support.schemas import KEYS, fit

TEXT = "data.kind=text data.name=c"
PACKED, REPEATED = (f"{TEXT} data.packing={how}" for how in ("packed", "repeated"))
REPLAY = "loss.objective=kl loss.share_high=0.7 loss.replay=true"
#: [valid keys;] clashing keys, which the error names [-> further words of the error].
CLASHES = f"""
loss.objective=kl; train=lora -> loss.objective=lm
warmup.regress_steps=11 trainer.max_steps=10
trainer.max_steps=10; loss.anneal_steps=8 warmup.regress_steps=3 -> trainer.max_steps=10
loss.share_high=0.05 -> loss.share_low=0.1
data.kind=sft -> data.name=facts data.root=FOLDER
{PACKED}; gate.scope=prompt -> data.packing=packed gate.scope=causal
{PACKED}; data.cross_documents=false warmup.regress_steps=5 -> data.cross_documents=true
{TEXT}; data.max_length=575 -> data.prompt_max=512 data.continuation=64
loss.objective=kl loss.share_high=0.7; loss.replay=true train=gates+lora -> train=gates
train=gates {REPLAY}; warmup.rounds=1 gate.kind=attention -> gate.kind=mlp
train=gates {REPLAY} warmup.regress_steps=5 trainer.max_steps=10; loss.replay=true warmup.target=attention
gate.window=3 gate.kind=mlp -> gate.kind=attention
gate.layer_offset=1 -> gate.first_layer=0 gate.first_layer=1
"""
NEIGHBOURS = f"""
{PACKED} gate.scope=prompt data.cross_documents=false train=lora
{TEXT} data.max_length=576
warmup.regress_steps=10 optim.warmup_steps=10 trainer.max_steps=10
loss.anneal_steps=7 warmup.regress_steps=3 trainer.max_steps=10
train=lora loss.anneal_steps=11 trainer.max_steps=10
data.kind=worked data.name=sorting data.solution_min=400 data.solution_max=400
loss.share_low=0.3 loss.share_high=0.3 warmup.regress_steps=3
{PACKED} warmup.target=reread warmup.regress_steps=5
{TEXT} data.packing=responses train=gates {REPLAY} gate.scope=prompt
{TEXT} data.packing=responses train=gates {REPLAY} warmup.regress_steps=5 warmup.target=reread
"""


@pytest.mark.parametrize("clash", CLASHES.strip().splitlines())
def test_combinations_that_make_no_sense(error, clash):
    first, _, also = clash.partition(" -> ")
    others, _, keys = first.rpartition("; ")
    names(error(*others.split(), *keys.split()), *keys.split(), *also.split())


@pytest.mark.parametrize("given", NEIGHBOURS.strip().splitlines())
def test_their_neighbours_do(given):
    assert isinstance(fit(*given.split()), Config)


def test_rows_name_existing_keys_and_values():
    """A misspelt key or choice would never clash."""
    for row in [*WHOLE, *GATE]:
        prefix, conditions = "gate." if row in GATE else "", CONDITION.findall(row[0])
        assert row[1] and len(conditions) == 1 + row[0].count(";") + row[0].count(" if "), row
        for name, sign, wanted in conditions:
            key = KEYS[prefix + name.split("+")[0]]
            if sign in ("=", "!=") and "|" in key.expected():
                assert all(choice in key.expected() for choice in wanted.split("|")), row
