#!/usr/bin/env bash
# Everything that only a GPU can show, in at most 9 minutes a part: bash scripts/gpu.sh check|speed|train|all [OUT]
# The same command with the same OUT goes on where it ended. Without a GPU: bash scripts/gpu.sh all --cpu-rehearsal.
# For a machine without network: bash scripts/gpu.sh pack (docs/gpu.md).
# Without .venv the machine's own Python (PYTHON, python3) is used where there is a pack, with what it carries, or where
# its torch sees a GPU; else .venv is made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pack="${AG_PACK:-.pack}"
python="${PYTHON:-python3}"
export AG_GPU_WORK="${AG_GPU_WORK:-${TMPDIR:-/tmp}/ag-gpu-$(id -u)}"

sees_a_gpu="
import sys
from importlib.metadata import version
for name, least in {'torch': (2, 11), 'transformers': (5, 17), 'pytest': (8, 0)}.items():
    if tuple(map(int, version(name).split('.')[:2])) < least:
        sys.exit(1)
import torch
sys.exit(not torch.cuda.is_available())"

if [ ! -x .venv/bin/python ] && [ -f "$pack/pack.json" ]; then
    site="$AG_GPU_WORK/site"
    stamp="$PWD $(cksum <"$pack/pack.json")"
    if [ "$(cat "$site.stamp" 2>/dev/null)" != "$stamp" ]; then
        rm -rf "$site" && mkdir -p "$site"
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$pack"/wheels/*.whl
        ln -s "$PWD/ag" "$site/ag"
        echo "$stamp" >"$site.stamp"
    fi
    export AG_PACK="$pack" PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
else
    unset AG_PACK
    if [ -x .venv/bin/python ] || ! "$python" -c "$sees_a_gpu" 2>/dev/null; then
        source scripts/setup.sh
        python=.venv/bin/python
    fi
fi
exec "$python" -m scripts.gpu "$@"
