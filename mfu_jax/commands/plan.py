"""Whether a step fits on chips that are not here, how long it takes there, and what limits it.

usage: mfu-jax plan [FILE.yml] topology=v5p:8x8x8 [key=value …] [--json]
       mfu-jax plan PROGRAM.mfu topology=v5p:8x8x8 [model=N tokens_per_step=N] [--json]
       mfu-jax plan --maxtext topology=v5p:8x8x8 model_name=… [key=value …] [--json]
       mfu-jax plan --run RUN.json|- [--json]

The first form compiles the reference model's train step for the chips, in a process of its own;
keys are those of configs/base.yml. Without a mesh, weights are split over all devices (fsdp). The
second reads what mfu_jax.dump wrote. The third compiles MaxText's own step; keys are MaxText's. The
fourth reads a measured run, one JSON object with MaxText's keys, mesh, remat and XLA flags.
  maxtext_python=FILE  the interpreter that has MaxText (Python 3.12 or newer), if not this one
  topology=NAME:SHAPE  TPU chips: v5p:8x8x8, or a slice's name: v5p-128, v6e-8
  slices=N             TPU slices that the data-center network connects
  hardware=NAME        a GPU's name, with devices=N
  xla_flags=FLAGS      for the compiler, as the run has them: they change the schedule
  compile_seconds=N    most time that the compiler may take (default 1800)
  tokens=N             tokens to train on: prints the days that takes
  price=N              of one chip for one hour, with tokens=: prints what it costs
  model=N              model FLOPs of the dumped step on one device
  tokens_per_step=N    tokens of the dumped step on one device
  --json               one JSON object on stdout"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mfu_jax.arguments import Arguments, check_key, parse
from mfu_jax.dumps.files import SUFFIX, load
from mfu_jax.errors import UserError
from mfu_jax.formatting import json_text
from mfu_jax.planning.measured_runs import FIXED, read_run
from mfu_jax.planning.plan import Plan, Work, make_plan, refused
from mfu_jax.planning.targets import Target, parse_target
from mfu_jax.user_files import read_text
from mfu_jax.values import typed

_COMPILER = "mfu_jax.trainer.ahead_of_time"
_MAXTEXT = "mfu_jax.planning.maxtext_step"
_MODEL_KEYS = ("model_name", "per_device_batch_size", "max_target_length")
_MOST_BYTES = 2**20
_OWN = ("topology", "slices", "hardware", "devices", "xla_flags", "compile_seconds")
_OWN_OF_RUN = ("tokens", "price")
_OWN_OF_DUMP = ("model", "tokens_per_step")
_MESH = ("data", "fsdp", "tensor")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 1 if the step does not fit."""
    arguments = parse(argv, flags=("--json", "--maxtext", "--run"))
    for key in (*_OWN_OF_RUN, *_OWN_OF_DUMP, "compile_seconds"):
        _number(arguments.values, key)  # a wrong one is told before a minute of compiling
    if "--run" in arguments.flags:
        return _show(arguments, _of_run(arguments))
    values = arguments.values
    target = parse_target(
        topology=values.get("topology", ""),
        hardware=values.get("hardware", ""),
        devices=_whole(values, "devices"),
        slices=_whole(values, "slices") or 1,
    )
    if "--maxtext" in arguments.flags:
        return _show(arguments, _of_maxtext(arguments, target))
    if arguments.names and arguments.names[0].endswith(SUFFIX):
        return _show(arguments, _of_dump(arguments, target))
    return _show(arguments, _of_config(arguments, target))


def _show(arguments: Arguments, plan: Plan) -> int:
    from mfu_jax.planning.rendering import render

    if "--json" in arguments.flags:
        print(json_text(plan.to_json()))
    else:
        values = arguments.values
        print(render(plan, _number(values, "tokens"), _number(values, "price")))
    return 0 if plan.fits else 1


def _of_dump(arguments: Arguments, target: Target) -> Plan:
    values = arguments.values
    for key in values:
        check_key(key, (*_OWN, *_OWN_OF_RUN, *_OWN_OF_DUMP))
    program = load(arguments.one_name("dump"))
    model = _number(values, "model") or (program.model.per_device if program.model else 0)
    convention = program.model.convention if program.model else "maxtext"
    tokens = _number(values, "tokens_per_step")
    work = Work(model_flops=round(model), tokens=tokens, convention=convention) if model else None
    return make_plan(program, target, work=work)


