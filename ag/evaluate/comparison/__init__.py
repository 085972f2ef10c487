"""Policies over tasks: cells, the work on them, their results, and what they say."""

from ag.evaluate.comparison.config import CompareConfig as CompareConfig
from ag.evaluate.comparison.findings import Comparison as Comparison
from ag.evaluate.comparison.run import compare as compare
