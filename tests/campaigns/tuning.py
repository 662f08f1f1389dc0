"""How much of a grid's time `tune` needs to find its fastest point, over 20 seeds.

    python -m tests.campaigns.tuning [--rounds 5] [--times times.json]

Times every point of a small grid once, with real steps of the reference trainer's tiny model on
this machine: compile, then `--rounds` rounds over the whole grid, of which each point's fastest
counts. Times are CPU seconds of one core, so that other work on the machine is not in them. The
search then runs on these times from a random start; it is told a time only after it has spent it.
``--times`` keeps them, for another search over the same grid.
"""

import itertools
import json
import math
import os
import random
import time
from pathlib import Path

from mfu_jax.planning.tune.evidence import Trial, TrialLog
from mfu_jax.planning.tune.running import Tuning, tune
from mfu_jax.planning.tune.space import SearchAxis, Space
from scripts import results
from tests.campaigns.promises import Promise, seeded, verdict

GRID = {
    "per_device_batch_size": ("2", "4", "8"),
    "remat_policy": ("none", "full"),
    "num_vocab_tiling": ("1", "4"),
    "scan_layers": ("true", "false"),
}
SEEDS, SHARE, NEAR = 20, 0.4, 1.03
BUDGET = 0.36  # of the grid's time: the last run may take longer than those before it
STEPS = 3  # of a point in a round
LENGTH = 128  # tokens of a sequence
MODEL = {
    "num_decoder_layers": "2",
    "max_target_length": str(LENGTH),
    "dataset_type": "synthetic",
}


def space(start=(0, 0, 0, 0)):
    """The grid, searched from `start`."""
    return Space(
        [
            SearchAxis(name=name, choices={text: {name: text} for text in texts}, start=begin)
            for (name, texts), begin in zip(GRID.items(), start, strict=True)
        ]
    )


def timed_grid(rounds):
    """Point → seconds for a token, and what it took to find out, as a trial would."""
    grid = space()
    points = list(itertools.product(*map(range, grid.sizes)))
    repeats, costs = {}, {}
    for point in points:
        began = time.process_time()
        repeats[point] = _step_of(grid.settings(point))
        repeats[point]()
        costs[point] = time.process_time() - began
        print(f"{grid.labels(point)}: ready after {costs[point]:.1f} s", flush=True)
    best = dict.fromkeys(points, math.inf)
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(points)
        for point in points:
            began = time.process_time()
            repeats[point]()
            seconds = time.process_time() - began
            costs[point] += seconds
            tokens = LENGTH * int(grid.labels(point)["per_device_batch_size"])
            best[point] = min(best[point], seconds / STEPS / tokens)
    return best, costs


def _step_of(settings):
    """A function that runs `STEPS` steps of the trainer."""
    import jax

    from mfu_jax.trainer.config.pyconfig import load
    from mfu_jax.trainer.data.batches import make_iterator
    from mfu_jax.trainer.step.mesh import make_mesh, put_batch, rows_per_process, with_mesh_sizes
    from mfu_jax.trainer.step.state import abstract_state, resolve_attention
    from mfu_jax.trainer.step.train_step import compile_train_step

    words = [f"{key}={text}" for key, text in {**MODEL, **settings}.items()]
    config = with_mesh_sizes(load(["configs/base.yml", *words]))
    mesh = make_mesh(config)
    config = resolve_attention(config, mesh)
    shapes = abstract_state(config, mesh)
    step = compile_train_step(config, mesh, shapes)
    data = make_iterator(
        config, split="train", rows_per_process=rows_per_process(config, mesh), accumulation=1,
        share=0, shares=1,
    )  # fmt: skip
    batch = put_batch(next(data), mesh)
    held = [jax.tree.map(_filled, shapes)]

    def repeat():
        for _ in range(STEPS):
            held[0], metrics = step(held[0], batch)
        jax.block_until_ready(metrics)

    return repeat


def _filled(shape):
    """An array of that shape and sharding; its values decide nothing here, and need no program."""
    import jax
    import numpy as np

    value = 0.01 if np.issubdtype(shape.dtype, np.floating) else 0
    return jax.device_put(np.full(shape.shape, value, shape.dtype), shape.sharding)


def searched(best, costs, seed):
    """What a search from a random start finds, and the seconds that it spends."""
    rng = random.Random(seed)
    grid = space([rng.randrange(len(texts)) for texts in GRID.values()])
    spent = [0.0]

    def run(point, seconds):
        spent[0] += costs[point]
        return Trial(
            values={}, by="run", source="measured", fits=True, step_time_seconds=best[point]
        )

    whole = sum(costs.values())
    result = tune(
        Tuning(
            target="recorded",
            space=grid,
            flags=lambda point: [str(point)],
            run=run,
            budget_seconds=BUDGET * whole,
            most_runs=grid.size,
            seed=seed,
            monotonic=lambda: spent[0],
        ),
        TrialLog(None, {}),
    )
    return result.winner.step_time_seconds / min(best.values()), spent[0] / whole, result.runs


def main() -> int:
    """Within 3% of the fastest point in at most 40% of the grid's time, for each seed."""
    parser = seeded(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=Path, help="JSON file of the timed grid, made if absent")
    parser.add_argument("--write", action="store_true", help="adds the result to scripts/results")
    given = parser.parse_args()
    if given.times and given.times.exists():
        held = [(tuple(point), *rest) for point, *rest in json.loads(given.times.read_text())]
    else:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores
        best, costs = timed_grid(given.rounds)
        held = [(point, best[point], costs[point]) for point in best]
        if given.times:
            given.times.write_text(json.dumps(held))
    best = {point: seconds for point, seconds, _ in held}
    costs = {point: seconds for point, _, seconds in held}
    promise = Promise("searches over recorded times")
    found = []
    for seed in range(given.seed * SEEDS, (given.seed + 1) * SEEDS):
        over, share, runs = searched(best, costs, seed)
        found.append((over, share, runs))
        promise.count += 1
        is_kept = over <= NEAR and share <= SHARE
        promise.expect(is_kept, f"seed {seed}: {over - 1:.1%} slower, {share:.0%} of the time")
    over, share, runs = (sorted(column) for column in zip(*found, strict=True))
    promise.worst = f"{over[-1] - 1:.1%} slower, {share[-1]:.0%} of the grid's time"
    print(f"median: {share[SEEDS // 2]:.0%} of the time, {runs[SEEDS // 2]} of {len(best)} runs")
    if given.write:
        spread = max(best.values()) / min(best.values()) - 1
        results.write(
            "tuning",
            "searches over the recorded times of a grid of real steps, 20 seeds",
            [
                {
                    "grid": " × ".join(f"{len(texts)} {name}" for name, texts in GRID.items()),
                    "slowest point": f"{spread:.0%} slower",
                    "whole grid": f"{sum(costs.values()):.0f} s",
                    "found within 3%": f"{promise.count - len(promise.failures)} of {SEEDS}",
                    "worst": f"{over[-1] - 1:.1%} slower",
                    "time, median": f"{share[SEEDS // 2]:.0%}",
                    "time, most": f"{share[-1]:.0%}",
                    "runs, median": runs[SEEDS // 2],
                }
            ],
        )
    return verdict([promise])


if __name__ == "__main__":
    raise SystemExit(main())
