"""`instrument`: observes a step function, analyses its programs, reads its outputs.

The way of an HFU: `instrumented_step` calls `step_observer` around the user's step; a new program is
compiled and traced by `program_analysis`, and counted on a thread of its own by `counts`
(`flops.executed.counting`); `counts.StepFlops.cost` divides by the peaks: a `StepCost`, which each
`MetricLogger.record` takes, and by whose shortest time `StepRates.at` divides the measured one.
"""
