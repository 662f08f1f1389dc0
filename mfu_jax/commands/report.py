"""One run over all restarts, or several compared: text, JSON, HTML.

usage: mfu-jax report RUN [RUN …] [key=value …] [--json | --html [FILE]]
       mfu-jax report RUN FILE --export=ml_goodput | --export=summary

RUN             the run's folder; or its metrics.jsonl, MaxText's metrics_file, or a log with lines
                'completed step: 7, seconds: 0.123, TFLOP/s/device: …' (MaxText's, or ours);
                - reads standard input: zcat log.gz | mfu-jax report -
                Several runs are each compared with the first.
hardware=h100   the peak that MFU is relative to, in dtype=bf16; or peak_tflops_per_device=989
warmup_steps=3  steps excluded after each start, if the file does not mark them
model=NAME_OR_FILE key=value …   counts the FLOPs of a step from a config, as mfu-jax flops does,
                by convention=maxtext, and shows them in the other conventions too
price=2.5       of one device-hour: the page shows what the run cost; devices=N for the job, if its
                set-up does not say
profile=DIR     a profile of several hosts: how long each waits in collectives, and for whom; by
                default the one in the run's folder
plan=FILE       compares the prediction of mfu-jax plan … --json with what the (first) run measured,
                and divides the gap by cause: by op if the run has a trace (as mfu-jax profile
                --plan does), else as far as its log goes
--json          one JSON object on stdout
--html          one page that needs no network, in FILE.html (default RUN/report.html, or
                runs/a.html for the file runs/a.jsonl)
--export=ml_goodput   writes the run log's events to FILE, one per line, in the log format of
                ml-goodput-measurement
--export=summary   writes the run's totals to FILE, as its logger does to ….summary.json at the end;
                after a kill, they are those of its steps and its run log

example: mfu-jax report runs/a runs/b --html=report.html"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from mfu_jax import hardware
from mfu_jax.errors import UserError, first_line
from mfu_jax.runs.comparison.runs import RunComparison, compare_with_runs
from mfu_jax.runs.goodput import ml_goodput
from mfu_jax.runs.goodput.wall_clock import read_attempts
from mfu_jax.runs.metrics.files import WARMUP_STEPS
from mfu_jax.runs.report.collective_waits import CollectiveWaits
from mfu_jax.runs.report.plan_comparison import (
    PlanComparison,
    clock_share,
    compare_with_plan,
    read_plan,
)
from mfu_jax.runs.report.run_data import Options, RunData, answer_without_steps, read_run_data
from mfu_jax.storage.addresses import path_of
from mfu_jax.storage.targets import check_whole, write_whole
from mfu_jax.storage.trace_folders import trace_files
from mfu_jax.util.arguments import MODEL, PEAK, Arguments, own_key, parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.values import number_of

_OF_HARDWARE = ("hardware", "dtype", PEAK)
_KEYS = (
    *_OF_HARDWARE,
    MODEL,
    "convention",
    "warmup_steps",
    "price",
    "devices",
    "html",
    "plan",
    "profile",
)
_WARMUP = f"it is how many steps to leave out; {WARMUP_STEPS} if not given"
_PLACES = (".", "profile", "tensorboard")  # where a profile may be in a run's folder
_EXPORTS = ("ml_goodput", "summary")
# Larger traces take minutes: they are read only on request.
_MOST_BYTES = 10**9


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        UserError: wrong arguments, or a file that holds no run.
    """
    arguments = parse(argv, flags=("--json", "--html"))
    if "export" in arguments.values:
        return _export(arguments)
    names, file = _names(arguments)
    options = _options(arguments)
    try:
        runs = [read_run_data(name, options) for name in names]
    except UserError:
        if file or len(names) > 1 or (found := answer_without_steps(names[0])) is None:
            raise
        print(json_text(found[0]) if "--json" in arguments.flags else found[1])
        return 0
    profile = arguments.values.get("profile")
    first = _with_waits(runs[0], profile) if profile else _with_own(runs[0])
    runs = [first, *map(_with_own, runs[1:])]
    compared = [_compared(runs[0], run) for run in runs[1:]]
    plan = _plan(arguments, runs[0])
    if plan is not None:
        runs[0] = dataclasses.replace(runs[0], bound_mfu=plan.bound_mfu)
    if file:
        from mfu_jax.pages.document import write_page
        from mfu_jax.runs.page import page

        print(write_page(file, page(runs, compared, plan)))
    elif "--json" in arguments.flags:
        print(json_text(_answer(runs, compared, plan)))
    else:
        parts = [*(found.render() for found in compared), *(run.render() for run in runs)]
        print("\n\n".join([*parts, *([plan.render()] if plan else [])]))
    return 0


