#!/usr/bin/env bash
# From a bare checkout to gates that evict, on a CPU: bash scripts/quickstart.sh [folder for the runs] [key=value ...]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
output=runs
case "${1:-}" in
    "" | *=*) ;;
    *) output="$1" && shift ;;
esac
log="$(mktemp)"
trap 'rm "$log"' EXIT

.venv/bin/python -m ag.models smollm2
.venv/bin/python -m ag.fit recipe=quickstart output="$output" "$@" | tee -i "$log"
run="$(sed -n 's/^run folder: //p' "$log")"
.venv/bin/python -m ag.generate gates="$run/export" prompt="$(cat scripts/quickstart.txt)" max_new_tokens=12 compare=true
.venv/bin/python -m ag.evaluate run="$run"
cat <<END

What you saw: small gates learnt which tokens of a passage a later question needs, and the others left the cache.
The difference is in nats per token of the answers, against the full cache. Below 0 the gates also learnt the form of
the answers, as training on answers does; accuracy says whether the facts are still there. Next:
  .venv/bin/ag generate model=smollm2 policy=gates:smollm2 budget=0.3 file=README.md compare=true
  .venv/bin/ag fit recipe=quickstart gate.kind=linear
  .venv/bin/ag serve model=smollm2 policy=gates:smollm2 budget=0.3
END
