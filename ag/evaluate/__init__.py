"""Measuring models whose cache forgets: tasks, and policies compared on them."""
