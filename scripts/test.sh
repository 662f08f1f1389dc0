#!/usr/bin/env bash
# Sets up .venv and runs the fast lane: lint, types, import contracts, and every test that neither starts a process
# nor compiles much. With --full: every test. Other arguments go to pytest: scripts/test.sh -k logger
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
python -m pytest -n auto --max-worker-restart=0 --dist loadscope --no-loadscope-reorder --durations=10 "$@"
[ "$*" != --full ] || scripts/test_libraries.sh # adapters, with the libraries that they adapt
