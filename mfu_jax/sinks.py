"""Sinks: where a step's record goes, and how to add a destination (docs/integration.md).

Public names; where they are defined may change.
"""

from mfu_jax.logger.sinks import (
    SINKS,
    ConsoleSink,
    CsvSink,
    JsonlSink,
    MlflowSink,
    PrometheusSink,
    Sink,
    StepRecord,
    TensorBoardSink,
    WandbSink,
    make_sink,
    register_sink,
)
from mfu_jax.logger.sinks.base import RecordError

__all__ = [
    "SINKS",
    "ConsoleSink",
    "CsvSink",
    "JsonlSink",
    "MlflowSink",
    "PrometheusSink",
    "RecordError",
    "Sink",
    "StepRecord",
    "TensorBoardSink",
    "WandbSink",
    "make_sink",
    "register_sink",
]
