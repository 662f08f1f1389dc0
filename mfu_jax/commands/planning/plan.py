"""Does a step fit on chips you do not have; how long does it take.

usage: mfu-jax plan [FILE.yml] topology=v5p:8x8x8 [key=value …] [--json]
       mfu-jax plan PROGRAM.mfu topology=v5p:8x8x8 [model_flops=N tokens_per_step=N] [--json]
       mfu-jax plan --maxtext topology=v5p:8x8x8 model=… [key=value …] [--json]
       mfu-jax plan --run RUN.json|- [--json]
       mfu-jax plan --sweep topology=v6e-8 remat_policy=none,full per_device_batch_size=1..8 …

The first form compiles the reference model's train step for the chips in a child process; keys
are model=NAME and those of configs/base.yml. Without a mesh, weights are split over all devices
(fsdp). The second reads a dump written by mfu_jax.dump. The third compiles MaxText's own step, with
MaxText's keys. The fourth reads a measured run: one JSON object with MaxText's keys, mesh, remat
and XLA flags.
--sweep searches the values of keys that have several (a,b or 1..8), and no others, by a few plans,
as mfu-jax tune does; it prints the fastest that fits as flags.
  maxtext_python=FILE  interpreter with MaxText installed (Python 3.12 or newer), if not this one
  topology=NAME:SHAPE  TPU chips: v5p:8x8x8, or a slice name: v5p-128, v6e-8
  slices=N             number of TPU slices, connected by the data-center network
  hardware=NAME        GPU name, with devices=N
  network_gbits=N      Gb/s of one device to other hosts: 200 of an H100 in an A3 Mega (without
                       it 400, as in most hosts of H100)
  memory_fraction=N    share of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION):
                       the step must fit in it, and XLA hides transfers within it (without it: fit
                       in all, hide within 0.75)
  xla_flags=FLAGS      compiler flags, as in the real run: they change the schedule
  compile_seconds=N    time limit for the compiler (default 1800)
  compile_gib=N        limit on the host memory that the compiler allocates, excluding libraries
                       that it maps (a tiny step takes 0.4; default: no limit)
  cache=FOLDER         cache of compiled programs (default ~/.cache/mfu_jax/plans; empty: none)
  follow=nearest       for --run: plans the nearest step where the reference model's cannot follow
                       the run's precision, attention, experts' dispatch …, and says so first
  tokens=N             tokens to train on: prints how many days that takes
  price=N              price of one chip-hour; with tokens=, prints the total cost
  model_flops=N        model FLOPs of the dumped step on one device
  tokens_per_step=N    tokens of the dumped step on one device
  budget=20min         for a sweep: starts no compile that would end later (s, min, h)
  plans=N              for a sweep: at most so many (default: a third of the combinations, at most
                       60); compiles=N is the same
  --html [OUT.html]    also writes a page with a layer's timeline (plan.html); not for a sweep
  --json               one JSON object on stdout

example: mfu-jax plan model=llama3-8b topology=v5p:4x4x4"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mfu_jax.dumps.files import load
from mfu_jax.errors import UserError
from mfu_jax.planning.compilation import cache
from mfu_jax.planning.compilation.compiling import Limits, compiler_flags
from mfu_jax.planning.measured_runs import (
    MeasuredRun,
    judged,
    load_run,
    with_doubts,
    with_left_out,
)
from mfu_jax.planning.result.plan import Plan, StepWork
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.result.rendering import render
from mfu_jax.planning.result.verdict import plan_verdict
from mfu_jax.planning.step_sources import MaxTextStep, StepSource, compiled_plan, work_of
from mfu_jax.planning.targets import CHIPS, Target, check_dump, target_of
from mfu_jax.storage.targets import check_whole
from mfu_jax.storage.trace_folders import DUMP_SUFFIX
from mfu_jax.util.arguments import MODEL_FLOPS, Arguments, own_key, parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.values import number_of

if TYPE_CHECKING:
    from mfu_jax.trainer.planned.planned_run import NearestStep

_OWN = (
    *(*CHIPS, "html", "cache", "maxtext_python"),
    *("xla_flags", "compile_seconds", "compile_gib"),
)
_OWN_OF_RUN = ("tokens", "price")
_OWN_OF_DUMP = (MODEL_FLOPS, "tokens_per_step")
_OWN_OF_SWEEP = ("budget", "plans", "compiles")
_NO_MAXTEXT = "MaxText is not installed: the reference model's step is planned in its place"
_FORMS = ("--run", "--maxtext", "--sweep")
_PAGE = "plan.html"
_number = functools.partial(number_of, kind=float, default=0.0)
_NUMBERS = (*_OWN_OF_RUN, *_OWN_OF_DUMP, "compile_seconds", "compile_gib")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 1 if the step does not fit."""
    arguments = parse(argv, flags=("--json", "--maxtext", "--run", "--sweep", "--html"))
    _check_forms(arguments)
    for key in _NUMBERS:
        _number(arguments.values, key)  # report a wrong number before compiling for a minute
    compiler_flags(arguments.values.get("xla_flags", ""))
    if "html" in arguments.values:
        check_whole(arguments.values["html"] or _PAGE, "--html")
    if "--run" in arguments.flags:
        return _show(arguments, _of_run(arguments))
    values = arguments.values
    target = target_of(values)
    if arguments.names and arguments.names[0].endswith(DUMP_SUFFIX):
        return _show(arguments, _of_dump(arguments, target))
    _check_keys(arguments)
    if "--sweep" in arguments.flags:
        return _sweep(arguments, target)
    source, keys = _source(arguments, target), _step_keys(values, _OWN_OF_RUN)
    if wrong := source.invalid(keys):
        raise wrong
    return _show(arguments, _compiled(arguments, target, source, keys))


