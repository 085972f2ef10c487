"""Everything that only a GPU can show, as a table of lines that one command runs: ``scripts/gpu.sh``."""
