# Sourced by the other scripts: goes to the repository's root and makes .venv ready, at once when it already is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer was not found (${PYTHON:-python3}): install it, or set PYTHON to its path" >&2
    return 1
}

if [ ! -x .venv/bin/python ]; then
    python="$(find_python)"
    "$python" -m venv .venv
fi

stamp="$PWD $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
    echo "installing the pinned packages into .venv (minutes, once)"
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
    echo "$stamp" >.venv/installed
fi
