"""Policies over tasks: cells, the work on them, their results, and what they say."""
