"""How a logger counts, labels, writes and watches steps, independent of what the steps cost.

Adding a key: a field of `LoggerKeys` here, with its default and its text, and a line in
``configs/base.yml``, the trainer's manual. Flags, `mfu_jax.settings.Settings`, `LoggerConfig` and
the trainer's config inherit it.
"""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any, TypeVar

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import Address, check_path
from mfu_jax.util.values import field_types, typed

IN_RUN_DIR = {
    "metrics_file": "metrics.jsonl",
    "tensorboard_dir": "tensorboard",
    "profile_dir": "profile",
}
"""Settings that `run_dir` stands for, and their places in it."""
FSYNC_SECONDS = 30.0
"""Seconds of data that a power cut may take from a run's files."""
# A flush wakes the threads whatever the period; a longer one only means losing more in a kill.
_LONGEST_PERIOD_SECONDS = 60.0
_PERIOD_SECONDS = 0.5


_LOWEST = (
    (
        "log_period",
        1,
        "0 was meant to switch logging off; pass a large number; where the loop is not the "
        "trainer's, enable_mfu=false or sinks=[]",
    ),
    ("calls_per_step", 1, "0 was meant for one call a step; leave it out"),
    ("steps_per_call", 1, "0 was meant for one step a call; leave it out"),
    ("warmup_steps", 0, "a subtraction went wrong; pass warmup_steps=0 or leave it out"),
    ("hang_factor", 0, "-1 was meant to switch it off; pass hang_factor=0"),
    ("hang_seconds", 0, "-1 was meant to switch it off; pass hang_factor=0"),
    ("host_log_period", 0, "-1 was meant to switch it off; pass host_log_period=0"),
    ("gpu_period_seconds", 0, "-1 was meant to switch it off; pass gpu_period_seconds=0"),
    ("start_step", 0, "a subtraction went wrong; pass start_step=0 or leave it out"),
    ("model_flops_per_device", 0, "a wrong unit; leave it out if it is not known"),
    ("tokens_per_step", 0, "a wrong unit; leave it out if it is not known"),
)
"""Keys, their lowest values, and the usual cause of a lower one."""

_Class = TypeVar("_Class", bound=type)


def setting(default: Any, text: str) -> Any:
    """A field of a class of settings: its default, and what ``--help`` and `help()` say of it."""
    return dataclasses.field(default=default, metadata={"help": text})


def place(text: str) -> Any:
    """A field for a file, a folder or an address; by default there is none."""
    return dataclasses.field(default="", metadata={"help": text, "is_place": True})


def check_text(name: str, given: Any) -> None:
    """Raises a `UserError` if a path is a number."""
    if isinstance(given, int | float):
        raise UserError(
            f"{name}={given!r}: expected text",
            hint="usually 0 or false was meant to switch it off; leave it out, or pass "
            "an empty text",
        )


def described(cls: _Class) -> _Class:
    """Adds the texts of its keys to the docstring of a dataclass."""
    lines = [
        textwrap.fill(
            f"{field.name}: {field.metadata['help']}.",
            width=96,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
        for field in dataclasses.fields(cls)
    ]
    cls.__doc__ = "\n".join([cls.__doc__ or "", "    Attributes:", *lines, "    "])
    return cls


def convert_fields(settings: Any) -> None:
    """Converts each field of a frozen dataclass of settings to its declared type.

    Raises:
        UserError: a value is of another kind.
    """
    cls: type = type(settings)
    for field in dataclasses.fields(settings):
        kind, given = field_types(cls)[field.name], getattr(settings, field.name)
        if field.metadata.get("is_place"):
            check_text(field.name, given)
        hint = f"usually a misspelling; {field.name} is: {field.metadata['help']}"
        object.__setattr__(settings, field.name, typed(field.name, given, kind, hint=hint))


@dataclass(frozen=True, kw_only=True)
class LoggerKeys:
    """The keys that a logger shares with the flags and with the trainer's config."""

    log_period: int = setting(
        1,
        "steps per console line and TensorBoard point (the JSONL has every step); above 1, also "
        "the window of the rolling/ metrics",
    )
    warmup_steps: int = setting(2, "first steps, shown but excluded from summaries")
    write_period_seconds: float = setting(
        _PERIOD_SECONDS,
        "batch interval in seconds; a kill loses at most this much (0: write every step)",
    )
    heartbeat_file: str = place(
        "file rewritten every 10 s with the state and the last step; empty: none"
    )
    hang_factor: float = setting(
        50.0, "report a hang after this many median step times without a step; 0: never"
    )
    hang_seconds: float = setting(30.0, "shortest time that counts as a hang")
    abort_on_hang: bool = setting(
        False, "end the process with exit code 75 after reporting a hang; false: go on if it can"
    )
    host_log_period: int = setting(
        100, "steps between exchanges of the processes, which name slow and missing hosts; 0: none"
    )
    gpu_period_seconds: float = setting(
        10.0,
        "seconds between readings of the devices: power, clocks ([nvidia]) and counters; 0: none",
    )
    abort_on_nan_loss: bool = setting(
        False, "raise NonFiniteLossError when the loss is NaN; false: warn once and go on"
    )
    abort_on_inf_loss: bool = setting(False, "the same for an infinite loss")

    def check(self) -> None:
        """Checks the ranges of its keys.

        Raises:
            UserError: a number is out of range, or `heartbeat_file` is not a local path.
        """
        for name, lowest, cause in _LOWEST:
            if not (getattr(self, name, lowest) or 0) >= lowest:
                raise UserError(
                    f"{name}={getattr(self, name)}: expected at least {lowest}",
                    hint=f"usually {cause}",
                )
        if isinstance(check_path(self.heartbeat_file, "heartbeat_file"), Address):
            raise UserError(
                f"heartbeat_file={self.heartbeat_file!r} is an address; expected a file of "
                "this machine, or of a folder mounted on it",
                hint="pass another path",
            )
        if not 0 <= self.write_period_seconds <= _LONGEST_PERIOD_SECONDS:
            raise UserError(
                f"write_period_seconds={self.write_period_seconds}: expected 0 (each step at "
                f"once) to {_LONGEST_PERIOD_SECONDS:.0f}",
                hint="usually milliseconds were meant, or -1 for never; leave it out for "
                f"{_PERIOD_SECONDS}",
            )


@described
@dataclass(frozen=True, kw_only=True)
class LoggerConfig(LoggerKeys):
    """Options of a `MetricLogger`.

    Raises:
        UserError: a value is of another kind or out of range, or `heartbeat_file` is not a local
            path.
    """

    start_step: int = setting(0, "number of the first step, above 0 after a resume")
    calls_per_step: int = setting(
        1, "calls that make one step together, as of micro-batches whose gradients are accumulated"
    )

    def __post_init__(self) -> None:
        convert_fields(self)
        self.check()
