"""Trains the reference model and logs MFU and HFU of every step.

usage: mfu-jax train [FILE.yml] [key=value …] [--json]
       python -m mfu_jax.train [FILE.yml] [key=value …] [--json]

Without a file it trains configs/demo.yml; configs/base.yml lists every key with its default;
model=NAME is short for model_name=NAME. --json prints one JSON object on stdout, at the end: the
run's totals and its files; the steps are then on stderr.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 (SLURM's --signal=USR1@120) finish the step, save a checkpoint
and stop; a second SIGINT ends at once. The same command resumes. Exit codes: 0 done, 2 wrong
input, 3 NaN or infinite loss, 74 a checkpoint is missing, 75 another process of the job died or,
with abort_on_hang, the run hangs, 128 + the signal's number.

example: mfu-jax train model=llama2-7b scale=tiny steps=20"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, two_lines
from mfu_jax.logger.run_log.events import SUMMARY
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.trainer.config.pyconfig import Config, load
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.optional_deps import TRAIN, require


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one training job and returns its exit code (listed in the module docstring).

    If another process of the job dies, this one ends without returning.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help", "help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        as_json = "--json" in parse(arguments, flags=("--json",)).flags
        config = load([word for word in arguments if word != "--json"])
        run_log = start_run_log(config)
        for part in ("flax", "optax", "orbax.checkpoint"):  # they import JAX, which takes seconds
            require(part, "the trainer", install=TRAIN)
    except UserError as error:
        print(two_lines("mfu_jax.train", error), file=sys.stderr)
        return 2
    from mfu_jax.trainer.loop import run

    if not as_json:
        return run(config, run_log)
    with contextlib.redirect_stdout(sys.stderr):
        code = run(config, run_log)
    print(_answer(config, code))
    return code


def _answer(config: Config, exit_code: int) -> str:
    """What ``--json`` prints."""
    from mfu_jax.runs.metrics.run_files import logged_summary, read_beside

    metrics, checkpoints = config.metrics_path, config.run_directory / "checkpoints"
    files = {
        "metrics": metrics,
        "tensorboard": config.tensorboard_path,
        "checkpoints": checkpoints if config.enable_checkpointing else None,
    }
    answer: dict[str, Any] = {
        name: None if isinstance(place, Path) and not place.exists() else place and str(place)
        for name, place in files.items()
    }
    summary = logged_summary(str(metrics)) if metrics else {}
    if metrics and not summary and exit_code == 0:  # nothing to do: an earlier process ended it
        summary = read_beside(str(metrics), SUMMARY)
    return json_text({"exit_code": exit_code, **answer, "summary": summary or None})


def start_run_log(config: Config) -> RunLog | None:
    """The log of this process, until its exit; it also dates a kill while JAX is imported.

    Returns:
        None if its number in the job is not known yet, because JAX has to find the cluster.
    """
    if config.metrics_path is None:
        return RunLog()
    if config.distributed and not config.coordinator_address:
        return None
    return RunLog(
        config.metrics_path,
        index=config.process_id,
        processes=config.num_processes,
        until_exit=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
