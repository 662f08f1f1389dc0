"""The switches of metrics logging: one list for flags, mappings and keyword arguments.

Adding a setting: a field of `Settings`; of `MetricsKeys` if the trainer has it as well, with a line
in ``configs/base.yml``; a logger's, of `mfu_jax.logger.config.LoggerKeys`. Flags follow. One that a
given logger decides joins `OF_LOGGER` of `mfu_jax.instrumentation.options`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import signal
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mfu_jax.errors import UserError, nearest
from mfu_jax.hardware.chips import named
from mfu_jax.hardware.peak_sources import CALIBRATE, checked_peak
from mfu_jax.logger.config import (
    FSYNC_SECONDS,
    IN_RUN_DIR,
    LoggerConfig,
    LoggerKeys,
    convert_fields,
    described,
    place,
    setting,
)
from mfu_jax.storage.addresses import Address, check_path
from mfu_jax.storage.trace_folders import check_name
from mfu_jax.util.arguments import parse

_log = logging.getLogger("mfu_jax")
TRACED_CONVENTIONS = ("maxtext", "exact", "dense")


@dataclass(frozen=True, kw_only=True)
class MetricsKeys(LoggerKeys):
    """The keys that `Settings` shares with the trainer's config."""

    metrics_file: str = place("JSONL file, one object per step; empty: none")
    tensorboard_dir: str = place("folder for TensorBoard events; empty: none")
    prometheus_textfile: str = place(
        "file for Prometheus' node exporter, as /var/lib/…/mfu.prom; empty: none"
    )
    webhook_url: str = place(
        "of a chat, as Slack's; told of a hang, a NaN loss, an MFU down by 20%, the end"
    )
    console_line: Literal["auto", "maxtext", "short"] = setting(
        "auto", "line of a step: short, or MaxText's (maxtext); auto: short in a terminal"
    )
    fsync_seconds: float = setting(
        FSYNC_SECONDS, "seconds between fsyncs (0: every write; -1: only at checkpoints)"
    )
    profile_steps: str = setting("", "steps to trace on the device, such as 10-12; empty: none")
    profile_dir: str = place("folder for device traces; empty: tensorboard_dir")
    dump_program: str = place(
        "file for the compiled step, as step.mfu; mfu-jax compare reads it; empty: none"
    )
    convention: str = setting("maxtext", "how attention pairs are counted: maxtext, exact, dense")
    hardware: str = setting(
        "", "chip whose peak to use, such as h100; 'calibrate' measures; empty: the attached one"
    )
    peak_tflops_per_device: float | None = setting(
        None, "dense TFLOP/s of one JAX device; unset: from the table, or measured on CPUs"
    )

    def check(self) -> None:
        """Checks ranges, and looks up the chip now, not after the first step has been compiled.

        Raises:
            UserError: a value is out of range, or the chip is not known.
        """
        super().check()
        if self.hardware and self.hardware != CALIBRATE:
            named(self.hardware)
        if self.peak_tflops_per_device is not None:
            checked_peak(self.peak_tflops_per_device)
        if self.profile_steps:
            parse_steps(self.profile_steps)


