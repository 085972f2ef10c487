"""Measuring speed and memory, contestant beside contestant: ``python -m ag.bench decode|prefill|train|memory``."""
