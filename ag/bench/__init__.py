"""Measurements of speed and memory: ``python -m ag.bench MODE``."""
