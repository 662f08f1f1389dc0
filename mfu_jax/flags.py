"""Command-line flags that turn the metrics on in any trainer.

::

    mfu_jax.flags.define()                                   # beside the trainer's own flags
    …
    train_step = mfu_jax.instrument(train_step, settings=mfu_jax.flags.settings())

or, for a loop that calls ``logger.record(step, metrics)`` itself::

    logger = mfu_jax.MetricLogger.from_flags(train_step, state, batch)

For argparse use `add_arguments` and `from_arguments`; for any config object, `from_mapping`. All of
them, and `settings`, take a ``prefix="mfu_"`` for a trainer that has such names itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags as absl_flags

from mfu_jax.errors import UserError, first_line, two_lines
from mfu_jax.instrumentation import assembly
from mfu_jax.instrumentation.jitting import jitted, name_of
from mfu_jax.instrumentation.options import StepOptions, checked_config
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.settings import Settings
from mfu_jax.util.failsafe import failsafe
from mfu_jax.util.values import field_types, given_kind

from_mapping = Settings.of
_NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def define(flag_values: absl_flags.FlagValues = absl_flags.FLAGS, *, prefix: str = "") -> None:
    """Defines an absl flag for every key of `Settings`; call it before ``app.run``.

    A wrong value ends the program with one line when the flags are parsed.

    Args:
        flag_values: where to define them; by default, the program's flags.
        prefix: of every name, such as ``mfu_``; then the same for `settings`.

    Raises:
        UserError: the trainer already has a flag with one of these names.
    """
    for field in dataclasses.fields(Settings):
        kind = given_kind(field_types(Settings)[field.name])
        choices = typing.get_args(kind)
        options: dict[str, Any] = {"help": field.metadata["help"], "flag_values": flag_values}
        name = f"{prefix}{field.name}"
        try:
            if choices:
                absl_flags.DEFINE_enum(name, str(field.default), choices, **options)
            else:
                _DEFINE[kind](name, field.default, **options)
        except absl_flags.DuplicateFlagError as error:
            raise _defined_twice(field.name, prefix, error) from error
    absl_flags.register_multi_flags_validator(
        [f"{prefix}{name}" for name in _NAMES],
        functools.partial(_check, prefix=prefix),
        flag_values=flag_values,
    )


def _defined_twice(name: str, prefix: str, error: Exception) -> UserError:
    return UserError(
        f"flag --{prefix}{name} is defined twice ({error}); expected one definition",
        hint="usually the trainer has a flag of that name; pass another prefix, as "
        f"prefix='mfu_', or the values themselves: instrument(step, {name}=…)",
    )


def _check(values: Mapping[str, Any], prefix: str) -> bool:
    try:
        chosen = Settings.of(values, prefix=prefix)
        if chosen.flops_source == "analytic":
            chosen.parsed_model_config()
    except UserError as error:  # absl would print the values of all flags before a ValidationError
        raise absl_flags.IllegalFlagValueError(str(error)) from error
    return True


_DEFINE: Mapping[type, Callable[..., Any]] = {
    bool: absl_flags.DEFINE_boolean,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    str: absl_flags.DEFINE_string,
}


def settings(
    flag_values: absl_flags.FlagValues = absl_flags.FLAGS, *, prefix: str = ""
) -> Settings:
    """The settings from the parsed flags.

    Args:
        flag_values: the program's flags.
        prefix: as given to `define`.

    Raises:
        UserError: a value is wrong, `define` was not called, or the flags are not parsed yet.
    """
    if missing := [name for name in _NAMES if f"{prefix}{name}" not in flag_values]:
        raise UserError(
            f"there is no flag --{prefix}{missing[0]}; expected mfu_jax.flags.define() before "
            "app.run",
            hint="usually that line is missing, is under `if __name__`, or has another prefix; "
            "call it at import",
        )
    try:
        return Settings.of({name: getattr(flag_values, f"{prefix}{name}") for name in _NAMES})
    except absl_flags.UnparsedFlagAccessError as error:
        raise UserError(
            f"the flags are not parsed yet ({error}); expected a call from main()",
            hint="usually settings() is at the top of a module; call it after app.run has started",
        ) from error


def add_arguments(parser: argparse.ArgumentParser, *, prefix: str = "") -> None:
    """Adds ``--metrics_file`` and all other keys of `Settings` to an argparse parser.

    A switch is written as with absl: ``--enable_mfu=false`` or ``--noenable_mfu``.

    Args:
        parser: the trainer's.
        prefix: of every name, such as ``mfu_``; then the same for `from_arguments`.

    Raises:
        UserError: the trainer already has an argument with one of these names.
    """
    group = parser.add_argument_group("metrics (mfu_jax)")
    for field in dataclasses.fields(Settings):
        kind = given_kind(field_types(Settings)[field.name])
        choices = typing.get_args(kind)
        name = f"{prefix}{field.name}"
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
        try:
            group.add_argument(
                f"--{name}",
                help=field.metadata["help"].replace("%", "%%"),
                choices=choices or None,
                metavar=None if choices else kind.__name__.upper(),
                **switch,
            )
            if kind is bool:
                off: dict[str, Any] = {"action": "store_const", "const": "false", "dest": name}
                group.add_argument(f"--no{name}", help=argparse.SUPPRESS, **off)
        except argparse.ArgumentError as error:
            raise _defined_twice(field.name, prefix, error) from error


def from_arguments(args: argparse.Namespace, *, prefix: str = "") -> Settings:
    """The settings from the arguments that `add_arguments` added.

    A wrong value ends the program with two lines and exit code 2, as argparse's own errors do.

    Args:
        args: from ``parser.parse_args()``.
        prefix: as given to `add_arguments`.

    Raises:
        UserError: `add_arguments` was not called.
        SystemExit: a value is wrong.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser, prefix="mfu_")
    >>> from_arguments(parser.parse_args(["--mfu_log_period=10"]), prefix="mfu_").log_period
    10
    """
    given = vars(args)
    if missing := [name for name in _NAMES if f"{prefix}{name}" not in given]:
        raise UserError(
            f"there is no argument --{prefix}{missing[0]}; expected add_arguments(parser) "
            "before parse_args",
            hint="usually that line is missing, or has another prefix; add it",
        )
    try:
        return Settings.of({name: given[f"{prefix}{name}"] for name in _NAMES})
    except UserError as error:
        print(two_lines(f"{Path(sys.argv[0]).name}: error", error), file=sys.stderr)
        raise SystemExit(2) from error


def make_logger(
    settings: Settings, step: Callable[..., Any], *args: Any, config: Any = None, **kwargs: Any
) -> MetricLogger | DisabledLogger:
    """A logger that knows the cost of ``step(*args, **kwargs)``, for loops that call ``record``.

    The step is compiled here; the loop then gets the same executable from JAX's cache.

    Args:
        settings: from `settings`, `from_arguments` or `from_mapping`.
        step: the jitted step; a plain function is jitted in order to count it.
        *args: arguments like the loop's; `jax.ShapeDtypeStruct`s are enough.
        config: model config to count FLOPs from, as ``flops_source=analytic`` does with
            `Settings.model_config`.
        **kwargs: keyword arguments.

    Raises:
        UserError: the step does not take these arguments, a setting is wrong, or an output folder
            cannot be written. Work that cannot be counted gives a warning, and MFU is left out.
    """
    if not settings.enable_mfu:
        return DisabledLogger()
    if settings.profile_steps:
        raise UserError(
            f"profile_steps={settings.profile_steps!r} and a loop that calls record(); "
            "expected a step called through instrument(step, settings=…)",
            hint="usually the flag was set along with the others; leave it out, or profile "
            "these steps with jax.profiler.trace",
        )
    if config is not None:
        settings = dataclasses.replace(settings, flops_source="analytic")
    config = checked_config(settings, config)
    sinks, compile_log, name = assembly.sinks_of(settings), CompileLog(), name_of(step)
    function, lowered = _lowered(step, args, kwargs)
    analyse = functools.partial(
        ProgramAnalysis,
        options=StepOptions(settings, config),
        lowered=lowered,
        name=name,
        boundary=compile_log.boundary,
        calls_per_step=settings.calls_per_step,
    )
    program: ProgramAnalysis | None = None
    with failsafe(f"MFU of {name} is not known", compile_log.boundary):
        program = analyse(function, args, kwargs)
    flops = None if program is None else program.count()
    logger = assembly.logger_of(
        settings,
        cost=StepCost(model_flops_per_device=None) if program is None else program.cost_of_step,
        sinks=sinks,
        compile_log=compile_log,
    )
    texts = {} if flops is None else {"ledger": flops.ledger.render()}
    logger.write_setup({} if program is None else program.setup("what record() is given"), texts)
    return logger


def logger_from_flags(
    step: Callable[..., Any],
    *args: Any,
    flag_values: absl_flags.FlagValues = absl_flags.FLAGS,
    prefix: str = "",
    config: Any = None,
    **kwargs: Any,
) -> MetricLogger | DisabledLogger:
    """`make_logger` with the settings from the parsed flags."""
    chosen = settings(flag_values, prefix=prefix)
    return make_logger(chosen, step, *args, config=config, **kwargs)


def _lowered(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """`step`, jitted, and its lowering for these arguments."""
    name = name_of(step)
    try:
        function = jitted(step, name, None)
        return function, function.lower(*args, **kwargs)
    except UserError:
        raise
    except (jax.errors.JAXTypeError, TypeError, ValueError) as error:
        raise UserError(
            f"{name} cannot be compiled for the example arguments ({type(error).__name__}: "
            f"{first_line(error)}); expected those of a call in the loop",
            hint="usually one is missing or has another shape; pass them as from_flags(step, "
            "*args)",
        ) from error
