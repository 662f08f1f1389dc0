"""Counts many random integer loops, and prints each that is counted wrongly without saying so.

    python -m tests.campaigns.integers --count 10000 --seed 0 --counter traced

Every other one has integers from its arguments.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mfu_jax.flops.executed.control_flow import loops
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.integers import evaluation
from tests.campaigns.promises import Promise, seeded, verdict
from tests.support.integer_loops import (
    FUEL,
    ONE,
    SIZE,
    Program,
    compiled,
    random_program,
    traced,
)

START_SECONDS = 60  # for a process to start
HUNG = "skipped, it took too long"


def _counted(counter: str, program: Program, data: int, *, fused: bool) -> tuple[int, int, bool]:
    """FLOPs counted, FLOPs that run, and whether the count has a gap."""
    if counter == "traced":
        model = traced(program)
        return model.total, program.expected(data) * ONE, bool(model.unaccounted)
    executable = compiled(program, fused=fused)
    ran = int(executable(jnp.eye(SIZE), jnp.int32(data))[1])
    count = executed_flops(executable)
    return count.total, ran * ONE, bool(count.unaccounted or count.flags)


def _judged(counter: str, seed: int) -> tuple[bool, str]:
    """Whether a seed's count has a gap, and what is wrong with it."""
    uses_data, data = bool(seed % 2), seed % 10
    program = random_program(random.Random(seed), uses_data=uses_data, data=data)
    counted, ran, has_gap = _counted(counter, program, data, fused=seed % 8 < 2)
    is_wrong = (has_gap and not uses_data) or (counted != ran and not has_gap)
    return has_gap, f"{counted} counted, {ran} ran, a gap: {has_gap}" if is_wrong else ""


def _work(counter: str, seeds: Sequence[int], results: Any) -> None:
    # Ours end within FUEL iterations. Only loops that other data make endless reach the limits.
    loops.MAX_TRIPS, evaluation._MOST_EQUATIONS = 5 * FUEL, 250 * FUEL
    for seed in seeds:
        try:
            results.send(_judged(counter, seed))
        except Exception as error:  # the campaign goes on
            results.send((False, f"{type(error).__name__}: {error}"))
        if seed % 100 == 99:
            jax.clear_caches()


def _campaign(counter: str, seeds: range, seconds: float) -> Iterator[tuple[int, bool, str]]:
    """Judges seeds in a process that is replaced when one of them takes too long."""
    context = multiprocessing.get_context("spawn")
    while seeds:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(counter, seeds, theirs), daemon=True)
        worker.start()
        theirs.close()
        limit = seconds + START_SECONDS
        while seeds and ours.poll(limit):
            try:
                yield seeds[0], *ours.recv()
            except EOFError:
                break
            seeds, limit = seeds[1:], seconds
        if seeds:
            yield seeds[0], False, HUNG
            seeds = seeds[1:]
        worker.kill()
        worker.join()


def main() -> int:
    """Runs a campaign; 1 if a loop is counted wrongly without saying so.

    XLA compiles or runs a few programs without end: these are skipped.
    """
    parser = seeded(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="programs SEED * COUNT and on")
    parser.add_argument("--counter", choices=("traced", "executed"), default="traced")
    parser.add_argument("--seconds", type=float, default=30, help="limit of one program")
    given = parser.parse_args()
    promise, gaps, hung = Promise(f"integer loops, {given.counter}"), 0, 0
    seeds = range(given.seed * given.count, (given.seed + 1) * given.count)
    for seed, has_gap, finding in _campaign(given.counter, seeds, given.seconds):
        promise.count += 1
        gaps, hung = gaps + has_gap, hung + (finding == HUNG)
        promise.expect(finding in ("", HUNG), f"seed {seed}: {finding}")
        if finding:
            print(f"seed {seed}: {finding}", flush=True)
        if promise.count % 100 == 0:
            print(f"{promise.count} of {given.count}", flush=True)
    promise.worst = f"{gaps} with gaps, {hung} skipped"
    return verdict([promise])


if __name__ == "__main__":
    raise SystemExit(main())
