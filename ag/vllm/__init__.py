"""Eviction by trained gates, or by scorers without gates, inside stock vLLM, as a plugin of vLLM.

A block of vLLM holds N tokens of all L layers and H KV heads, in one allocation: that is L * H *minis*, each with the N
tokens of one head. A text is read by vLLM's own attention into whole blocks until the first eviction, usually at the
end of the prompt. Before the next pass the worker ranks the tokens by :mod:`ag.retention` and packs what stays, each
row (layer, head) of x tokens into ceil(x / N) minis of the request's own blocks. vLLM's own kernel then attends with
one KV head, and with one sequence per request and head. Later evictions pack the rows again, into the same blocks. As a
budget is exact, the scheduler knows from the prompt's length when evictions are due and how many blocks stay.

| module | content |
|---|---|
| settings | what the user asks for |
| placement | when evictions are due, how many blocks stay, where new tokens go; for scheduler and worker alike |
| ranking | which tokens of a request stay |
| scheduler | vLLM's scheduler: ends chunks where evictions are due, and frees blocks |
| pages | minis, gate logits, the move of what stays |
| backend | vLLM's attention backend: whole and packed requests in one step |
| cpu, cuda | the attention kernels of vLLM on a CPU, and FlashAttention |
| gate_operator | runs the gates on the hidden states that enter attention |
| hooks | what is changed in vLLM, and what is refused |
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM ask for eviction; vLLM calls this in each of its processes. Without settings nothing else changes."""
    from ag.vllm import hooks  # vLLM imports this module by its entry point, before it is known whether it is needed

    hooks.register()
