"""Predicts the time and memory of a step on chips that are not attached.

The way of a planned time: `result.planner.make_plan` asks `flops.executed` for the costs of each
instruction, `step_time.durations` for their times on the chip (its row of ``hardware.yml``,
`Efficiencies`, and for collectives `links` and `nccl`), and `step_time.schedule` walks the program.
``mfu-jax profile TRACES --plan plan.json`` names the operation that is wrong.
"""
