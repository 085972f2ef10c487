"""Invalid combinations of a run's keys, each with its reason and its fix.

:mod:`ag.config.keys` checks single values, and :class:`ag.config.gate.GateConfig` combinations of ``gate.*``.
"""

from __future__ import annotations

import re
from typing import Any

from ag.config.clashes import first_clash, parse_table

CLASHES = parse_table("""
loss.objective=kl|regress; train=lora -> there are no gates to train; use loss.objective=lm
warmup.regress_steps>0; train=lora -> there are no gates to warm up; set it to 0
loss.objective=regress; train!=gates -> no gradient reaches the adapters; use train=gates
warmup.regress_steps>0; loss.objective=regress -> every step is a regression step already; set it to 0
trainer.max_steps=0 -> nothing is trained; give at least 1, or -1 for no limit
warmup.regress_steps>trainer.max_steps if trainer.max_steps>0 -> the main objective never starts; raise
    trainer.max_steps
loss.anneal_steps>0; loss.objective=regress -> regression has no target of the mean gate; set it to 0
loss.share_low!=0.1; loss.share_high<=0 -> no share is drawn; set loss.share_high too
loss.share_high<loss.share_low if loss.share_high>0 -> no share lies between; swap them
loss.share_high>0; train=lora -> there are no gates to keep a share; set loss.share_high=0
loss.share_high>0; loss.objective=regress -> nothing is evicted; set loss.share_high=0
loss.share_high>0; loss.anneal_steps>0 -> drawn shares take the place of loss.beta, so nothing falls to it; set one of
    the two to 0
loss.replay=true; loss.objective!=kl -> it is the divergence from the response after the whole prompt; use
    loss.objective=kl
loss.replay=true; loss.share_high<=0 -> a share is drawn for each response; set loss.share_high too
loss.replay=true; train!=gates -> a prompt is read once, so that the model must not change; use train=gates
loss.replay=true; gate.estimator!=ste -> flags are ranked, without noise; use gate.estimator=ste
loss.replay=true; data.packing=packed|repeated -> these rows have no response after a prompt; use data.packing=responses
    or split
loss.replay=true; trainer.strategy=fsdp2 -> prompts are read by a whole model; use trainer.strategy=ddp
loss.contexts!=null; loss.replay=false -> no prompt is kept; leave it out, or set loss.replay=true
data.responses=[]; data.packing=responses -> a context has no row; name again, next or question
warmup.rounds>0; loss.replay=false -> costs are measured on responses after a prompt; set loss.replay=true
warmup.rounds>0; gate.kind!=mlp|affine -> the last layer of these gates has no bias for each head; use
    gate.kind=mlp, or warmup.rounds=0
warmup.target!=reread; loss.replay=true if warmup.regress_steps>0 -> a context is read once for all its responses;
    use warmup.target=reread, which repeats it
warmup.target=kvzip; data.packing=packed -> it is the attention of a response, and packed rows have none;
    use data.packing=repeated, or warmup.target=attention
warmup.target=reread; data.packing!=packed if loss.replay=false -> the rows themselves are repeated, and have no
    response; use data.kind=text with data.packing=packed, or warmup.target=kvzip
loss.anneal_steps+warmup.regress_steps>trainer.max_steps if trainer.max_steps>0; train!=lora -> the mean gate never
    gets to loss.beta; lower loss.anneal_steps, or raise trainer.max_steps
optim.warmup_steps>trainer.max_steps if trainer.max_steps>0 -> the learning rate never reaches its peak; lower
    optim.warmup_steps
lora.targets=[]; train!=gates -> nothing is adapted; name linear layers, or use train=gates
export.push_to_hub!=null; train=lora -> only gates are uploaded; leave it out
export.merge=true; train=gates -> there is no adapter to merge; use export.merge=false
data.name!=facts; data.kind=facts -> use data.kind=sft for a task, text for documents, worked for worked problems
data.name=facts; data.kind=sft|text if data.root=null -> give data.root=FOLDER, data.name=ORG/NAME of the hub, or
    data.kind=facts
data.root!=null; data.kind=facts|worked -> that data is generated; use data.kind=sft or text
data.eos!=null; data.kind!=sft -> only responses of data.kind=sft take it; leave it out
data.question=after; data.kind=text|worked -> its rows have no text before a question; leave it out
data.copy_max>0; data.packing!=repeated -> nothing is repeated; use data.packing=repeated, or leave it out
data.packing!=split; data.kind!=text -> only plain text is packed or repeated; use data.packing=split
data.cache!=null; data.kind!=text -> only plain text is kept; leave data.cache out
data.cross_documents=false; data.packing!=packed -> only packed rows hold several documents; use data.packing=packed,
    or leave it out
data.cross_documents=false; loss.objective=regress -> regression does not know where documents end; use
    data.cross_documents=true, or train without it
data.cross_documents=false; warmup.regress_steps>0 -> regression does not know where documents end; use
    data.cross_documents=true, or train without it
gate.scope!=causal; data.packing=packed|repeated if train!=lora -> a gate that sees later tokens leaks them into the
    loss; use gate.scope=causal
gate.prefill!=sparse; data.packing=packed if train!=lora -> no response reads the prompt after eviction; use
    gate.prefill=sparse or data.packing=split
data.prompt_min>data.prompt_max if data.kind=facts|text; data.packing=split -> no length lies between; swap them
data.prompt_max>data.max_length if data.kind=facts -> rows would be too long; raise data.max_length, or lower
    data.prompt_max
data.prompt_max+data.continuation>data.max_length if data.kind=text; data.packing=split -> rows would be too long;
    raise data.max_length, or lower data.prompt_max
data.solution_min>data.solution_max if data.kind=worked -> no length lies between; swap them
data.solution_max>=data.max_length if data.kind=worked -> there is no room for a prompt; raise data.max_length, or
    lower data.solution_max
model.dtype=bfloat16; trainer.precision=16-mixed -> two 16-bit formats; use trainer.precision=bf16-mixed
model.dtype=float16; trainer.precision=bf16-mixed -> two 16-bit formats; use trainer.precision=16-mixed
model.quantization=nf4; model.dtype=float32; trainer.precision!=32-true -> 4-bit layers compute in model.dtype; use
    model.dtype=bfloat16 with bf16-mixed, float16 with 16-mixed
model.quantization=nf4; trainer.strategy=fsdp2 -> sharded 4-bit weights are silently corrupted; use
    trainer.strategy=ddp, or model.quantization=none
trainer.precision=16-mixed; trainer.strategy=fsdp2 -> sharded gradients cannot be scaled; use bf16-mixed
export.merge=true; trainer.strategy=fsdp2 -> no GPU holds the whole base; use export.merge=false
export.merge=true; model.quantization=nf4 -> 4-bit weights are too coarse to take the adapter in; use export.merge=false
trainer.precision=16-mixed; trainer.accelerator=cpu -> float16 needs a GPU; use bf16-mixed
model.attn_implementation=flash_attention_2; trainer.accelerator=cpu -> it needs a GPU; use sdpa
model.attn_implementation=flash_attention_2; model.dtype=float32 -> it computes in 16 bits only; use
    model.dtype=bfloat16
""")


def validate(config: Any) -> None:
    """Refuse invalid combinations of keys.

    Args:
        config: :class:`ag.config.schema.Config`.

    Raises:
        ValueError: names the keys, the reason and the fix.
    """
    if re.fullmatch(r"\w[\w.-]*", config.recipe) is None:
        raise ValueError(
            f"recipe={config.recipe!r}: the run folder has this name too; use letters, digits, '.', '_' and '-'"
        )
    if (message := first_clash(config, CLASHES)) is not None:
        raise ValueError(message)
