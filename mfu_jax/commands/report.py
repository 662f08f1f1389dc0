"""Summarises a run over all its restarts: its steps, and where its wall clock went.

usage: mfu-jax report RUN [key=value …] [--json]
       mfu-jax report RUN FILE --export=ml_goodput

RUN             the run's folder; or its metrics.jsonl, MaxText's metrics_file, or a log with lines
                'completed step: 7, seconds: 0.123, TFLOP/s/device: …' (MaxText's, or ours);
                - reads standard input: zcat log.gz | mfu-jax report -
hardware=h100   the peak that MFU is relative to, in dtype=bf16; or peak_tflops_per_device=989
warmup_steps=3  steps excluded after each start, if the file does not mark them
model=NAME_OR_FILE key=value …   the FLOPs of a step are counted from a config, as mfu-jax flops
                takes it, by convention=maxtext, and shown in the other conventions, too
--json          one JSON object on stdout
--export=ml_goodput   writes the journal's events to FILE, a line each, in the log format of
                ml-goodput-measurement"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mfu_jax import hardware
from mfu_jax.arguments import Arguments, check_key, parse
from mfu_jax.errors import UserError
from mfu_jax.formatting import json_text, percent, readable
from mfu_jax.logger.summary import Summary
from mfu_jax.runs import ml_goodput
from mfu_jax.runs.goodput import of_metrics, read_attempts, read_journaled
from mfu_jax.runs.journals import metrics_file_of
from mfu_jax.runs.metrics_files import MetricsRun, read_metrics
from mfu_jax.runs.run_time import CATEGORIES, Part, RunTime
from mfu_jax.runs.step_table import LoggedStep
from mfu_jax.runs.time_table import render
from mfu_jax.storage.addresses import path_of
from mfu_jax.storage.targets import write_whole
from mfu_jax.values import typed

_KEYS = ("hardware", "dtype", "model", "convention", "peak_tflops_per_device", "warmup_steps")
# MaxText's seconds are the time between two dispatches, which equals a step's time only once its
# queue is full: in a real run of ten-millisecond steps the third one took "0.001".
_WARMUP_STEPS = 3
_SHOWN = ("maxtext", "exact", "dense", "palm", "6n")
_FORMS = {"jsonl": "mfu_jax metrics", "maxtext": "MaxText metrics_file", "log": "log lines"}
_LOGGED = ("step_time_seconds", "per_device_tflops_per_sec")  # three decimals in a log
_SMALLEST = 1e-9


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        UserError: wrong arguments, or a file that holds no run.
    """
    if not argv:
        print(__doc__)
        return 2
    arguments = parse(argv, flags=("--json",))
    if "export" in arguments.values:
        return _export(arguments)
    path = arguments.one_name("file")
    options, fields = _options(arguments)
    metrics_file = path if path == "-" else str(metrics_file_of(path_of(path)))
    journaled = None if path == "-" else read_journaled(metrics_file)
    if journaled is not None and not _has_steps(metrics_file):
        print(json_text(_of_journal(journaled)) if arguments.flags else render(journaled))
        return 0
    run = read_metrics(metrics_file)
    run_time = journaled or of_metrics(run)
    peak = _peak(options)
    reported = _tflops_of_a_step(run)
    conventions: dict[str, float] = {}
    if "model" in options:
        convention = options.get("convention", "maxtext")
        conventions = _count(run, options["model"], fields, convention)
        run = _with_flops(run, conventions[convention])
    if peak is not None:
        run = _with_peak(run, peak)
    summary = run.summary(warmup_steps=_warmup_steps(options))
    if not summary.steps or not summary.mean_seconds:
        raise UserError(
            f"{path!r} holds {len(run.steps)} steps, none of them with a measured time; expected "
            f"steps after compilation and warm-up; usually the run was short, or a log has 0.000 "
            f"for its times; pass warmup_steps=0, or the metrics file instead of the log"
        )
    run_time = run_time.with_utilization(summary.mfu, summary.hfu)
    answer = _answer(run, summary, peak, reported, conventions) | _time(run_time, summary)
    print(json_text(answer) if arguments.flags else _render(answer, run, summary, run_time))
    return 0


