#!/usr/bin/env bash
# Train with torchrun, on each of several machines:
#   MACHINES=2 GPUS=8 HEAD=HOST:29500 bash scripts/torchrun.sh NAME [key=value ...]
# NAME is the same on all of them, and names the run folder. On one machine MACHINES and HEAD may be left out.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
name="${1:?give the run a name: bash scripts/torchrun.sh NAME [key=value ...]}"
machines="${MACHINES:-1}" gpus="${GPUS:-1}"

exec .venv/bin/python -m torch.distributed.run --nnodes="$machines" --nproc-per-node="$gpus" \
    --rdzv-backend=c10d --rdzv-endpoint="${HEAD:-localhost:29500}" --rdzv-id="$name" --max-restarts=0 \
    -m ag.fit trainer.devices="$gpus" trainer.num_nodes="$machines" "${@:2}"
