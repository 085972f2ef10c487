#!/usr/bin/env bash
# The checks, in one place for scripts/test.sh, nox and pre-commit: BIN=FOLDER bash scripts/checks.sh NAME [ARGUMENTS]
# NAME is lint, types, tests and vllm (arguments of pytest), docs or package; BIN holds the programs, .venv/bin unless given.
bin="${BIN:-.venv/bin}"
failed=()

step() {
    "$@" || failed+=("$*")
}

# Starts a check that needs one core, beside what follows; `joined` waits for it and prints what it said.
beside() {
    started="$*"
    said="$(mktemp)"
    (failed=() && "$@" && [ ${#failed[@]} -eq 0 ]) >"$said" 2>&1 &
    other=$!
}

joined() {
    wait "$other" || failed+=("bash scripts/checks.sh $started")
    cat "$said"
    rm "$said"
}

lint() {
    step "$bin/ruff" check .
    step "$bin/ruff" format --check .
    step "$bin/bandit" -q -ll -c pyproject.toml -r ag data callbacks kernels scripts benchmarks
}

types() {
    step "$bin/mypy"
}

tests() {
    rm -f .pytest_cache/failed
    unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same files
    "$bin/python" -m pytest -n 2 --dist worksteal --durations=10 "$@" ||
        failed+=("$bin/python -m pytest $(cat .pytest_cache/failed 2>/dev/null || echo "$@")")
}

docs() {
    export NO_MKDOCS_2_WARNING=1
    if ! "$bin/python" -c "import mkdocs" 2>/dev/null; then
        echo "docs: MkDocs is not there: $bin/python -m pip install -c constraints.txt -e '.[docs]'" >&2
    fi
    step "$bin/python" -m mkdocs build --strict --site-dir build/site
}

package() {
    step "$bin/python" scripts/package.py
}

# In an environment of its own, whose packages are older than this project's pins.
vllm() {
    step bash scripts/vllm_env.sh test "$@"
}

# Says what failed, and how to run it alone; $1 says what passed.
report() {
    if [ ${#failed[@]} -gt 0 ]; then
        local line
        line="$(printf '; %s' "${failed[@]}")"
        echo "FAILED. Alone: ${line:2}"
        exit 1
    fi
    echo "passed: $1"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    cd "$(dirname "$0")/.."
    case "${1:-}" in
        lint | types | tests | docs | package | vllm) "$@" ;;
        *)
            echo "'${1:-}' is no check: lint, types, tests, docs, package or vllm" >&2
            exit 2
            ;;
    esac
    report "$1"
fi
