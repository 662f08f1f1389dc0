"""Trains tiny models on the demo's text by the command; says how far the loss fell, and the FLOPs.

    python -m tests.campaigns.losses [--all] [--steps=50] [NAME …]

By default the families whose logits are compared with transformers; `--all`: every bundled model
whose tiny config is not another's. Exits 1 if a run failed, a loss did not fall, or the FLOPs by
config, traced and executed (less the named lines) are not the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from mfu_jax import cli
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.trainer import loop
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step
from tests.support.tiny_models import analytic, distinct

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


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left.

    Attributes:
        losses: of each step.
        config: as it was trained.
        flops: of the compiled step.
    """

    losses: list[float]
    config: Config
    flops: StepFlops

    @property
    def traced(self) -> int:
        """FLOPs of its step by the jaxpr."""
        grid = mesh.make_mesh(self.config)
        weights = state.abstract_state(self.config, grid)
        batch = step.abstract_batch(self.config, grid, 1)
        count = count_model_flops(step.make_train_step(self.config), weights, batch)
        assert not count.unaccounted, count.unaccounted
        return count.total

    def wrong(self) -> str:
        """What does not hold; empty if all does."""
        executed, ledger = self.flops.executed, self.flops.ledger
        found = []
        if not self.losses[-1] < self.losses[0]:
            found.append("the loss did not fall")
        if (traced := self.traced) != (model := analytic(self.config)):
            found.append(f"traced {traced:,}, by the config {model:,}")
        if ledger.residual or executed.unaccounted or executed.flags:
            found.append(f"not explained: {ledger.residual:,}, {executed.unaccounted}")
        return "; ".join(found)


def trained(model: str, steps: int) -> Run:
    """A run of `mfu-jax train`.

    Raises:
        RuntimeError: the run failed; with the end of what it said.
    """
    seen: list[tuple[Config, StepFlops]] = []
    count_step = loop.count_step

    def kept(config: Config, train_step: Any) -> StepFlops:
        seen.append((config, count_step(config, train_step)))
        return seen[-1][1]

    said = io.StringIO()
    # The run's log is open, and may write, until this process ends.
    folders = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folders as folder, mock.patch.object(loop, "count_step", kept):
        metrics = Path(folder) / "metrics.jsonl"
        keys = [f"model_name={model}", f"steps={steps}", f"metrics_file={metrics}"]
        keys += [f"base_output_directory={folder}", "enable_checkpointing=false", "scale=tiny"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(["train", *keys, *_KEYS.split()])
        if code:
            raise RuntimeError(f"{model}: {said.getvalue()[-800:]}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["learning/loss"] for record in records if "learning/loss" in record]
    return Run(losses=losses, config=seen[-1][0], flops=seen[-1][1])


def main() -> int:
    """One line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every distinct bundled model")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("models", nargs="*")
    arguments = parser.parse_args()
    models = arguments.models or (distinct() if arguments.all else list(FAMILIES.values()))
    failed = sum(not _shown(model, arguments.steps) for model in models)
    print(f"{len(models) - failed} of {len(models)} hold")
    return 1 if failed else 0


def _shown(model: str, steps: int) -> bool:
    begin = time.perf_counter()
    try:
        run = trained(model, steps)
        wrong = run.wrong()
    except Exception as error:
        print(f"{model}: FAILED {type(error).__name__}: {error}", flush=True)
        return False
    finally:
        jax.clear_caches()
    losses, ledger = run.losses, run.flops.ledger
    lines = ", ".join(f"{line.label} {line.flops:,}" for line in ledger.lines if line.flops)
    print(
        f"{model}: {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps; {lines}, "
        f"executed {run.flops.executed.total:,}; {time.perf_counter() - begin:.0f} s"
        f"{'; WRONG: ' + wrong if wrong else ''}",
        flush=True,
    )
    return not wrong


if __name__ == "__main__":
    raise SystemExit(main())
