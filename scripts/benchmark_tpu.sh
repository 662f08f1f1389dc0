#!/usr/bin/env bash
# Trains GPT-2 124M, Llama 3.2 1B and Llama 3 8B for a few steps each on this host's TPUs and prints a
# table: step time, TFLOP/s, tokens/s, MFU, HFU; also writes JSON. A config that does not fit is listed with the
# reason.
#   scripts/benchmark_tpu.sh --configs=gpt2-124m --steps=50
set -euo pipefail
. "$(dirname "$0")/venv.sh" train,tpu
exec python -m mfu_jax.runs.benchmarking --platform=tpu "$@"
