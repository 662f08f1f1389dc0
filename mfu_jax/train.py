"""Trains the reference model and logs MFU and HFU of every step.

usage: mfu-jax train [FILE.yml] [key=value …]
       python -m mfu_jax.train [FILE.yml] [key=value …]

Without a file it trains configs/demo.yml; configs/base.yml lists every key with its default;
model=NAME is short for model_name=NAME.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 (SLURM's --signal=USR1@120) finish the step, save a checkpoint
and stop; a second SIGINT ends at once. The same command resumes. Exit codes: 0 done, 2 wrong
input, 3 NaN or infinite loss, 74 a checkpoint is missing, 75 another process of the job died or,
with abort_on_hang, the run hangs, 128 + the signal's number.

example: mfu-jax train model=llama2-7b scale=tiny steps=20"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mfu_jax.errors import UserError, two_lines
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.trainer.config.pyconfig import Config, load
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
        config = load(arguments)
        run_log = start_run_log(config)
        for part in ("flax", "optax", "orbax.checkpoint"):  # they import JAX, which takes seconds
            require(part, "the trainer", install=TRAIN)
    except UserError as error:
        print(two_lines("mfu_jax.train", error), file=sys.stderr)
        return 2
    from mfu_jax.trainer.loop import run

    return run(config, run_log)


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
