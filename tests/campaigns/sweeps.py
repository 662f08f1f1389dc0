"""How often a sweep finds the fastest point, over random models whose best point is known.

    python -m tests.campaigns.sweeps [MODELS]

Memory and time of the models are straight lines in the batch (`planned_models`).
"""

import random
import sys
from collections import Counter

from mfu_jax.planning.sweep.running import Sweep, run
from mfu_jax.planning.sweep.space import split
from tests.support.planned_models import LIMIT, Model

SPACE = {"remat_policy": "none,minimal,full", "per_device_batch_size": "1..8"}


def main(models: int) -> None:
    points = split(SPACE)[1]
    compiles, found, verdicts, wrong, errors = Counter(), [], 0, 0, []
    for seed in range(models):
        model = Model.random(random.Random(seed))
        plans = [model.plan(point) for point in points]
        best = max(plan.tokens_per_sec_per_chip or 0 for plan in plans)
        result = run(
            Sweep(
                target="8 chips",
                points=points,
                flags=lambda point: [str(point)],
                compile=lambda point, seconds, model=model: model.plan(point),
                invalid=lambda point: "",
                analytic=model.analytic,
                limit_bytes=LIMIT,
            )
        )
        compiles[result.compiles] += 1
        if best:
            found.append(result.winner and result.winner.tokens_per_sec_per_chip == best)
        for row, plan in zip(result.rows, plans, strict=True):
            if row.source != "compiled" and row.fits is not None:
                verdicts += 1
                wrong += row.fits != plan.fits
                if plan.fits and row.step_time_seconds:
                    errors.append(abs(row.step_time_seconds / plan.step_time_seconds - 1))
    errors.sort()
    print(f"compiles: {dict(sorted(compiles.items()))}")
    print(f"fastest point found: {sum(map(bool, found))} of {len(found)}")
    print(f"verdicts without a compile: {verdicts}, wrong: {wrong}")
    print(f"times without a compile: p90 {errors[len(errors) * 9 // 10]:.1%} off")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