@described
@dataclass(frozen=True, kw_only=True)
class Settings(MetricsKeys, LoggerConfig):
    """What a trainer switches on, for `instrument`, `MetricLogger.from_flags` and the flags.

    ``python -m mfu_jax.settings`` lists the keys with their defaults.

    Raises:
        UserError: a value is unknown or has the wrong type, or two values contradict each other.
    """

    enable_mfu: bool = setting(True, "count, time and log; false: do nothing")
    run_dir: str = place(
        "folder of the run, with the metrics file, TensorBoard's folder and the profile"
    )
    steps_per_call: int = setting(1, "steps that one call runs, as in a scan; each is logged")
    flops_source: Literal["traced", "analytic", "value"] = setting(
        "traced",
        "model FLOPs from the step's jaxpr (traced), from model_config (analytic), or from "
        "model_flops_per_device (value)",
    )
    model_flops_per_device: int | None = setting(
        None, "model FLOPs of a step on a device, for 'value'"
    )
    model_config: str = setting(
        "", "name or file of a model and key=value …, as mfu-jax flops takes them, for 'analytic'"
    )
    tokens_per_step: int | None = setting(
        None, "tokens per step over all devices, for tokens/s; unset: not shown"
    )

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.run_dir:
            for name, place in IN_RUN_DIR.items():
                object.__setattr__(self, name, getattr(self, name) or f"{self.run_dir}/{place}")
        self.check()
        if self.calls_per_step > 1 < self.steps_per_call:
            raise UserError(
                f"calls_per_step={self.calls_per_step} and "
                f"steps_per_call={self.steps_per_call}: expected at most one above 1",
                hint="leave the other out",
            )
        if self.dump_program:
            check_name(self.dump_program, "dump_program")
        _check_flops_source(self)
        if self.profile_steps and not (self.profile_dir or self.tensorboard_dir):
            raise UserError(
                f"profile_steps={self.profile_steps!r} has nowhere to write; expected "
                "profile_dir or tensorboard_dir",
                hint="usually the second flag was forgotten; pass profile_dir=profile",
            )
        if self.profile_steps:
            _check_profile_dir(self.trace_folder)

    @property
    def trace_folder(self) -> str:
        """Folder for device traces and the programs that ran in them."""
        return self.profile_dir or self.tensorboard_dir

    def outside_run_dir(self) -> dict[str, Any]:
        """The values without those that follow from `run_dir`, which another one may replace."""
        folder, places = self.run_dir, IN_RUN_DIR.items()
        inside = {name: f"{folder}/{place}" for name, place in places} if folder else {}
        return {name: value for name, value in vars(self).items() if inside.get(name, ...) != value}

    @classmethod
    def of(cls, config: Any, *, prefix: str = "", strict: bool = True) -> Settings:
        """Settings from a mapping or a config object.

        Args:
            config: a mapping from key to value, an OmegaConf or ml_collections config, a dataclass
                (as draccus makes), a fiddle config, or a namespace. Text is converted, None means
                the default.
            prefix: of our keys, such as ``mfu_``; keys without it are the trainer's.
            strict: unknown keys are errors; otherwise they belong to the trainer and are ignored,
                and so are keys that mean something else to many trainers, such as `warmup_steps`
                of a learning rate, unless `prefix` marks them as ours. A warning names those.

        Raises:
            UserError: an unknown key or value.

        >>> Settings.of({"log_period": "10", "learning_rate": 0.1}, strict=False).log_period
        10
        >>> config = {"warmup_steps": 2000, "mfu_warmup_steps": 5}
        >>> Settings.of(config, prefix="mfu_").warmup_steps
        5
        """
        values = _values_of(config)
        known = {f"{prefix}{field.name}": field.name for field in dataclasses.fields(cls)}
        ours = [key for key in values if not prefix or str(key).startswith(prefix)]
        unknown = [key for key in ours if key not in known]
        if unknown and strict:
            raise UserError(
                f"{unknown[0]!r} is not a setting of metrics logging; expected "
                f"{', '.join(sorted(known))}",
                hint=f"{nearest(unknown[0], known)}usually a misspelling, or a key of the "
                "trainer; pass strict=False where one mapping holds both",
            )
        given = {known[key]: values[key] for key in ours if key in known}
        if not strict and not prefix:
            _leave_to_the_trainer(given)
        return cls(**{name: value for name, value in given.items() if value is not None})

    def parsed_model_config(self) -> Any:
        """`model_config` in the form that `calculate_tflops_per_device` takes.

        Raises:
            UserError: it is empty, or not readable.
        """
        from mfu_jax.flops.analytic.inputs.maxtext_keys import parse_override
        from mfu_jax.flops.analytic.inputs.overrides import load_model_config

        words = parse(self.model_config.split())
        if len(words.names) != 1:
            raise UserError(
                f"model_config={self.model_config!r} names no model; expected a name or file "
                "and then key=value …; flops_source=analytic needs it",
                hint="pass, for example, model_config='llama3-8b per_device_batch_size=4 "
                "max_target_length=8192'",
            )
        overrides = {key: parse_override(key, text) for key, text in words.pairs}
        return load_model_config(words.names[0], overrides)


