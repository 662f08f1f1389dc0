"""How often a sweep finds the fastest point, over random models whose best point is known.

    python -m tests.campaigns.sweeps [--models 1000]

Memory and time of the models are straight lines in the batch (`planned_models`).
"""

import random
from collections import Counter

from mfu_jax.planning.sweep.running import Sweep, run
from mfu_jax.planning.sweep.space import split
from tests.campaigns.promises import Promise, seeded, verdict
from tests.support.planned_models import LIMIT, Model

SPACE = {"remat_policy": "none,minimal,full", "per_device_batch_size": "1..8"}


def main() -> int:
    """The fastest point is always found; 1 of 200 verdicts without a compile may be wrong."""
    parser = seeded(__doc__)
    parser.add_argument("--models", type=int, default=1000)
    given = parser.parse_args()
    best_found = Promise("sweeps over models linear in the batch")
    estimated = Promise("verdicts without a compile", allowed=0.005)
    points = split(SPACE)[1]
    compiles, errors = Counter(), []
    for seed in range(given.seed * given.models, (given.seed + 1) * given.models):
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
            best_found.count += 1
            is_found = result.winner and result.winner.tokens_per_sec_per_chip == best
            best_found.expect(is_found, f"model {seed}: the winner is {result.winner}")
        for row, plan in zip(result.rows, plans, strict=True):
            if row.source != "compiled" and row.fits is not None:
                estimated.count += 1
                estimated.expect(row.fits == plan.fits, f"model {seed}: {row}")
                if plan.fits and row.step_time_seconds:
                    errors.append(abs(row.step_time_seconds / plan.step_time_seconds - 1))
    errors.sort()
    best_found.worst = f"{max(compiles)} of {len(points)} points compiled"
    estimated.worst = f"p90 of times {errors[len(errors) * 9 // 10]:.1%} off"
    return verdict([best_found, estimated])


if __name__ == "__main__":
    raise SystemExit(main())
