"""What a plan of the reference model's step says of a run of MaxText's."""

from __future__ import annotations

from dataclasses import replace

from mfu_jax.planning.measured_runs import MeasuredRun
from mfu_jax.planning.result.plan import Plan

_WORTH_SAYING = 0.05  # of the peak


def judged(plan: Plan, run: MeasuredRun) -> Plan:
    """The plan of the reference model's step, judged and annotated for MaxText's.

    MaxText's may need more memory for its loss. Where the reference model's fits only because the
    compiler recomputes matmuls, and this would not fit beside it, the run does not fit.
    """
    peak, limit = plan.memory_peak_bytes, plan.memory_limit_bytes
    if not (plan.fits and peak and limit):
        return plan
    more = run.loss_bytes
    if not _WORTH_SAYING * peak <= more <= limit:  # XLA recomputes more than that
        return plan
    is_over = peak + more > limit
    verdict = " and may then not fit" if is_over else ""
    if is_over and plan.is_short_of_memory:
        plan = replace(plan, fits=False)
        verdict = (
            " and is taken not to fit, as the reference model's fits only because the compiler "
            "recomputes matmuls"
        )
    return plan.with_notes(
        "the memory is that of the reference model's step; MaxText's may need up to "
        f"{more / 2**30:,.3g} GiB more{verdict}: its loss has logits, exponentials, one-hot "
        "targets and gradients in float32, of which XLA may keep none or all; "
        "maxtext_python=FILE plans it"
    )