def _has_steps(metrics_file: str) -> bool:
    """Whether a metrics file has a measured step; a process may end before its first."""
    try:
        return read_metrics(metrics_file).summary(warmup_steps=0).steps > 0
    except UserError:
        return False


def _of_journal(run: RunTime) -> dict[str, Any]:
    """The answer where no step was measured."""
    return {"file": run.path, "mfu": run.mfu, "hfu": run.hfu} | _time(run, Summary(steps=0))


def _export(arguments: Arguments) -> int:
    """Writes a run's events in another tool's format."""
    if arguments.values != {"export": "ml_goodput"} or len(arguments.names) != 2:
        raise UserError(
            "--export: expected mfu-jax report RUN FILE --export=ml_goodput, and nothing else; "
            "usually the file to write is missing; pass RUN, then FILE"
        )
    run, file = arguments.names
    events = ml_goodput.events(path_of(run).name, read_attempts(run))
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    write_whole(file, "FILE", lines.encode())
    print(f"{file}: {len(events)} events")
    return 0


def _time(run: RunTime, summary: Summary) -> dict[str, Any]:
    """The part of the answer that the journal knows; None without one."""
    known = {
        "measured_steps": summary.steps,
        "goodput": run.goodput,
        "effective_mfu": run.effective_mfu,
        "wall_seconds": run.wall_seconds,
        "restarts": run.restarts,
        "lost_steps": run.lost_steps,
        "time": {name: run.time.get(name) for name in CATEGORIES},
        "attempts": [dataclasses.asdict(attempt) for attempt in run.attempts],
        "days": [_part(day) for day in run.days],
        "processes": [_part(process) for process in run.processes],
        "notes": run.notes,
    }
    return known | ({"steps": run.steps} if run.has_journal else {})


def _part(part: Part) -> dict[str, Any]:
    names = ("name", "wall_seconds", "goodput", "effective_mfu", "time")
    return {name: getattr(part, name) for name in names}


def _options(arguments: Arguments) -> tuple[dict[str, str], dict[str, str]]:
    """The command's own options, and fields of the model."""
    values = arguments.values
    if "model" not in values:
        known = [key for key in _KEYS if key != "convention"]
        usually = "; usually a key for counting the model, which needs model=NAME_OR_FILE"
        for key in values:
            check_key(key, known, usually=usually)
    options = {key: text for key, text in values.items() if key in _KEYS}
    return options, {key: text for key, text in values.items() if key not in _KEYS}


def _warmup_steps(options: Mapping[str, str]) -> int:
    note = f"; it is how many steps to leave out; {_WARMUP_STEPS} if not given"
    steps: int = typed("warmup_steps", options.get("warmup_steps", _WARMUP_STEPS), int, note=note)
    if steps < 0:
        raise UserError(f"warmup_steps={steps}: expected 0 or more{note}")
    return steps


def _peak(options: Mapping[str, str]) -> hardware.Peak | None:
    flag, name = options.get("peak_tflops_per_device"), options.get("hardware")
    if flag is None and name is None:
        return None
    return hardware.resolve_peak(
        None,
        options.get("dtype", "bf16"),
        peak_tflops_per_device=flag,  # type: ignore[arg-type]  # text is converted and checked
        hardware=name,
    )


def _tflops_of_a_step(run: MetricsRun) -> float:
    """From the file; for a log, time × rate of the step in which rounding matters least."""

    def rounded(step: LoggedStep) -> float:
        seconds, rate = (step.scalars.get(f"perf/{name}", 0.0) for name in _LOGGED)
        return 1 / max(seconds, _SMALLEST) + 1 / max(rate, _SMALLEST)

    return min(run.steps, key=rounded).scalars["perf/per_device_tflops"]


