"""Fits `Efficiencies.tpu_matmul` to measured runs, and predicts each run without itself.

    PYTHONPATH=… python -m scripts.comparisons.fit_plan RUNS.json cache=FOLDER

RUNS.json is a list of runs in the format of `mfu-jax plan --run`. Those with `left_out_seconds` in
compared_runs.yml are compiled without machine code (or read from the cache), and the share that
minimises the mean absolute logarithm of predicted / measured is found: a run that is slow for
reasons other than its matmuls does not move it far. Prints that share and, for each run, its
prediction, and the prediction with the share fitted to all other runs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.compilation.cache import compile_cached
from mfu_jax.planning.compilation.compiling import Limits, TooLarge
from mfu_jax.planning.measured_runs import read_run
from mfu_jax.planning.step_sources import request_for
from mfu_jax.planning.step_time.compared_runs import compared_runs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.schedule import predicted_time
from mfu_jax.planning.targets import Target
from mfu_jax.trainer.planned.planned_run import reference_keys
from mfu_jax.trainer.planned.planned_step import TrainerStep

SHARES = [share / 100 for share in range(65, 96)]


class Fitted(NamedTuple):
    """A measured run, and its prediction with each of `SHARES`."""

    name: str
    measured_seconds: float
    predicted_seconds: Mapping[float, float]


def main(argv: Sequence[str]) -> None:
    """Prints the share and the predictions."""
    runs = {run["id"]: run for run in json.loads(Path(argv[0]).read_text(encoding="utf-8"))}
    folder = Path(argv[1].removeprefix("cache="))
    fitted = [
        predict(runs[run.run], run.measured_seconds, folder)
        for run in compared_runs()
        if run.left_out_seconds is not None
    ]
    share = best_share(fitted)
    print(f"tpu_matmul: {share}")
    for run in fitted:
        others = best_share([other for other in fitted if other is not run])
        print(
            f"{run.name}: measured {run.measured_seconds}, predicted "
            f"{run.predicted_seconds[share]:.4g}, left out {run.predicted_seconds[others]:.4g} "
            f"(share {others})"
        )


def predict(run: Mapping[str, Any], measured_seconds: float, folder: Path) -> Fitted:
    """Predicts the reference model's step of a run, with each share."""
    costs, target = _compiled(run, folder)
    return Fitted(
        run["id"],
        measured_seconds,
        {
            share: predicted_time(
                costs, Durations(target=target, efficiencies=Efficiencies(tpu_matmul=share))
            ).seconds
            for share in SHARES
        },
    )


def best_share(runs: Sequence[Fitted]) -> float:
    """The share that minimises the mean absolute logarithm of predicted / measured."""
    return min(
        SHARES,
        key=lambda share: sum(
            abs(math.log(run.predicted_seconds[share] / run.measured_seconds)) for run in runs
        ),
    )


def _compiled(run: Mapping[str, Any], folder: Path) -> tuple[ProgramCosts, Target]:
    measured = read_run(run)
    source = TrainerStep(measured.target)
    keys = reference_keys(measured).keys
    program = compile_cached(
        request_for(source, measured.target, keys, measured.flags),
        folder=folder,
        limits=Limits(code_seconds=0),
        progress=lambda word: print(f"{run['id']}: {word} …", file=sys.stderr),
    ).program
    scheduled = program.program if isinstance(program, TooLarge) else program
    if scheduled is None:
        raise SystemExit(f"{run['id']}: the compiler refused it before it was scheduled")
    costs = instruction_costs(
        scheduled,
        kernel_flops=scheduled.kernel_flops,
        trip_counts=scheduled.trip_counts,
        lengths=scheduled.lengths,
    )
    return costs, measured.target


if __name__ == "__main__":
    main(sys.argv[1:])
