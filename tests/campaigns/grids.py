"""Counts many random Pallas kernels whose blocks overhang their arrays; none is silently wrong.

python -m tests.campaigns.grids --count 5000 --seed 0
"""

from __future__ import annotations

import random

import jax

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from tests.campaigns.promises import Promise, seeded, verdict
from tests.support.pallas_grids import (
    function,
    in_blocks,
    needed,
    on_tpu,
    pipeline_function,
    pretended_tpu,
    random_grid,
    random_pipeline,
    tpu_program,
)

PER_PROGRAM = 25  # one in so many is lowered for a TPU, for the executed count of its body


def main() -> int:
    """Runs the campaign; 1 if a kernel is counted wrongly, or flagged though all is known."""
    parser = seeded(__doc__)
    parser.add_argument("--count", type=int, default=5000, help="kernels SEED * COUNT and on")
    given = parser.parse_args()
    promise = Promise("Pallas blocks beyond their arrays, traced", count=given.count)
    executed = Promise("the same, executed", count=given.count // PER_PROGRAM)
    pipelines = Promise("emit_pipeline, also on a mesh", count=given.count // PER_PROGRAM)
    beyond = 0
    for seed in range(given.seed * given.count, (given.seed + 1) * given.count):
        grid = random_grid(random.Random(seed))
        call, arguments = function(grid)
        count = count_model_flops(call, *arguments)
        beyond += bool(count.overhang)
        inside = needed(grid)
        is_right = count.total == inside and not count.unaccounted
        promise.expect(is_right, f"seed {seed}: {count.total} counted, {inside} inside: {grid}")
        if seed % PER_PROGRAM == 0:
            grid = on_tpu(grid, random.Random(seed))
            call, arguments = function(grid)
            kernels = pallas_kernel_flops(call, *arguments)
            ran = executed_flops(tpu_program(call, arguments), kernel_flops=kernels)
            found, wanted = (ran.total, ran.on_hardware), (needed(grid), in_blocks(grid))
            is_right = found == wanted and not ran.unaccounted
            executed.expect(is_right, f"seed {seed}: {found} executed, {wanted} right: {grid}")
            pipelines.expect(*_pipeline(seed))
        if seed % 100 == 99:
            jax.clear_caches()
    promise.worst = f"{beyond} overhang"
    return verdict([promise, executed, pipelines])


def _pipeline(seed: int) -> tuple[bool, str]:
    """Whether both counts of a pipeline are right, or more and say so."""
    pipeline = random_pipeline(random.Random(seed))
    call, arguments = pipeline_function(pipeline)
    with pretended_tpu():
        count = count_model_flops(call, *arguments)
        kernels = pallas_kernel_flops(call, *arguments)
    ran = executed_flops(tpu_program(call, arguments), kernel_flops=kernels)
    is_bound = bool(count.unaccounted) and count.total > pipeline.needed
    is_right = ran.total == count.total and ran.on_hardware == pipeline.in_blocks
    is_right &= is_bound or (count.total == pipeline.needed and not count.unaccounted)
    return is_right, f"seed {seed}: {count.total} and {ran.total} for {pipeline}"


if __name__ == "__main__":
    raise SystemExit(main())
