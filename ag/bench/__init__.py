"""Measuring speed and memory, contestant beside contestant: ``python -m ag.bench MODE``."""
