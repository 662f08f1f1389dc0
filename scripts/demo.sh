#!/usr/bin/env bash
# Sets up .venv and trains the embedded default (configs/demo.yml) on this machine's CPU.
# Takes the trainer's key=value arguments: scripts/demo.sh steps=50 remat_policy=full
set -euo pipefail
. "$(dirname "$0")/venv.sh" train,tensorboard
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# A new folder each time: a run with the same name would resume the previous one.
exec python -m mfu_jax.train configs/demo.yml run_name="demo-$(date +%Y%m%d-%H%M%S)" "$@"
