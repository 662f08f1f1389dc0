"""Where a step's time went, from a trace: from the peak to MFU.

usage: mfu-jax profile DIR [key=value …] [--plan PLAN.json] [--json | --html [OUT.html]]
       mfu-jax profile BEFORE AFTER [key=value …] [--json]

DIR is the folder of a device trace made by mfu_jax.profile, profile_steps= or
jax.profiler.start_trace; or one .xplane.pb file. The newest trace in it is read, for all hosts.
Two folders are compared: what got slower, in seconds per step, and why.
  by=scope,op      tables to print: scope, op, phase, dtype, kernel, program (default scope,op);
                   program prints one waterfall for each, for instance for the phases of an RL loop
  depth=N          groups scopes by their first N parts
  sort=COLUMN      sorts, largest first: time (default), runs, flops, mfu, hfu, bytes, bandwidth
  top=N            rows of each table (default 15; 0: all)
  model_flops=N    model FLOPs of one run of the program on one device; by default those stored with
                   the trace, else the program's own forward and backward matmuls
  tokens_per_step=N  tokens of a step on one device, by which the MFU is placed among published runs
                   of models of this size; by default those of the run whose profile it is
  hardware=NAME    the chip, if the trace does not name it; or calibrate
  peak_tflops_per_device=N  dense peak, instead of what the run was given, or the table's; CPUs are
                   calibrated
  plan=FILE        also prints where the time differs from the plan's, op by op, with the cause in
                   seconds; FILE is what mfu-jax plan … --json prints
  perfetto=FILE    writes the timeline with each op's FLOPs, MFU and scope to FILE.json.gz, which
                   ui.perfetto.dev opens
  --json           one JSON object on stdout
  --html           one page that needs no network, in OUT.html (default DIR/profile.html)

example: mfu-jax profile runs/a --html=profile.html"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mfu_jax.errors import UserError, nearest
from mfu_jax.hardware import CALIBRATE
from mfu_jax.storage.targets import check_whole
from mfu_jax.util.arguments import MODEL_FLOPS, PEAK, Arguments, parse
from mfu_jax.util.formatting import json_text, percent
from mfu_jax.util.values import number_of

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile
    from mfu_jax.profiling.report.plan_gap import PlanGap

_TOKENS = "tokens_per_step"
_TABLES = ("by", "depth", "sort")
_FLOPS = "pass those of one run of the program on one device"
_TOP = 15
_OUTPUTS = ("perfetto", "plan")
_KEYS = (*_TABLES, "top", MODEL_FLOPS, _TOKENS, "hardware", PEAK, *_OUTPUTS)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=_KEYS, flags=("--json", "--html"))
    if arguments.values.get("hardware") != CALIBRATE:
        # Only files are read: this machine's accelerator may be in use by the run itself.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    folders, page = _folders(arguments), arguments.page
    if len(folders) == 2:
        return _two(folders, arguments)
    values = arguments.values
    if page is not None:
        page = page or _page_in(folders[0])
        check_whole(page, "--html")
    if "perfetto" in values:
        check_whole(values["perfetto"], "--perfetto")
    by, sort = _tables(values.get("by", "scope,op")), _sort(values.get("sort", "time"))
    depth, top = number_of(values, "depth", int, 0), number_of(values, "top", int, _TOP)
    profile = _read(folders[0], values)
    gap = _gap(profile, folders[0], values.get("plan"))
    if "perfetto" in values:
        from mfu_jax.profiling.report.perfetto import write_perfetto

        where = write_perfetto(profile, values["perfetto"])
        print(f"mfu-jax profile: wrote {where}, for ui.perfetto.dev", file=sys.stderr)
    if "--json" in arguments.flags:
        beside = {} if gap is None else {"plan": gap.to_json()}
        print(json_text({**profile.to_json(depth=depth, sort=sort), **beside}))
    elif page is not None:
        from mfu_jax.pages.document import write_page
        from mfu_jax.profiling.report.page import page as page_of

        print(write_page(page, page_of(profile, gap)))
    else:
        from mfu_jax.profiling.report.text import render

        print(render(profile, by=by, depth=depth, sort=sort, top=top, gap=gap))
    return 0


def _folders(arguments: Arguments) -> list[str]:
    """The one folder, or the two to compare."""
    folders = list(arguments.names)
    if not 1 <= len(folders) <= 2:
        raise UserError(
            f"expected a folder with a trace, or two to compare, got "
            f"{' '.join(arguments.names) or 'none'}"
        )
    return folders


def _read(folder: str, values: Mapping[str, str]) -> Profile:
    from mfu_jax.profiling.profile import read_profile

    tokens, settings, note, peak = _of_run(folder)
    given = None if "hardware" in values else peak
    profile = read_profile(
        folder,
        peak_tflops_per_device=number_of(values, PEAK, float, default=given),
        hardware=values.get("hardware", ""),
        model_flops=number_of(values, MODEL_FLOPS, int, is_positive=True, hint=_FLOPS),
        tokens=number_of(values, _TOKENS, float, default=tokens, is_positive=True),
        settings=settings,
    )
    return dataclasses.replace(profile, notes=(*profile.notes, note)) if note else profile


def _log_of(folder: str) -> str:
    """The metrics file of the run whose profile it is; empty if there is none."""
    for place in (Path(folder), Path(folder).resolve().parent):
        if (log := place / "metrics.jsonl").is_file():
            return str(log)
    return ""


def _of_run(folder: str) -> tuple[float | None, Mapping[str, str], str, float | None]:
    """What its run logged: a step's tokens on one device, settings, power limit, a given peak."""
    from mfu_jax.runs.metrics.files import WARMUP_STEPS, read_metrics
    from mfu_jax.runs.report.setup import read_setup

    if not (log := _log_of(folder)):
        return None, {}, "", None
    with contextlib.suppress(UserError):  # the trace can be read without it
        run = read_metrics(log)
        summary = run.summary(warmup_steps=WARMUP_STEPS)
        rate, seconds = summary.tokens_per_sec_per_device, summary.mean_seconds
        tokens = rate * seconds if rate and seconds else None
        setup, note = read_setup(log), _at_power_limit(run.gpu, summary.mfu or 0.0)
        peak = setup.peak_tflops if f"(flag: {PEAK}=" in (setup.peak or "") else None
        return tokens, setup.config, note, peak
    return None, {}, "", None


