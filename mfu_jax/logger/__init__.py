"""Times steps, turns each into a record, and hands the records to the sinks.

On the loop's thread `MetricLogger.record` asks `timing.timer.StepTimer`, which returns the step
before, and leaves that for the recorder's thread. There `run_log.recorder` has
`run_log.record_builder` make a `StepRecord` of it, shows it to the monitors, and puts it in the
run's log, from which a `run_log.follower` per sink, on a thread of its own, calls the sink;
`sinks.console.format_short` makes the line of a terminal, `format_step` that of a file. The
file of events has a follower of its own, `run_log.writer`.

`close` waits for the step in flight, has the recorder and every follower write what they have,
stops the recorder, and has the followers write the summary; the log is closed last.
"""
