#!/usr/bin/env bash
# Checks transformers' own tests out: bash scripts/transformers_tests.sh oldest|newest|VERSION FOLDER
# oldest is the first release that pyproject.toml lets in, newest the last one of the package index.
# TRANSFORMERS_TESTS=FOLDER pytest tests/integration/test_generation_suite.py runs them with an eviction cache.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:?oldest, newest or a version}" in
    oldest) version="$(sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)" ;;
    newest) version="$(python -m pip index versions transformers | sed -n '1s/.*(\(.*\))/\1/p')" ;;
    *) version="$1" ;;
esac
[[ "$version" == *.*.* ]] || version="$version.0"
git clone --quiet --depth 1 --branch "v$version" https://github.com/huggingface/transformers "${2:?a folder}"
echo "tests of transformers $version: $2"
