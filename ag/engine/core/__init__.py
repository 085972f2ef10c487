"""The engine's next core: one path over sequences (append, attend, observe, evict, compact).

It stands beside the engine that ``ag.EvictionCache`` uses, and is tested to keep the same tokens and to give the same
logits. It does not have everything yet: saved caches, reports, rereading (``kvzip``), positions by slot, shared prompts
and recorded steps are missing.
"""
