#!/usr/bin/env bash
# Lint, types and tests from a bare checkout: bash scripts/test.sh [arguments of pytest]
# Every step runs. The last line says what failed, and how to run it alone.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

failed=()
step() {
    "$@" || failed+=("$*")
}

step .venv/bin/ruff check .
step .venv/bin/ruff format --check .
step .venv/bin/mypy
step .venv/bin/bandit -q -ll -c pyproject.toml -r ag/*.py ag/engine ag/evaluate ag/bench data callbacks kernels scripts
rm -f .pytest_cache/failed
.venv/bin/python -m pytest -n 2 --dist worksteal --durations=10 "$@" ||
    failed+=(".venv/bin/python -m pytest $(cat .pytest_cache/failed 2>/dev/null || echo "$@")")

if [ ${#failed[@]} -gt 0 ]; then
    line="$(printf '; %s' "${failed[@]}")"
    echo "FAILED. Alone: ${line:2}"
    exit 1
fi
echo "passed: linters, types and tests"
