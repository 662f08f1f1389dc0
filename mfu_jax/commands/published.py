"""Recomputes published results, and places a run among them.

usage: mfu-jax published [ID …] [--json]
       mfu-jax published --like RUN [--json]

Recomputes published MFUs, throughputs and FLOP counts from the model's shape and the measured
speed, in the publisher's own convention. A number reproduces if it agrees within the rounding of
the printed value.
--like RUN  the published runs of the same model class (FLOPs per token within a factor of three)
            on RUN's chip, each with its MFU in RUN's convention and relative to its peak

example: mfu-jax published --like runs/a"""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.errors import UserError
from mfu_jax.published import PublishedRun, Recomputed, find_run, published_runs, recompute
from mfu_jax.runs.report.run_data import Options, read_run_data
from mfu_jax.util.arguments import Arguments, parse
from mfu_jax.util.formatting import columns, json_text, percent

_FIELDS = "quantity published recomputed relative_difference half_ulp status why".split()


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=("like",), flags=("--json",))
    if "like" in arguments.values:
        return _like(arguments)
    runs = [find_run(name) for name in arguments.names] or list(published_runs())
    if arguments.flags:
        print(json_text([_as_json(run) for run in runs]))
    else:
        print("\n\n".join(_render(run, in_full=bool(arguments.names)) for run in runs))
        checks = [check for run in runs for check in recompute(run)]
        same = sum(check.status != "differs" for check in checks)
        print(f"\n{same} of {len(checks)} numbers of {len(runs)} runs reproduce within rounding")
    return 0


def _like(arguments: Arguments) -> int:
    """Prints the published runs beside which a run is placed."""
    if arguments.names:
        raise UserError(f"--like and {arguments.names[0]!r}: expected one of them")
    verdict = read_run_data(arguments.values["like"], Options()).verdict
    like, peak = verdict.like_runs, verdict.peak_flops_per_sec_per_device or 1.0
    runs = [] if like is None else [find_run(name) for name in like.runs]
    rows = sorted(((run.mfu(verdict.convention, peak), run) for run in runs), key=lambda r: -r[0])
    if arguments.flags:
        found = [{"id": run.id, "mfu": mfu, "source": run.source} for mfu, run in rows]
        print(json_text({"verdict": verdict.to_json(), "runs": found}))
        return 0
    cells = [(percent(mfu), str(run.devices), run.id, run.source) for mfu, run in rows]
    table = columns([("MFU", "devices", "run", "source"), *cells], ">><<")
    print("\n".join([verdict.render(), *(table if cells else ["no published run on this chip"])]))
    return 0


def _render(run: PublishedRun, *, in_full: bool) -> str:
    lines = [f"{run.id}  ({run.devices} × {run.hardware}, {run.dtype})"]
    if in_full:
        lines += [f"  convention  {run.convention}", f"  source      {run.source}"]
        lines += [f"  note        {run.note}"] * bool(run.note)
    for check in recompute(run):
        lines.append(
            f"  {check.quantity:<34} published {check.published:<12.6g} recomputed "
            f"{check.recomputed:<12.6g} {check.relative_difference:+8.3%}  {check.status}"
        )
        lines += [f"  {'':<34} why: {check.why}"] * bool(check.why)
    return "\n".join(lines)


def _as_json(run: PublishedRun) -> dict[str, object]:
    return {
        "id": run.id,
        "source": run.source,
        "convention": run.convention,
        "checks": [_check_json(check) for check in recompute(run)],
    }


def _check_json(check: Recomputed) -> dict[str, object]:
    return {name: getattr(check, name) for name in _FIELDS}
