"""Where a step's record goes: console, JSONL, TensorBoard, CSV, or your own sink.

Weights & Biases, MLflow and Prometheus need their own packages, imported on first use.
A sink is a class with a few methods (`Sink`), registered by one decorator::

    @register_sink("mine")
    class MySink(Sink):
        def write(self, record: StepRecord) -> None: ...

One of ours is imported below and in `mfu_jax.sinks`; a flag for it is a field of
`mfu_jax.settings.MetricsKeys`, read by `sinks_of` in `mfu_jax.instrumentation.assembly`.
"""

from mfu_jax.logger.sinks.base import SINKS, Sink, StepRecord, make_sink, register_sink
from mfu_jax.logger.sinks.console import ConsoleSink
from mfu_jax.logger.sinks.csv import CsvSink
from mfu_jax.logger.sinks.jsonl import JsonlSink
from mfu_jax.logger.sinks.services import MlflowSink, PrometheusSink, WandbSink
from mfu_jax.logger.sinks.tensorboard import TensorBoardSink

__all__ = [
    "SINKS",
    "ConsoleSink",
    "CsvSink",
    "JsonlSink",
    "MlflowSink",
    "PrometheusSink",
    "Sink",
    "StepRecord",
    "TensorBoardSink",
    "WandbSink",
    "make_sink",
    "register_sink",
]
