"""Sinks: where a step's record goes, and how to add a destination (docs/integration.md).

Public names; where they are defined may change.
"""

from mfu_jax.logger.records.step_record import RecordError, StepRecord
from mfu_jax.logger.sinks.base import SINKS, Sink, make_sink, register_sink
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
    "RecordError",
    "Sink",
    "StepRecord",
    "TensorBoardSink",
    "WandbSink",
    "make_sink",
    "register_sink",
]
