#!/usr/bin/env bash
# From a bare checkout to gates that evict, on a CPU: bash scripts/quickstart.sh [folder for the runs] [key=value ...]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
output="${1:-runs}"

.venv/bin/python -m ag.models smollm2
.venv/bin/python -m ag.fit recipe=quickstart output="$output" "${@:2}"
run="$(ls -d "$output"/quickstart/*/ | tail -n 1)"
.venv/bin/python -m ag.generate gates="${run}export" prompt="$(cat scripts/quickstart.txt)" max_new_tokens=12 compare=true
.venv/bin/python -m ag.evaluate run="$run"
