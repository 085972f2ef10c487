#!/usr/bin/env bash
# Lint, types and tests from a bare checkout: bash scripts/test.sh [--all] [arguments of pytest]
# Every step runs. The last line says what failed, and how to run it alone.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source scripts/checks.sh

lint
beside types
tests "$@"
joined
report "linters, types and tests"
