"""The trainer's side of the `MetricLogger`: its settings, its FLOPs and its set-up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import textwrap
from collections.abc import Iterator
from typing import Any

import jax

from mfu_jax.flops.analytic.totals import (
    calculate_tflops_per_device,
    calculate_tokens_per_device,
)
from mfu_jax.hardware.step_peaks import StepPeaks, find_peaks
from mfu_jax.instrumentation import assembly, counts
from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.instrumentation.device_trace import StepProfile
from mfu_jax.instrumentation.program_analysis import dump_step
from mfu_jax.logger.assembly import open_run_log
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.settings import MetricsKeys, Settings
from mfu_jax.storage.addresses import Address
from mfu_jax.storage.files import local_path
from mfu_jax.storage.locks import FileLock
from mfu_jax.trainer.config.messages import as_argument
from mfu_jax.trainer.config.pyconfig import Config, from_mapping
from mfu_jax.trainer.run.overheads import known_overheads, pipeline_schedule
from mfu_jax.trainer.run.stopping import StopRequest
from mfu_jax.trainer.step.state import TrainState, parameter_count

_log = logging.getLogger("mfu_jax")


def settings_of(config: Config, start_step: int = 0) -> Settings:
    """The logger settings among the keys of a config."""
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(MetricsKeys)}
    files = {
        "metrics_file": config.metrics_path,
        "tensorboard_dir": config.tensorboard_path,
        "heartbeat_file": config.heartbeat_path,
        "profile_dir": config.profile_path,
    }
    return Settings.of(
        shared
        | {key: path or "" for key, path in files.items()}
        | {"flops_source": "analytic", "start_step": start_step}
    )


def find_step_peaks(config: Config) -> StepPeaks:
    """The peaks of one device for the model's matmuls: given, from the table, or measured.

    Raises:
        UserError: the chip is not in the table and no peak is given.
    """
    model = counts.analytic_model(config, convention=config.convention)
    settings = settings_of(config)
    return find_peaks(
        jax.local_devices()[0],
        model.flops_by_dtype,
        peak_tflops_per_device=settings.peak_tflops_per_device,
        hardware_name=settings.hardware,
    )


def make_run_sinks(config: Config, settings: Settings) -> list[Sink]:
    """The sinks of the settings, with a progress bar on the console unless switched off."""
    progress = None if config.progress_bar else False
    return assembly.sinks_of(settings, total_steps=config.steps, progress=progress)


def lock_run(config: Config) -> contextlib.AbstractContextManager[object]:
    """Locks the run folder if this process writes to it.

    Raises:
        UserError: another run writes to it, or it cannot be created.
    """
    folder = config.run_directory
    writes = config.enable_checkpointing or "auto" in (config.metrics_file, config.tensorboard_dir)
    if jax.process_index() != 0 or not writes or isinstance(folder, Address):
        return contextlib.nullcontext()
    return FileLock(local_path(folder / "run.lock", "run folder"), f"run folder {str(folder)!r}")


@contextlib.contextmanager
def opened_run_log(
    config: Config,
    started: RunLog | None,
    stop: StopRequest,
    compile_log: CompileLog,
) -> Iterator[RunLog]:
    """Opens this process's run_log, unless it is open already; records how the run ended."""
    run_log = started or open_run_log(config.metrics_path, until_exit=True)
    try:
        with run_log.compiling(compile_log):
            yield run_log
        run_log.stop(stop.signal.name if stop.signal else "clean")
    except BaseException as error:
        run_log.stop(f"exception: {type(error).__name__}")
        raise
    finally:
        run_log.flush()  # one of several processes ends without its exit handlers


def count_step(config: Config, train_step: jax.stages.Compiled) -> StepFlops:
    """Counts the compiled step and explains the count, starting from the model's FLOPs."""
    return counts.count_program(train_step, model_of(config))


def model_of(config: Config) -> counts.ModelCount:
    """The model FLOPs of a step, and what its mesh executes beyond them."""
    model = counts.analytic_model(config, convention=config.convention)
    return dataclasses.replace(model, overheads=known_overheads(config))


def step_profile(
    settings: Settings, train_step: jax.stages.Compiled, flops: StepFlops, peaks: StepPeaks
) -> StepProfile:
    """Traces the steps named in the settings; writes the step's program beside the traces."""
    dump_step(settings, "train_step", train_step, flops.model)
    return StepProfile(settings, peak=lambda: peaks.main)


def make_run_logger(
    config: Config,
    settings: Settings,
    *,
    flops: StepFlops,
    state: TrainState,
    peaks: StepPeaks,
    sinks: list[Sink],
    compile_log: CompileLog,
    run_log: RunLog,
) -> MetricLogger:
    """The logger of this run, with its set-up already written."""
    cost = flops.cost(peaks, tokens_per_device=flops.model.tokens_per_device)
    logger = assembly.logger_of(
        settings, cost=cost, sinks=sinks, compile_log=compile_log, run_log=run_log
    )
    logger.write_setup(*_setup(config, state, peaks, flops))
    counts.warn_of_resharding(flops)
    return logger


def _chosen(config: Config) -> str:
    """The settings that are not those of base.yml, as arguments."""
    defaults = from_mapping({})
    return " ".join(
        f"{key}={as_argument(value)}"
        for key, value in _without_secrets(config).items()
        if value != getattr(defaults, key)
    )


def _without_secrets(config: Config) -> dict[str, Any]:
    """The config's values for logs, which others may read."""
    return dataclasses.asdict(config) | ({"webhook_url": "***"} if config.webhook_url else {})


def _setup(
    config: Config, state: TrainState, peaks: StepPeaks, flops: StepFlops
) -> tuple[dict[str, Any], dict[str, str]]:
    kind = jax.local_devices()[0].device_kind
    processes = f" ({jax.process_count()} processes)" if jax.process_count() > 1 else ""
    tflops = calculate_tflops_per_device(config, config.convention)
    weights, attention = tflops.learnable_weight, tflops.attention
    table = assembly.setup_table(
        devices=f"{jax.device_count()} × {kind}{processes}",
        peaks=peaks,
        model=flops.model,
        model_details=f"{config.convention}: weights {weights:.6g}, attention {attention:.6g}",
        tokens_per_device=calculate_tokens_per_device(config),
        flops_by_dtype=flops.executed.by_dtype,
        parameters=f"{parameter_count(state):,}",
    )
    arguments = " ".join(f"{k}={as_argument(v)}" for k, v in _without_secrets(config).items())
    texts = {"config": textwrap.fill(arguments, 100), "ledger": flops.ledger.render()}
    run = {"run": str(config.run_directory), "settings": textwrap.fill(_chosen(config), 100)}
    if schedule := pipeline_schedule(config):
        run["pipeline"] = (
            f"{schedule.stages} stages × {schedule.repeats} passes, {schedule.microbatches} "
            f"microbatches: bubble {float(schedule.bubble):.2%} of {schedule.turns} turns"
        )
    return run | table, texts