def _of_config(arguments: Arguments, target: Target) -> Plan:
    words = [*arguments.names, *_trainer_words(arguments.values, target)]
    return _compiled(arguments, target, _COMPILER, words, _work(words))


def _of_maxtext(arguments: Arguments, target: Target) -> Plan:
    values = arguments.values
    own = (*_OWN, *_OWN_OF_RUN, "maxtext_python")
    keys = {**FIXED, **{k: v for k, v in values.items() if k not in own}}
    model = {k: v for k, v in values.items() if k in _MODEL_KEYS}
    words = [f"{key}={value}" for key, value in keys.items()]
    return _compiled(arguments, target, _MAXTEXT, words, work_of(model))


def _of_run(arguments: Arguments) -> Plan:
    for key in arguments.values:
        check_key(key, ("maxtext_python", "compile_seconds", *_OWN_OF_RUN))
    name = arguments.one_name("file with a run, or -")
    expected = "one JSON object, as docs/plan.md describes it"
    text = sys.stdin.read(_MOST_BYTES) if name == "-" else read_text(name, expected, _MOST_BYTES)
    try:
        run = read_run(json.loads(text))
    except ValueError as error:
        raise UserError(f"{name}: not JSON ({error}); expected {expected}") from None
    words, flags = list(run.arguments), run.flags
    plan = _compiled(arguments, run.target, _MAXTEXT, words, work_of(run.model), flags)
    return dataclasses.replace(plan, notes=(*plan.notes, *run.notes))


def work_of(model: Mapping[str, Any]) -> Work:
    """What a step of a MaxText config is for."""
    from mfu_jax.flops.analytic.totals import calculate_tokens_per_device, model_flops_per_device

    return Work(
        model_flops=round(model_flops_per_device(model, "maxtext").training),
        tokens=float(calculate_tokens_per_device(model)),
        convention="maxtext",
    )


def _compiled(
    arguments: Arguments,
    target: Target,
    module: str,
    words: Sequence[str],
    work: Work,
    flags: Sequence[str] = (),
) -> Plan:
    from mfu_jax.planning.compiling import Limits, Request, TooLarge, compile_known_flags

    values = arguments.values
    seconds = _number(values, "compile_seconds") or Limits.seconds
    program, left_out = compile_known_flags(
        Request(
            module=module,
            target=target,
            python=values.get("maxtext_python") or sys.executable,
            config={"arguments": list(words)},
            flags=(*flags, *values.get("xla_flags", "").split()),
        ),
        limits=Limits(seconds=seconds),
        progress=lambda word: print(f"mfu-jax plan: {word} …", file=sys.stderr, flush=True),
    )
    if isinstance(program, TooLarge):
        plan = refused(target, program, work)
    else:
        plan = make_plan(program, target, work=work)
    return dataclasses.replace(plan, notes=(*plan.notes, *left_out))


def _trainer_words(values: Mapping[str, str], target: Target) -> list[str]:
    words = [f"{k}={v}" for k, v in values.items() if k not in (*_OWN, *_OWN_OF_RUN)]
    if not any(key in values for key in _MESH):
        words += ["data=1", f"fsdp={target.devices}", "tensor=1"]
    return words


def _work(words: Sequence[str]) -> Work:
    from mfu_jax.flops.analytic.totals import calculate_tokens_per_device, model_flops_per_device
    from mfu_jax.trainer.pyconfig import load as load_config

    config = load_config(words)
    return Work(
        model_flops=round(model_flops_per_device(config, config.convention).training),
        tokens=float(calculate_tokens_per_device(config)),
        convention=config.convention,
    )


def _whole(values: Mapping[str, str], key: str) -> int | None:
    return typed(key, values[key], int) if key in values else None


def _number(values: Mapping[str, str], key: str) -> float:
    number = typed(key, values[key], float) if key in values else 0.0
    if not 0 <= number < float("inf"):
        raise UserError(f"{key}={number}; expected a number above 0")
    return number
