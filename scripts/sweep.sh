#!/usr/bin/env bash
# Share a sweep among the GPUs of a machine, one worker each: GPUS=4 bash scripts/sweep.sh recipe=NAME seed=0,1,2,3
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
workers="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
trap 'kill -TERM $(jobs -p) 2>/dev/null' INT TERM

pids=()
for ((i = 0; i < workers; i++)); do
    CUDA_VISIBLE_DEVICES=$i AG_TASK="$i/$workers" .venv/bin/python -m ag.fit -m "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