def _names(arguments: Arguments) -> tuple[list[str], str]:
    """The runs, and the page's file; empty without --html."""
    runs = list(arguments.names)
    if not runs:
        raise UserError(
            "expected one file, got none",
            hint="pass the run's folder or its metrics file",
        )
    page = arguments.page
    if page is None:
        return runs, ""
    if page:
        check_whole(page, "--html")  # before long runs are read
    return runs, page or _page_of(runs[0])


def _page_of(run: str) -> str:
    """Of a folder, or its metrics.jsonl: ``report.html``; of another file: its name."""
    place = path_of(run)
    is_folder = place.is_dir() if isinstance(place, Path) else not place.name.endswith(".jsonl")
    if is_folder:
        return str(place / "report.html")
    stem = "report" if place.name in ("-", "metrics.jsonl") else PurePath(place.name).stem
    return str(place.parent / f"{stem}.html")


def _compared(a: RunData, b: RunData) -> RunComparison:
    found = compare_with_runs([a.metrics], b.metrics, warmup_steps=a.options.warmup_steps)
    peaks = [run.verdict.peak for run in (a, b)]
    if peaks[0] == peaks[1]:
        return found
    of_a, of_b = (peak or "not known" for peak in peaks)
    note = f"MFU refers to different peaks: A's is {of_a}, B's is {of_b}"
    return dataclasses.replace(found, notes=(*found.notes, note))


def _with_waits(run: RunData, profile: str) -> RunData:
    """The run with its hosts' waits, read from a profile's folder.

    Raises:
        UserError: there is no trace in it, or only one host's, or one cannot be read.
    """
    waits = _read(Path(profile))
    if waits is None:
        raise UserError(
            f"--profile {profile}: no collectives of several hosts",
            hint="usually each host traced to a disk of its own; copy their plugins/profile "
            "together, or leave --profile out",
        )
    return dataclasses.replace(run, waits=waits)


def _with_own(run: RunData) -> RunData:
    """Adds the profile in the run's own folder; a large or damaged one becomes a note."""
    folder = _folder_of(run)
    if folder is None:
        return run
    try:
        files = trace_files(folder)
        if len(files) < 2:
            return run
        if (size := sum(file.stat().st_size for file in files)) > _MOST_BYTES:
            return _noted(run, f"{size / 1e9:.1f} GB; --profile {folder} reads it")
        waits = _read(folder)
    except UserError as error:
        return _noted(run, first_line(error))
    return dataclasses.replace(run, waits=waits)


def _noted(run: RunData, why: str) -> RunData:
    notes = (*run.time.notes, f"the profile is left out: {why}")
    return dataclasses.replace(run, time=dataclasses.replace(run.time, notes=notes))


def _folder_of(run: RunData) -> Path | None:
    """The folder with traces within the run's own folder; None if there is none."""
    metrics = path_of(run.metrics.path)
    if run.metrics.path == "-" or not isinstance(metrics, Path):
        return None
    found = (metrics.parent / place for place in _PLACES)
    return next((f for f in found if (f / "plugins" / "profile").is_dir()), None)


def _read(folder: Path) -> CollectiveWaits | None:
    from mfu_jax.profiling.host_waits import read_collective_times  # imports numpy

    times = read_collective_times(folder)
    return CollectiveWaits.of(str(folder), times) if times else None


