#!/usr/bin/env bash
# This engine beside kvpress: bash scripts/bench_kvpress.sh [FOLDER] [key=value ...]; --help lists the keys.
# FOLDER, or environment=FOLDER (build/kvpress), is kvpress' virtual environment, made when it is not there: kvpress
# 0.5.5 needs transformers below 5.3, and this project a newer one. torch is the project's own build, so that a CPU
# build stays one.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

environment=build/kvpress
case "${1:-}" in
    "" | -* | *=*) ;;
    *) environment="$1" && shift ;;
esac
words=("environment=$environment" "$@")
for word in "$@"; do
    case "$word" in
        environment=*) environment="${word#*=}" ;; # of several the last one counts, as in Python
        -h | --help | --print | --dry-run) exec .venv/bin/python -m benchmarks.kvpress.compare "${words[@]}" ;;
    esac
done
.venv/bin/python -m benchmarks.kvpress.compare "${words[@]}" --dry-run >/dev/null # says what is wrong before minutes pass

torch="$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')"
needs=("kvpress==0.5.5" "transformers<5.3" "torch==$torch")
if [ "$(cat "$environment/installed" 2>/dev/null)" != "${needs[*]}" ]; then
    if [ -e "$environment" ] && [ ! -f "$environment/pyvenv.cfg" ]; then
        echo "$environment: expected a folder that is not there yet, or a virtual environment; give another one" >&2
        exit 2
    fi
    echo "installing kvpress into $environment (minutes, once)"
    .venv/bin/python -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet "${needs[@]}"
    echo "${needs[*]}" >"$environment/installed"
fi
exec .venv/bin/python -m benchmarks.kvpress.compare "${words[@]}"