def _values_of(config: Any) -> Mapping[str, Any]:
    """The keys and values of a config.

    Raises:
        UserError: it has none.
    """
    if callable(getattr(config, "keys", None)):  # those of ml_collections are no `Mapping`s
        values: Mapping[str, Any] = config
        return values
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fiddle = sys.modules.get("fiddle")  # a config of it means that it is imported
    if fiddle is not None and isinstance(config, fiddle.Buildable):
        return dict(fiddle.ordered_arguments(config, include_defaults=True))
    if isinstance(config, argparse.Namespace | types.SimpleNamespace):
        return vars(config)
    raise UserError(
        f"settings of metrics logging are {config!r}; expected a mapping from key to value, or "
        "a config object",
        hint="usually an empty section of a config; pass {}, or the section itself",
    )


# Many trainers have these: of the learning rate, of the platform, of the model's sizes.
_OTHERS_USE = ("warmup_steps", "hardware", "model_config")


def _leave_to_the_trainer(given: dict[str, Any]) -> None:
    """Removes values that are more likely the trainer's own, and says so."""
    for name in _OTHERS_USE:
        if (value := given.pop(name, None)) is not None:
            _log.warning(
                "%s=%r is left to the trainer, not taken as a setting of metrics logging\nhint: "
                "pass prefix='mfu_' and the key mfu_%s where it is meant",
                *(name, value, name),
            )


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of ``10-12`` or ``10``.

    Raises:
        UserError: the text is neither.

    >>> parse_steps("10-12"), parse_steps("10")
    ((10, 12), (10, 10))
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        usual = "they are the wrong way round" if match else "another notation, such as 10:12"
        raise UserError(
            f"profile_steps={text!r}: expected the first and the last step, as 10-12, or one step",
            hint=f"usually {usual}; leave it out for no trace",
        )
    return first, last


def _check_profile_dir(folder: str) -> None:
    if isinstance(check_path(folder, "profile_dir"), Address):
        raise UserError(
            f"profile_dir={folder!r} is an object store, where the profiler cannot write; "
            "expected a local or mounted folder",
            hint="usually tensorboard_dir without a profile_dir of its own; pass "
            "profile_dir=profile",
        )


def _check_flops_source(settings: Settings) -> None:
    for source, key in (("value", "model_flops_per_device"), ("analytic", "model_config")):
        if getattr(settings, key) and settings.flops_source != source:
            raise UserError(
                f"{key}={getattr(settings, key)!r} is given, but flops_source is "
                f"{settings.flops_source!r}, which does not read it; expected "
                f"flops_source={source}",
                hint=f"set that, or leave {key} out",
            )
    if settings.flops_source == "value" and not settings.model_flops_per_device:
        raise UserError(
            "flops_source=value has no number; expected model_flops_per_device above 0",
            hint="usually the second flag was forgotten; pass it, or flops_source=traced",
        )
    if settings.flops_source == "traced" and settings.convention not in TRACED_CONVENTIONS:
        raise UserError(
            f"convention={settings.convention!r} cannot be counted on a traced function; "
            f"expected {', '.join(TRACED_CONVENTIONS)}; the others need a config",
            hint="pass flops_source=analytic with model_config=…",
        )


def _list() -> str:
    return "\n".join(
        f"{field.name:<23} {field.default!r:<11} {field.metadata['help']}"
        for field in dataclasses.fields(Settings)
    )


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `| head` is no error
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(_list())
