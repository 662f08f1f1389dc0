"""How a logger counts and labels steps, independent of what the steps cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import Address, check_path

# A flush wakes the threads whatever the period; a longer one only means losing more in a kill.
_LONGEST_PERIOD_SECONDS = 60.0
_PERIOD_SECONDS = 0.5


class ConfigFields(TypedDict, total=False):
    """The fields of `LoggerConfig` as keyword arguments."""

    start_step: int
    warmup_steps: int
    log_period: int
    abort_on_nan_loss: bool
    abort_on_inf_loss: bool
    is_main_process: bool | None
    queue_size: int
    write_period_seconds: float
    hang_factor: float
    hang_seconds: float
    hang_folder: str
    heartbeat_file: str
    abort_on_hang: bool
    host_log_period: int
    hosts_folder: str
    gpu_period_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Options of a `MetricLogger`.

    Attributes:
        start_step: number of the first step, above 0 after a resume.
        warmup_steps: first steps, shown but excluded from every summary.
        log_period: every `log_period`-th step goes to all sinks, the others only to sinks that
            keep every step. If above 1, also the window of the ``rolling/`` metrics.
        abort_on_nan_loss: raise `NonFiniteLossError` once the metric ``loss`` is NaN; by default
            the first NaN logs a warning, and the run goes on.
        abort_on_inf_loss: the same for infinities.
        is_main_process: whether this process writes; None: only process 0 does.
        queue_size: steps that may wait to be turned into records. The queue fills up only if that
            is stuck or too slow; after one second of waiting, and from then on 1% of the time, the
            oldest steps are dropped.
        write_period_seconds: steps shorter than this are written in batches, which is cheaper; a
            killed process loses at most the steps of its last period. 0: write each step at once.
        hang_factor: number of median step times without a completed step that counts as a hang and
            is reported (`mfu_jax.logger.watchdog`); 0: never.
        hang_seconds: shortest time that counts as a hang.
        hang_folder: where the stacks of a hung run are written; empty: the temporary folder.
        heartbeat_file: rewritten every ten seconds for a supervisor; empty: none.
        abort_on_hang: end the process with exit code 75 after reporting a hang; by default it is
            only reported, and the run goes on if it can.
        host_log_period: steps between exchanges among the job's processes, which identify slow
            and missing hosts (`mfu_jax.logger.hosts`); 0: no exchange.
        hosts_folder: process 0 writes the result of the last exchange to ``<hosts_folder>.json``;
            if JAX has no key-value store, the processes exchange files in it. Empty: neither.
        gpu_period_seconds: how often power and clocks of NVIDIA GPUs are read; 0: never.

    Raises:
        UserError: a number is out of range, or `heartbeat_file` is not a local path.
    """

    start_step: int = 0
    warmup_steps: int = 2
    log_period: int = 1
    abort_on_nan_loss: bool = False
    abort_on_inf_loss: bool = False
    is_main_process: bool | None = None
    queue_size: int = 256
    write_period_seconds: float = _PERIOD_SECONDS
    hang_factor: float = 50.0
    hang_seconds: float = 30.0
    hang_folder: str = ""
    heartbeat_file: str = ""
    abort_on_hang: bool = False
    host_log_period: int = 100
    hosts_folder: str = ""
    gpu_period_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.log_period < 1:
            raise UserError(
                f"log_period={self.log_period}: expected at least 1; usually 0 was meant to switch "
                f"logging off; that is enable_mfu=false, or sinks=[] for a MetricLogger"
            )
        if self.warmup_steps < 0:
            raise UserError(
                f"warmup_steps={self.warmup_steps}: expected at least 0; usually a subtraction "
                f"went wrong; pass warmup_steps=0 or leave it out"
            )
        if isinstance(check_path(self.heartbeat_file, "heartbeat_file"), Address):
            raise UserError(
                f"heartbeat_file={self.heartbeat_file!r} is an address; expected a file of this "
                f"machine, or of a folder mounted on it; pass another path"
            )
        if not 0 <= self.write_period_seconds <= _LONGEST_PERIOD_SECONDS:
            raise UserError(
                f"write_period_seconds={self.write_period_seconds}: expected 0 (each step at once) "
                f"to {_LONGEST_PERIOD_SECONDS:.0f}; usually milliseconds were meant, or -1 for "
                f"never; leave it out for {_PERIOD_SECONDS}"
            )
        for name, off in (
            ("hang_factor", "hang_factor"),
            ("hang_seconds", "hang_factor"),
            ("host_log_period", "host_log_period"),
            ("gpu_period_seconds", "gpu_period_seconds"),
        ):
            if not getattr(self, name) >= 0:
                raise UserError(
                    f"{name}={getattr(self, name)}: expected at least 0; usually -1 was meant to "
                    f"switch it off; pass {off}=0"
                )
