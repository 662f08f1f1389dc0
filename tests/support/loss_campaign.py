"""Trains tiny models on the demo's text by the command, and says how far the loss fell.

    python -m tests.support.loss_campaign [--all] [--steps=50] [NAME …]

By default the families whose logits are compared with transformers; `--all`: every bundled model.
Exits 1 if a loss did not fall, or a run failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mfu_jax.yaml_files import model_names

FAMILIES = {
    "llama": "llama3-8b",
    "gemma2": "gemma2-9b",
    "gemma3": "gemma3-12b",
    "qwen3": "qwen3-8b",
    "mixtral": "mixtral-8x7b",
    "deepseek_v3": "deepseek3-671b",
    "gpt_oss": "gpt-oss-20b",
    "llama4": "llama4-17b-16e",
    "qwen3_next": "qwen3-next-80b-a3b",
    "gpt2": "gpt2-124m",
    "olmo3": "olmo3-7b",
}
_KEYS = "per_device_batch_size=4 max_target_length=128 learning_rate=0.003 attention=dot_product"


def losses(model: str, steps: int) -> list[float]:
    """The loss of each step of a run of `mfu-jax train`.

    Raises:
        RuntimeError: the run failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        keys = [f"model_name={model}", f"steps={steps}", f"metrics_file={metrics}"]
        keys += [f"base_output_directory={folder}", "enable_checkpointing=false", "scale=tiny"]
        command = [sys.executable, "-m", "mfu_jax.cli", "train", *keys, *_KEYS.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{model}: {done.stderr[-800:]}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["learning/loss"] for record in records if "learning/loss" in record]


def main() -> int:
    """One line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every bundled model")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("models", nargs="*")
    arguments = parser.parse_args()
    models = arguments.models or (model_names() if arguments.all else list(FAMILIES.values()))
    failed = 0
    for model in models:
        try:
            run = losses(model, arguments.steps)
        except RuntimeError as error:
            failed += 1
            print(f"FAILED {error}", flush=True)
            continue
        failed += not run[-1] < run[0]
        print(f"{model}: {run[0]:.3f} → {run[-1]:.3f} in {len(run)} steps", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
