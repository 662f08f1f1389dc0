"""What the trainer tells the `MetricLogger`: model and executed FLOPs, peak, ledger, sinks."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from typing import Any

import jax

from mfu_jax.flops.analytic.totals import calculate_tflops_per_device, calculate_tokens_per_device
from mfu_jax.hardware.step_peaks import StepPeaks, find_peaks
from mfu_jax.instrumentation import step_flops
from mfu_jax.instrumentation.step_flops import StepFlops
from mfu_jax.logger.compile_events import CompileLog
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.sinks import Sink, make_sink
from mfu_jax.trainer.pyconfig import Config
from mfu_jax.trainer.state import TrainState, parameter_count


def find_step_peaks(config: Config) -> StepPeaks:
    """The peaks of one device, first of all in the working dtype: flag, table, or measured on CPUs.

    Raises:
        UserError: the chip is in no table and no override is given.
    """
    return find_peaks(
        jax.local_devices()[0],
        {config.dtype: 1},
        peak_tflops_per_device=config.peak_tflops_per_device,
        hardware_name=config.hardware,
    )


def make_sinks(config: Config, start_step: int) -> list[Sink]:
    """Console, JSONL and TensorBoard, as configured; none on processes other than the first.

    Raises:
        UserError: an output folder cannot be written.
    """
    if jax.process_index() != 0:
        return []
    wants_bar = config.progress_bar and sys.stderr.isatty()
    sinks = [make_sink("console", total_steps=config.steps, progress=wants_bar)]
    if config.metrics_path is not None:
        sinks.append(make_sink("jsonl", config.metrics_path, resume_from_step=start_step))
    if config.tensorboard_path is not None:
        sinks.append(make_sink("tensorboard", config.tensorboard_path, resume_from_step=start_step))
    return sinks


def count_step(config: Config, train_step: jax.stages.Compiled) -> StepFlops:
    """Counts the compiled step and explains the count, from the model's FLOPs on."""
    model = step_flops.analytic_model(config, convention=config.convention)
    return step_flops.count_program(train_step, model)


def make_logger(
    config: Config,
    *,
    flops: StepFlops,
    state: TrainState,
    peaks: StepPeaks,
    sinks: list[Sink],
    start_step: int,
    compile_log: CompileLog,
) -> MetricLogger:
    """The logger of this run, with its set-up information already written."""
    cost = flops.cost(peaks, tokens_per_device=flops.model.tokens_per_device, hfu_source="executed")
    logger = MetricLogger(
        **dataclasses.asdict(cost),
        sinks=sinks,
        start_step=start_step,
        warmup_steps=config.warmup_steps,
        log_period=config.log_period,
        abort_on_nan_loss=config.abort_on_nan_loss,
        abort_on_inf_loss=config.abort_on_inf_loss,
        compile_log=compile_log,
    )
    values, texts = _setup(config, state, peaks, flops)
    logger.write_setup(values, texts)
    return logger


def _setup(
    config: Config, state: TrainState, peaks: StepPeaks, flops: StepFlops
) -> tuple[dict[str, Any], dict[str, str]]:
    tflops = calculate_tflops_per_device(config, config.convention)
    device = jax.local_devices()[0]
    values = {
        "run": str(config.run_directory),
        "devices": f"{jax.device_count()} × {device.device_kind} ({jax.process_count()} processes)",
        "peak of one device": str(peaks.main),
        "number of parameters": f"{parameter_count(state):,}",
        "model TFLOP per device per step": (
            f"{tflops.total:.6g} ({config.convention}: weights {tflops.learnable_weight:.6g}, "
            f"attention {tflops.attention:.6g})"
        ),
        "tokens per device per step": calculate_tokens_per_device(config),
    }
    notes = peaks.notes(flops.executed.by_dtype)
    values |= {f"note on peaks ({i})": text for i, text in enumerate(notes, 1)}
    settings = " ".join(f"{k}={_as_argument(v)}" for k, v in dataclasses.asdict(config).items())
    return values, {"config": textwrap.fill(settings, 100), "ledger": flops.ledger.render()}


def _as_argument(value: object) -> str:
    """A value as the command line takes it, so that a logged config can be run again."""
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