def _at_power_limit(reading: Mapping[str, float], run_mfu: float) -> str:
    """A note, if the run's last reading was of GPUs that lowered their clock for their power.

    A clock above the one of the peak, as on an idle device, would make the MFU at it lower.
    """
    clock, mfu = reading.get("gpu/sm_clock_mhz"), reading.get("perf/mfu_at_clock")
    if not (clock and mfu and mfu > run_mfu and reading.get("gpu/throttled_power")):
        return ""
    return (
        f"at step {reading.get('step', 0):.0f} the power limit held the clock at {clock:.0f} MHz, "
        f"of whose peak the MFU is {percent(mfu)}: part of the matmuls below peak is power"
    )


def _gap(profile: Profile, folder: str, path: str | None) -> PlanGap | None:
    """The plan beside the profile, if one is named."""
    if path is None:
        return None
    from mfu_jax.profiling.report.plan_gap import plan_gap
    from mfu_jax.runs.metrics.files import read_metrics
    from mfu_jax.runs.report.plan_comparison import clock_share, read_plan

    plan, share = read_plan(path), None
    if log := _log_of(folder):
        with contextlib.suppress(UserError):
            share = clock_share(read_metrics(log).gpu, plan)
    return plan_gap(profile, plan, path, share)


def _two(folders: Sequence[str], arguments: Arguments) -> int:
    from mfu_jax.profiling.report.comparison import compare

    values = arguments.values
    for key in ("html", *_TABLES, *_OUTPUTS):
        if key in values:
            raise UserError(
                f"--{key} and two profiles: expected one folder",
                hint=f"leave --{key} out",
            )
    top = number_of(values, "top", int, _TOP)
    comparison = compare(*(_read(folder, values) for folder in folders))
    if "--json" in arguments.flags:
        print(json_text(comparison.to_json()))
    else:
        from mfu_jax.profiling.report.comparison_text import render_comparison

        print(render_comparison(comparison, top=top))
    return 0


def _page_in(folder: str) -> str:
    path = Path(folder)
    return str((path if path.is_dir() else path.parent) / "profile.html")


def _tables(text: str) -> list[str]:
    from mfu_jax.profiling.breakdown.tables import KEYS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KEYS:
            raise UserError(
                f"by={text}: unknown table {name!r}; expected some of {', '.join(KEYS)}",
                hint=nearest(name, KEYS),
            )
    return names


def _sort(text: str) -> str:
    from mfu_jax.profiling.breakdown.tables import SORTS

    if text not in SORTS:
        known = ", ".join(SORTS)
        raise UserError(
            f"sort={text}: unknown column; expected {known}",
            hint=nearest(text, SORTS),
        )
    return text
