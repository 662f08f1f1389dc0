#!/usr/bin/env bash
# Trains GPT-2 124M, Llama 3.2 1B (also with 32,768 tokens), Llama 3 8B and a small mixture of experts
# for a few steps each on this machine's NVIDIA GPUs and prints a table: step time, TFLOP/s,
# tokens/s, MFU, HFU, memory, the plan's prediction, and the same dense model in PyTorch (torch.compile)
# if torch is installed and there is one GPU; also writes JSON. Whatever does not fit, or is missing,
# is listed with the reason.
#   scripts/benchmark_gpu.sh --configs=gpt2-124m,mixtral-8x7b --steps=50
#   scripts/benchmark_gpu.sh --configs=llama3.1-8b-128k-split    # each sequence over all devices
set -euo pipefail
. "$(dirname "$0")/venv.sh" train,cuda
exec python -m scripts.benchmarks.run --platform=gpu "$@"
