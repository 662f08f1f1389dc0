#!/usr/bin/env bash
# Trains GPT-2 124M, Llama 3.2 1B (also with 32,768 tokens), Llama 3 8B and a small mixture of experts
# for a few steps each on this machine's NVIDIA GPUs, with settings tuned for an H100, and prints a
# table: step time, TFLOP/s, tokens/s, MFU, HFU, memory, the plan's prediction, and beside it the best
# of PyTorch's variants (our dense step and Hugging Face's model, compiled, with and without
# recomputation, batch fitted) if torch is installed and there is one GPU; also writes JSON. Whatever
# does not fit, or is missing, is listed with the reason.
#   scripts/benchmark_gpu.sh --configs=gpt2-124m,llama3.2-1b,llama3-8b,moe-1.5b --steps=12 --budget=840
#   scripts/benchmark_gpu.sh --configs=llama3.1-8b-128k-split    # each sequence over all devices
#   scripts/benchmark_gpu.sh --tiny                              # a trial of all this on a CPU
set -euo pipefail
platform=gpu extras=train,cuda
case " $* " in *" --tiny "*) platform=cpu extras=train ;; esac
. "$(dirname "$0")/venv.sh" "$extras"
exec python -m scripts.benchmarks.run --platform="$platform" "$@"
