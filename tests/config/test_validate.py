"""Combinations of keys that make no sense, and their neighbours that do."""

import pytest

from ag.config import Config, DataConfig
from ag.config.recipes import load_config
from tests.support.refused import names
from tests.support.schemas import fit

TEXT = "data.kind=text data.name=c"
PACKED, REPEATED = (f"{TEXT} data.packing={how}" for how in ("packed", "repeated"))
REPLAY = "loss.objective=kl loss.share_high=0.7 loss.replay=true"
#: [valid keys;] clashing keys, which the error names [-> further words of the error].
CLASHES = f"""
loss.objective=kl; train=lora -> loss.objective=lm
init=smollm2 train=lora
warmup.regress_steps=11 trainer.max_steps=10
trainer.max_steps=10; optim.warmup_steps=8 warmup.regress_steps=3 -> trainer.max_steps=10
train=gates {REPLAY} warmup.target=reread gate.kind=mlp; warmup.rounds=1 warmup.regress_steps=9 trainer.max_steps=9
trainer.max_steps=10; loss.anneal_steps=8 warmup.regress_steps=3 -> trainer.max_steps=10
loss.share_high=0.05 -> loss.share_low=0.1
train=gates loss.objective=regress; loss.sampled_tokens=3 -> loss.objective=regress loss.sampled_tokens=0
data.kind=sft -> data.name=facts data.root=FOLDER
{PACKED}; warmup.target=reread -> loss.replay=false loss.replay=true
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
warmup.regress_steps=3 optim.warmup_steps=7 trainer.max_steps=10
train=gates {REPLAY} warmup.target=reread gate.kind=mlp warmup.rounds=1 warmup.regress_steps=8 trainer.max_steps=9
loss.anneal_steps=7 warmup.regress_steps=3 trainer.max_steps=10
train=lora loss.anneal_steps=11 trainer.max_steps=10
data.kind=worked data.name=sorting data.solution_min=400 data.solution_max=400
loss.share_low=0.3 loss.share_high=0.3 warmup.regress_steps=3
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


#: A key that the chosen kind of data or loss does not have -> the choices that have it.
FOREIGN = """
data.kind=sft data.name=piqa; data.copy_max=64 -> data.kind=sft data.packing=repeated
data.kind=worked data.name=worked; data.root=rows -> data.kind=worked data.kind=sft
data.kind=text data.name=c data.packing=responses; data.prompt_min=7 -> data.packing=responses data.packing=split
train=gates loss.objective=regress; loss.anneal_steps=3 -> loss.objective=regress
loss.share_low=0.3 -> loss.share_high
loss.objective=kl loss.share_high=0.7; loss.alpha=2.0 -> loss.share_high
loss.contexts=kept -> loss.replay=true
"""


@pytest.mark.parametrize("line", FOREIGN.strip().splitlines())
def test_a_key_of_another_kind(error, line):
    first, _, choices = line.partition(" -> ")
    others, _, key = first.rpartition("; ")
    names(error(*others.split(), key), key, *choices.split(), "leave")


def test_another_kind_drops_the_keys_of_the_recipe_but_not_those_beside_it(error, write):
    """A base, a recipe with another kind, and a command line with a third."""
    write("base.yaml", "data: {kind: text, name: c, packing: repeated, copy_max: 64}\nloss: {alpha: 2.0}\n")
    leaf = write("leaf.yaml", "base: base.yaml\ndata: {packing: packed, cross_documents: false}\nseed: 3\n")
    data = fit(f"recipe={leaf}").data
    assert (data.packing, data.cross_documents, hasattr(data, "copy_max")) == ("packed", False, False)
    config = fit(f"recipe={leaf}", "data.kind=facts", "data.name=facts", "loss.share_high=0.7")
    assert type(config.data).__name__ == "FactsConfig" and not hasattr(config.loss, "alpha")
    names(error(f"recipe={leaf}", "data.copy_max=5"), "data.copy_max=5", "data.packing=packed")
    names(error("recipe=" + write("both.yaml", "base: leaf.yaml\ndata: {copy_max: 5}\n")), "data.copy_max=5")


def test_the_configuration_of_an_earlier_run_may_have_every_key(write):
    """Earlier versions wrote all keys of all kinds."""
    path = write("config.yaml", "data: {kind: sft, name: piqa, packing: split, copy_max: 3, solution_min: 200}\n")
    assert load_config(path, Config).data == DataConfig(kind="sft", name="piqa")