def _plan(arguments: Arguments, run: RunData) -> PlanComparison | None:
    """The plan compared with the run, if one is named; by op if the run has a trace."""
    path = arguments.values.get("plan")
    if path is None:
        return None
    plan = read_plan(path)
    named = arguments.values.get("profile")
    folder = Path(named) if named else _folder_of(run)
    found = compare_with_plan(plan, path, run)
    if folder is None:
        return found
    from mfu_jax.profiling.profile import read_profile
    from mfu_jax.profiling.report.plan_gap import plan_gap

    try:
        if not named and sum(file.stat().st_size for file in trace_files(folder)) > _MOST_BYTES:
            raise UserError(f"the trace is large; --profile {folder} reads it")
        profile = read_profile(folder, peak_tflops_per_device=run.peak[1])
        gap = plan_gap(profile, plan, path, clock_share(run.metrics.gpu, plan))
        return dataclasses.replace(found, gap=gap)
    except UserError as error:
        notes = (*found.notes, f"no gap by op: {first_line(error)}")
        return dataclasses.replace(found, notes=notes)


def _answer(
    runs: Sequence[RunData], compared: Sequence[RunComparison], plan: PlanComparison | None
) -> dict[str, Any]:
    """One run's own object; for several, a list of these and the comparisons with the first."""
    beside = {} if plan is None else {"plan": plan.to_json()}
    answers = [{**run.answer, "verdict": run.verdict.to_json()} for run in runs]
    if len(runs) == 1:
        return {**answers[0], **beside}
    return {
        "runs": answers,
        "comparisons": [found.to_json() for found in compared],
        **beside,
    }


def _export(arguments: Arguments) -> int:
    """Writes a run's events in another tool's format, or its totals."""
    values = arguments.values
    form = values.pop("export")
    if form not in _EXPORTS or values or len(arguments.names) != 2:
        raise UserError(
            "--export: expected mfu-jax report RUN FILE --export=ml_goodput, or summary, and "
            "nothing else",
            hint="usually the file to write is missing; pass RUN, then FILE",
        )
    run, file = arguments.names
    if form == "summary":
        totals = read_run_data(run, Options()).totals
        write_whole(file, "FILE", f"{json.dumps(totals, indent=2)}\n".encode())
        _say(arguments, file, "measured steps", totals["steps"])
        return 0
    events = ml_goodput.events(path_of(run).name, read_attempts(run))
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    write_whole(file, "FILE", lines.encode())
    _say(arguments, file, "events", len(events))
    return 0


def _say(arguments: Arguments, file: str, what: str, count: int) -> None:
    as_json = "--json" in arguments.flags
    answer = {"file": file, what.split()[-1]: count}
    print(json_text(answer) if as_json else f"{file}: {count} {what}")


def _options(arguments: Arguments) -> Options:
    """The command's own options, and the model's fields."""
    values = {own_key(key, _KEYS): text for key, text in arguments.pairs}
    if MODEL not in values:
        known = [key for key in _KEYS if key != "convention"]
        usually = "usually a key for counting the model, which needs model=NAME_OR_FILE"
        arguments.checked(known, usually=usually)
    return Options(
        peak=_peak(values),
        warmup_steps=number_of(values, "warmup_steps", int, WARMUP_STEPS, hint=_WARMUP),
        model=values.get(MODEL, ""),
        fields={key: text for key, text in values.items() if key not in _KEYS},
        convention=values.get("convention", "maxtext"),
        price=number_of(values, "price", float, is_positive=True),
        devices=number_of(values, "devices", int, is_positive=True),
    )


def _peak(options: Mapping[str, str]) -> hardware.Peak | None:
    flag, name = options.get(PEAK), options.get("hardware")
    if flag is None and name is None:
        if "dtype" in options:
            raise UserError(
                "dtype= is that of a peak; expected hardware= or peak_tflops_per_device= beside it",
                hint=f"for example hardware=h100 dtype={options['dtype']}; without both, a run's "
                "MFU is relative to the peak that it logged",
            )
        return None
    return hardware.resolve_peak(
        None,
        options.get("dtype", "bf16"),
        peak_tflops_per_device=flag,  # type: ignore[arg-type]  # text is converted and checked
        hardware=name,
    )
