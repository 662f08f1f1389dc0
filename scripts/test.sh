#!/usr/bin/env bash
# Sets up .venv, then runs lint, types, import contracts and all tests. Arguments go to pytest: scripts/test.sh -k logger
set -euo pipefail
. "$(dirname "$0")/venv.sh" test
export JAX_PLATFORMS=cpu
ruff check .
ruff format --check .
mypy
lint-imports
TMPDIR=$(mktemp -d) # tests of failures leave hundreds of files with details
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
python -m pytest -n auto --dist worksteal --durations=10 "$@"