def _count(
    run: MetricsRun, model: str, fields: Mapping[str, str], convention: str
) -> dict[str, float]:
    """TFLOPs of a step on one device by every convention, from a config."""
    from mfu_jax.flops.analytic.conventions import find_convention
    from mfu_jax.flops.analytic.inputs import load_model_config, parse_override
    from mfu_jax.flops.analytic.totals import TERA, calculate_tokens_per_device, compare_conventions

    find_convention(convention)
    config = load_model_config(
        model, {key: parse_override(key, text) for key, text in fields.items()}
    )
    tokens = float(calculate_tokens_per_device(config))
    longest = max(run.steps, key=lambda step: step.scalars["perf/step_time_seconds"])
    logged, seconds = (
        longest.scalars[f"perf/{name}"] for name in ("per_device_tokens", "step_time_seconds")
    )
    # A log rounds seconds and tokens/s to three decimals.
    tolerance = 0.001 + (0.0005 / max(seconds, _SMALLEST) if run.form == "log" else 0.0)
    if logged and abs(logged / tokens - 1) > tolerance:
        raise UserError(
            f"{run.path!r} has {logged:,.0f} tokens per step and device, {model} as given has "
            f"{tokens:,.0f}; expected the same; usually per_device_batch_size or "
            f"max_target_length is missing; pass them as key=value"
        )
    counted = compare_conventions(config)
    return {name: float(flops.training) / TERA for name, flops in counted.items()}


def _with_flops(run: MetricsRun, tflops: float) -> MetricsRun:
    """The run with other model FLOPs per step; a known MFU scales with them."""

    def change(scalars: Mapping[str, float]) -> dict[str, float]:
        new = dict(scalars, **{"perf/per_device_tflops": tflops})
        if "perf/mfu" in scalars and scalars["perf/per_device_tflops"]:
            new["perf/mfu"] *= tflops / scalars["perf/per_device_tflops"]
        return new

    return run.with_scalars(change)


def _with_peak(run: MetricsRun, peak: hardware.Peak) -> MetricsRun:
    """The run with MFU relative to another peak; a known HFU keeps its ratio to MFU."""

    def change(scalars: Mapping[str, float]) -> dict[str, float]:
        optimal = scalars["perf/per_device_tflops"] / peak.tflops_per_sec
        new = dict(scalars)
        new["perf/mfu"] = optimal / max(scalars["perf/step_time_seconds"], _SMALLEST)
        if "perf/hfu" in scalars and scalars.get("perf/mfu"):
            new["perf/hfu"] = scalars["perf/hfu"] * new["perf/mfu"] / scalars["perf/mfu"]
        else:
            new.pop("perf/hfu", None)
        return new

    return run.with_scalars(change)


def _answer(
    run: MetricsRun,
    summary: Summary,
    peak: hardware.Peak | None,
    reported: float,
    conventions: Mapping[str, float],
) -> dict[str, Any]:
    def mfu(tflops: float) -> float | None:
        own, seconds = summary.tflops_per_sec_per_device, summary.mean_seconds
        return summary.mfu * tflops / seconds / own if summary.mfu and own and seconds else None

    return {
        "file": run.path,
        "form": run.form,
        "first_step": run.steps.numbers[0],
        "last_step": run.steps.numbers[-1],
        "restarts": run.restarts,
        "unreadable_lines": run.unreadable,
        "repeated_lines": run.repeated,
        "peak_tflops_per_device": None if peak is None else peak.tflops_per_sec,
        "peak": None if peak is None else str(peak),
        **summary.to_json(),
        "reported_tflops": reported,
        "conventions": {
            name: {"tflops": tflops, "mfu": mfu(tflops)} for name, tflops in conventions.items()
        },
    }


def _render(answer: Mapping[str, Any], run: MetricsRun, summary: Summary, run_time: RunTime) -> str:
    asides = [
        f"{count} {text}"
        for count, text in (
            (run_time.restarts, "restarts"),
            (run.other_records, "records that are not steps"),
            (run.repeated, "lines that repeat a step"),
            (run.unreadable, "unreadable lines"),
        )
        if count
    ]
    lines = [
        f"{_FORMS[run.form]}, steps {answer['first_step']} to {answer['last_step']}"
        + (f" ({', '.join(asides)})" if asides else ""),
        summary.render(),
    ]
    if answer["peak"]:
        lines.append(f"  peak         {answer['peak']}")
    reported = readable(answer["reported_tflops"])
    lines.append(f"  model        {reported} TFLOP per step and device, as reported")
    for name in _SHOWN:
        if name in answer["conventions"]:
            row = answer["conventions"][name]
            lines.append(
                f"    {name:<10} {readable(row['tflops'])} TFLOP, MFU {percent(row['mfu'])}"
            )
    return "\n".join([*lines, *filter(None, [render(run_time)])])
