#!/usr/bin/env bash
# Gates and LoRA for Llama-2-7B on one machine with four cards of 24 GB, through crashes and restarts:
#   bash scripts/launch_4x4090.sh NAME [key=value ...]
# The run is runs/redpajama_cpt/NAME: NF4 base, DDP, bf16, checkpointed activations, packed rows of 4,096 tokens, logits
# 1,024 tokens at a time. Called again with the same NAME it goes on from the newest intact checkpoint.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export AG_RUN="${1:?give the run a name: bash scripts/launch_4x4090.sh NAME [key=value ...]}"
source scripts/run_folder.sh
run="$(run_folder redpajama_cpt "$AG_RUN" "${@:2}")"

export NCCL_P2P_DISABLE=1  # cards of this kind have no peer-to-peer transfer, and drivers that claim it make NCCL hang
export PYTORCH_ALLOC_CONF=expandable_segments:True  # less fragmentation between steps
export OMP_NUM_THREADS=8

for attempt in 1 2 3 4 5; do
    start_or_resume "$run" recipe=redpajama_cpt checkpoint.every_steps=25
    code=0
    .venv/bin/python -m ag.fit "${start[@]}" "${@:2}" || code=$?
    case $code in
        0 | 2 | 3 | 130 | 138 | 143) exit "$code" ;;  # done; a mistake; not finite; told to stop
    esac
    echo "attempt $attempt ended with exit code $code" >&2
    sleep "${AG_PAUSE:-20}"  # until the driver has let go of the cards
done
exit "$code"