def _check_forms(arguments: Arguments) -> None:
    """Refuses two forms at once, since one would be ignored."""
    dumps = [name for name in arguments.names if name.endswith(DUMP_SUFFIX)]
    given = [*dumps, *(flag for flag in _FORMS if flag in arguments.flags)]
    if len(given) > 1 and given != ["--maxtext", "--sweep"]:
        raise UserError(f"{given[0]} and {given[1]}; expected one form of the command")
    if "--maxtext" in given and arguments.names:
        raise UserError(
            f"{arguments.names[0]!r}: --maxtext reads no file",
            hint="pass key=value",
        )


def _check_keys(arguments: Arguments) -> None:
    """Refuses keys that belong to another form than the one in use."""
    sweeps = "--sweep" in arguments.flags
    others = dict.fromkeys(_OWN_OF_DUMP, "a dump")
    others |= dict.fromkeys((*_OWN_OF_RUN, "html"), "a single plan") if sweeps else {}
    others |= {} if sweeps else dict.fromkeys(_OWN_OF_SWEEP, "--sweep")
    if "--maxtext" not in arguments.flags:
        others["maxtext_python"] = "--maxtext or --run"
    for key in arguments.values:
        if key in others:
            raise UserError(
                f"{key}= is a key of {others[key]}; expected none here",
                hint="leave it out",
            )


def _show(arguments: Arguments, plan: Plan) -> int:
    values = arguments.values
    run = {key: _number(values, key) for key in _OWN_OF_RUN}
    plan = plan.for_run(**run)
    verdict = plan_verdict(plan)
    if "--json" in arguments.flags:
        print(json_text({"verdict": verdict.to_json(), **plan.to_json()}))
    else:
        print(f"{verdict.render()}\n{render(plan)}")
    if "html" in values:
        from mfu_jax.pages.document import write_page
        from mfu_jax.planning.result.page import plan_page

        where = write_page(values["html"] or _PAGE, plan_page(plan))
        print(f"mfu-jax plan: wrote {where}", file=sys.stderr)
    return 0 if plan.fits else 1


def _of_dump(arguments: Arguments, target: Target) -> Plan:
    values = arguments.checked((*CHIPS, "html", *_OWN_OF_RUN, *_OWN_OF_DUMP)).values
    name = arguments.one_name("dump")
    program = load(name)
    notes = check_dump(name, program, target)
    model = _number(values, MODEL_FLOPS) or (program.model.per_device if program.model else 0)
    work = StepWork(
        model_flops=round(model) or None,
        tokens=_number(values, "tokens_per_step"),
        convention=program.model.convention if program.model else "maxtext",
    )
    plan = make_plan(program, target, work=work).with_notes(*notes)
    return replace(plan, model=f"the program of {Path(name).name}")


