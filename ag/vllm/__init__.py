"""Eviction by trained gates, or by scorers without gates, inside stock vLLM, as a plugin of vLLM.

A block of vLLM holds N tokens of all L layers and H KV heads, in one allocation: that is L * H *minis*, each with the N
tokens of one head. A prompt is read by vLLM's own attention into whole blocks. Before the first pass after the prompt
the worker ranks the prompt's tokens by :mod:`ag.retention` and packs what stays, each row (layer, head) of x tokens
into ceil(x / N) minis of the request's own blocks. vLLM's own kernel then attends with one KV head, and with one
sequence per request and head. As a budget is exact, the scheduler knows from the prompt's length how many blocks stay.

| module | content |
|---|---|
| settings | what the user asks for |
| placement | how many blocks a prompt keeps, and where new tokens go; arithmetic that scheduler and worker share |
| ranking | which tokens of a prompt stay |
| scheduler | vLLM's scheduler: ends chunks where prompts end, and frees blocks |
| pages | minis, gate logits, the move of what stays |
| backend | vLLM's attention backend: prompts and packed requests in one step |
| gate_operator | runs the gates on the hidden states that enter attention |
| hooks | what is changed in vLLM, and what is refused |
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM ask for eviction; vLLM calls this in each of its processes. Without settings nothing else changes."""
    from ag.vllm import hooks  # vLLM imports this module by its entry point, before it is known whether it is needed

    hooks.register()
