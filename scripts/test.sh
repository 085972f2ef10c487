#!/usr/bin/env bash
# Lint, types and tests from a bare checkout: bash scripts/test.sh [arguments of pytest]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/bandit -q -ll -c pyproject.toml -r ag/*.py ag/engine ag/evaluate ag/bench data callbacks kernels scripts
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
