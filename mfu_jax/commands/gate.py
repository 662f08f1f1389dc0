"""Fails if a run is slower than its baseline: for CI.

usage: mfu-jax gate RUN --baseline RUN2 [--baseline RUN3 …] [--threshold 1%] [--junit FILE]
                    [--github] [--json | --markdown]

RUN and RUN2 are run folders, metrics files or logs, as for mfu-jax report. The gate compares
means without outliers, not single steps. A slowdown fails if its 99% interval excludes chance and
it reaches the threshold. The gate compares the step time, alone and with the wait for data, or, if
the runs' steps differ in tokens, tokens/s/device. Several baselines, all repeats, show the scatter
between runs, which is no regression. Four or more make a good model of the noise.
  --threshold X    smallest slowdown that fails: 1%, or 0.01 (default 1%)
  --junit FILE     writes the result as JUnit XML
  --github         prints an annotation for GitHub Actions
  --markdown       a pull request's comment, for gh pr comment --body-file -
  --json           one JSON object on stdout
  warmup_steps=3   steps excluded after each start, if the files do not mark them
Exit code: 0 no regression, also where noise hides one (could not tell), 1 a regression, 2 wrong
input.

example: mfu-jax gate runs/b --baseline runs/a --threshold=2%"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence

from mfu_jax.errors import UserError
from mfu_jax.runs.comparison.gate import Gate, check
from mfu_jax.runs.comparison.runs import compare_with_runs
from mfu_jax.runs.metrics.files import WARMUP_STEPS
from mfu_jax.runs.report.run_data import read_metrics_of
from mfu_jax.runs.report.setup import read_setup
from mfu_jax.runs.report.verdict import run_verdict
from mfu_jax.util.arguments import Arguments, parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.values import fraction_of, number_of
from mfu_jax.verdict import NextStep, TimeLoss, Verdict

_KEYS = ("baseline", "threshold", "junit", "warmup_steps")
_THRESHOLD = "1%"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=_KEYS, flags=("--json", "--github", "--markdown"))
    gate, verdict = _gate(arguments)
    if "junit" in arguments.values:
        gate.write_junit(arguments.values["junit"])
    if "--json" in arguments.flags:
        print(json_text({"verdict": verdict.to_json(), **gate.to_json()}))
    elif "--markdown" in arguments.flags:
        print(gate.markdown(dataclasses.replace(verdict, finding="").sentence))
    else:
        print(f"{verdict.render()}\n{gate.comparison.render()}")
    if "--github" in arguments.flags:
        print(gate.annotation())
    return 1 if gate.has_failed else 0


def _gate(arguments: Arguments) -> tuple[Gate, Verdict]:
    values = arguments.values
    run = arguments.one_name("run")
    baselines = [text for key, text in arguments.pairs if key == "baseline"]
    if not baselines:
        raise UserError(
            "no baseline; expected mfu-jax gate RUN --baseline RUN2",
            hint="name the run to compare with",
        )
    threshold = fraction_of(
        "threshold", values.get("threshold", _THRESHOLD), hint="leave it out for 1%"
    )
    warmup = number_of(values, "warmup_steps", int, WARMUP_STEPS)
    metrics = read_metrics_of(run)
    before = [read_metrics_of(name) for name in baselines]
    if any(same.path == metrics.path for same in before):
        print(f"mfu-jax gate: {run} is its own baseline, which hides regressions", file=sys.stderr)
    found = compare_with_runs(before, metrics, warmup_steps=warmup)
    gate = check(found, threshold=threshold)
    of_run = run_verdict(
        metrics.path,
        metrics.summary(warmup_steps=warmup),
        read_setup(metrics.path),
        wall={},
        profile=metrics.profile,
        steps=range(metrics.steps.numbers[0], metrics.steps.numbers[-1] + 1),
    )
    report = f"mfu-jax report {shlex.quote(baselines[0])} {shlex.quote(run)} --html=report.html"
    return gate, _verdict(gate, of_run, report)


def _verdict(gate: Gate, of_run: Verdict, report: str) -> Verdict:
    """The run's verdict, led by what the gate found."""
    slower = [
        TimeLoss(
            name=f"slower {check.row.metric.title}",
            fraction=1 - 1 / (1 + check.slowdown),
            seconds=found.b - found.a if check.row.metric.less_is_better else None,
        )
        for check in gate.failed
        for found in [check.row.difference]
    ]
    steps = of_run.next_steps[:1]
    return dataclasses.replace(
        of_run,
        kind="gate",
        finding="; ".join(filter(None, (gate.finding, of_run.finding))),
        passed=not gate.has_failed,
        losses=(*slower, *of_run.losses),
        next_steps=(NextStep(text=report), *steps) if gate.has_failed else steps,
    )
