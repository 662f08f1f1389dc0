"""Counts random masked attention, and prints each that is counted wrongly without saying so.

    python -m tests.campaigns.masks --count 5000 --seed 0

What is needed is known by running each program's jaxpr: see `tests.support.random_masks`.
"""

from __future__ import annotations

from tests.campaigns.promises import Promise, seeded, verdict
from tests.support.random_masks import judged


def main() -> int:
    """Runs a campaign; 1 if a mask is counted wrongly without saying so."""
    parser = seeded(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="programs SEED * COUNT and on")
    given = parser.parse_args()
    promise, bounds = Promise("masks, fills and flags"), 0
    for seed in range(given.seed * given.count, (given.seed + 1) * given.count):
        said = judged(seed)
        promise.count += 1
        bounds += said == "at most"
        promise.expect(said in ("exact", "at most"), f"seed {seed}: {said}")
        if promise.count % 100 == 0:
            print(f"{promise.count} of {given.count}", flush=True)
    promise.worst = f"{bounds} bounds that say so"
    return verdict([promise])


if __name__ == "__main__":
    raise SystemExit(main())
