"""`instrument`: observes a step function, analyses its programs, reads its outputs.

The way of an HFU: `instrumented_step` calls `step_observer` around the user's step. A new program
is compiled and traced by `program_analysis`, and counted on a thread of its own by `counts`
(`flops.executed.counting`). `counts.StepFlops.cost` divides by the peaks
(`hardware.step_peaks`): a `StepCost`, the shortest time in which the device could run this, which
`MetricLogger.record` takes with each step and `StepRates.at` divides by the measured time. Until
the count is done the cost is a function, which `RecordBuilder` calls.
"""
