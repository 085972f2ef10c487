"""Everything that only a GPU can show, as a table of lines that one command runs: ``scripts/gpu.sh``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("check", "speed", "train")
