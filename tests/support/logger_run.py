"""A `MetricLogger` on a fake clock and device."""

from typing import Any

from mfu_jax.logger.metric_logger import MetricLogger
from tests.support.fake_device import FakeClock, FakeDevice, FakeWatcher, ListSink

# One step of a device of 1000 FLOP/s.
RUN_COST: dict[str, Any] = {
    "model_flops_per_device": 400,
    "executed_flops_per_device": 500,
    "tokens_per_device": 64,
    "peak_flops_per_sec": 1000.0,
}


class Run:
    """A logger with a fake device; a step costs `RUN_COST` unless `options` say otherwise."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.device = FakeDevice(self.clock)
        self.sink = ListSink()
        defaults: dict[str, Any] = {**RUN_COST, "warmup_steps": 0, "sinks": [self.sink]}
        self.logger = MetricLogger(
            clock=self.clock.wall,
            monotonic=self.clock.monotonic,
            watcher=FakeWatcher(self.clock),
            **(defaults | options),
        )

    def steps(self, *seconds: float, start: int = 0, loss: float = 1.0) -> None:
        for step, duration in enumerate(seconds, start):
            self.logger.record(step, self.device.run(duration, loss))
