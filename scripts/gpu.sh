#!/usr/bin/env bash
# Everything that only a GPU can show, in at most 9 minutes a part: bash scripts/gpu.sh check|speed|train|all [OUT]
# Without a GPU: bash scripts/gpu.sh all --cpu-rehearsal. For a machine without network: bash scripts/gpu.sh pack.
# With a pack and no .venv the machine's own Python is used, with what the pack carries beside it (docs/gpu.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pack="${AG_PACK:-.pack}"
export AG_GPU_WORK="${AG_GPU_WORK:-${TMPDIR:-/tmp}/ag-gpu-$(id -u)}"

if [ -f "$pack/pack.json" ] && [ ! -x .venv/bin/python ]; then
    python="${PYTHON:-python3}"
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
    source scripts/setup.sh
    unset AG_PACK
    python=.venv/bin/python
fi
exec "$python" -m ag.bench.card "$@"
