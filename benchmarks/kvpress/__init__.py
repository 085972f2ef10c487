"""This engine beside kvpress: ``bash scripts/bench_kvpress.sh``."""
