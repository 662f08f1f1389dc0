"""Recomputes published results: how far each is from the printed number.

usage: mfu-jax published [ID …] [--json]

Recomputes published MFUs, throughputs and FLOP counts from the model's shape and the measured
speed, in the publisher's own convention. A number reproduces if it agrees within the rounding of
the printed value."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.runs.published import PublishedRun, Recomputed, find_run, published_runs, recompute
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import json_text


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=(), flags=("--json",))
    runs = [find_run(name) for name in arguments.names] or list(published_runs())
    if arguments.flags:
        print(json_text([_as_json(run) for run in runs]))
    else:
        print("\n\n".join(_render(run, in_full=bool(arguments.names)) for run in runs))
        checks = [check for run in runs for check in recompute(run)]
        same = sum(check.status != "differs" for check in checks)
        print(f"\n{same} of {len(checks)} numbers of {len(runs)} runs reproduce within rounding")
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
    return {
        "quantity": check.quantity,
        "published": check.published,
        "recomputed": check.recomputed,
        "relative_difference": check.relative_difference,
        "half_ulp": check.half_ulp,
        "status": check.status,
        "why": check.why,
    }