def _of_run(arguments: Arguments) -> Plan:
    limits = ("compile_seconds", "compile_gib")
    own = ("maxtext_python", "follow", *limits, "cache", "html", *_OWN_OF_RUN)
    arguments = arguments.checked(own)
    run = load_run(arguments.one_name("file with a run, or -"))
    source, keys, nearest = _source_of_run(arguments, run)
    work = source.placed(work_of(run.model), keys)
    work = replace(
        work,
        attention=run.attention,
        loop_seconds=run.loop_seconds,
        has_tokamax_experts=run.has_tokamax_experts,
    )
    if nearest:
        held = run.partial_gradient_bytes
        work = replace(work, tiles=run.tiles, partial_gradient_bytes=held)
    plan = _compiled(arguments, run.target, source, keys, work=work, flags=run.flags)
    if nearest:
        plan = judged(plan, run)
        plan = plan.with_lost(nearest.other_work, nearest.notes(plan.time_by_cause))
        for doubt, longer in nearest.doubts:
            plan = plan.with_doubt(doubt, longer)
        plan = plan.with_notes(_NO_MAXTEXT)
    return with_doubts(with_left_out(plan, run), run).with_notes(*run.notes)


def _source_of_run(
    arguments: Arguments, run: MeasuredRun
) -> tuple[StepSource, Mapping[str, str], NearestStep | None]:
    """MaxText's step if installed, else the reference model's; its keys; what it lacks.

    Raises:
        UserError: the reference model's step cannot be made, or is another program than the run's.
    """
    python = arguments.values.get("maxtext_python", "")
    if python or importlib.util.find_spec("maxtext"):
        return MaxTextStep(python), run.keys, None
    from mfu_jax.trainer.planned.planned_run import followed
    from mfu_jax.trainer.planned.planned_step import TrainerStep

    source = TrainerStep(run.target)
    nearest = followed(run, arguments.values.get("follow", ""))
    if wrong := source.invalid(nearest.keys):
        raise wrong
    return source, nearest.keys, nearest


def _source(arguments: Arguments, target: Target) -> StepSource:
    if "--maxtext" in arguments.flags:
        return MaxTextStep(arguments.values.get("maxtext_python", ""))
    from mfu_jax.trainer.planned.planned_step import TrainerStep

    return TrainerStep(target, arguments.names)


def _step_keys(values: Mapping[str, str], own: Sequence[str]) -> dict[str, str]:
    """The keys that configure the step, not the plan."""
    step = {key: value for key, value in values.items() if key not in (*_OWN, *own)}
    return {own_key(key, ("model_name",)): value for key, value in step.items()}


def _compiled(
    arguments: Arguments,
    target: Target,
    source: StepSource,
    keys: Mapping[str, str],
    *,
    work: StepWork | None = None,
    flags: Sequence[str] | None = None,
    seconds: float = math.inf,
) -> Plan:
    values = arguments.values
    most = _number(values, "compile_seconds") or Limits.seconds
    return compiled_plan(
        source,
        target,
        keys,
        limits=Limits(
            seconds=min(most, seconds),
            memory_bytes=round(_number(values, "compile_gib") * 2**30),
        ),
        folder=cache.chosen_folder(values),
        flags=compiler_flags(values.get("xla_flags", "")),
        run_flags=flags,
        work=work,
        progress=_progress,
    )


def _sweep(arguments: Arguments, target: Target) -> int:
    from mfu_jax.planning.tune.evidence import Trial, TrialLog
    from mfu_jax.planning.tune.result import show
    from mfu_jax.planning.tune.running import Tuning, planned, tune
    from mfu_jax.planning.tune.space import Point, Space, listed_axes, seconds_of

    values = arguments.values
    if {"plans", "compiles"} <= values.keys():
        raise UserError("plans= and compiles= are the same; expected one", hint="keep plans=")
    most = "compiles" if "compiles" in values else "plans"
    source = _source(arguments, target)
    axes, fixed = listed_axes(_step_keys(values, _OWN_OF_SWEEP))
    space = Space(axes)

    def keys(point: Point) -> dict[str, str]:
        return {**fixed, **space.settings(point)}

    def invalid(point: Point) -> UserError | None:
        return source.invalid(keys(point))

    def plan(point: Point, seconds: float) -> Trial:
        return planned(lambda: _compiled(arguments, target, source, keys(point), seconds=seconds))

    space.begin_where(lambda point: invalid(point) is None)
    result = tune(
        Tuning(
            target=str(target),
            chip=target.chip.name,
            space=space,
            flags=lambda point: source.run_words(keys(point)),
            plan=plan,
            invalid=invalid,
            limit_bytes=target.usable_memory_bytes,
            budget_seconds=seconds_of(values["budget"]) if "budget" in values else math.inf,
            most_plans=number_of(values, most, int, is_positive=True),
        ),
        TrialLog(None, {}),
        _progress,
    )
    return show(result, is_json="--json" in arguments.flags)


def _progress(word: str) -> None:
    print(f"mfu-jax plan: {word} …", file=sys.stderr, flush=True)
