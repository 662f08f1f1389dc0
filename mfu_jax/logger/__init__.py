"""Times steps, turns each into a record, and hands the records to the sinks.

On the loop's thread `MetricLogger.record` asks `timing.timer.StepTimer`, which returns the step
before, and leaves that for `delivery.builder_thread`. There `delivery.pipeline` has
`run_log.record_builder` make a `StepRecord` of it, shows it to the monitors, and gives it to a
`delivery.sink_worker` per sink, whose thread calls the sink; `sinks.console.format_step` makes the
line.
"""
