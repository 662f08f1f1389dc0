"""The verdict on a plan: whether it fits, its MFU, what costs most, and what would help."""

from __future__ import annotations

import math

from mfu_jax.planning.result.plan import Plan, warning_of
from mfu_jax.verdict import TOKENS, LikeRuns, NextStep, TimeLoss, Verdict

_GIB = 2**30
_SWEEP = "mfu-jax plan --sweep remat_policy=none,full per_device_batch_size=1..8 and these keys"
_WORK = ("matmul", "kernel")  # causes that hold the model's FLOPs
_BEYOND = "matmuls and kernels: extra FLOPs, and below the peak"


def plan_verdict(plan: Plan) -> Verdict:
    """Judges a plan."""
    model = f"{plan.model} " if plan.model else ""
    fits = "fits" if plan.fits else "does NOT fit"
    used, limit = plan.memory_peak_bytes, plan.memory_limit_bytes
    size = f", {used / _GIB:,.2f} of {limit / _GIB:,.2f} GiB" if used and limit else ""
    step = plan.step_time_seconds
    peak = plan.model_flops / plan.mfu / step if plan.model_flops and plan.mfu and step else None
    losses = [
        TimeLoss(name=cause, fraction=seconds / step, seconds=seconds)
        for cause, seconds in plan.time_by_cause.items()
        if step and cause not in _WORK
    ]
    work = sum(plan.time_by_cause.get(cause, 0.0) for cause in _WORK)
    if step and plan.mfu is not None and work > plan.mfu * step:
        beyond = work - plan.mfu * step
        losses.append(TimeLoss(name=_BEYOND, fraction=beyond / step, seconds=beyond))
    helpful = [
        NextStep(text=c.change, gain_fraction=c.gain_fraction, gain_seconds=c.saves_seconds)
        for c in plan.changes
    ]
    if not plan.fits:
        helpful = [NextStep(text=_smaller(plan))]
    like_runs, more = _placed(plan, peak)
    return Verdict(
        kind="plan",
        finding=f"{warning_of(plan)}{plan.target}: {model}{fits}{size}",
        passed=plan.fits,
        mfu=plan.mfu,
        hfu=plan.hfu,
        convention=plan.convention,
        peak="" if peak is None else f"{peak / 1e12:.6g} TFLOP/s",
        peak_flops_per_sec_per_device=peak,
        step_time_seconds=step,
        losses=tuple(sorted(losses, key=lambda loss: -loss.fraction)),
        next_steps=(*helpful, NextStep(text=_SWEEP), *more),
        like_runs=like_runs,
        bound_mfu=plan.mfu_ceiling,
    )


def _smaller(plan: Plan) -> str:
    """How much less a step must hold to fit, as far as the compiler says."""
    used, limit, state = plan.memory_peak_bytes, plan.memory_limit_bytes, plan.resident_bytes
    if used and limit and state >= limit:
        state_size = f"{state / _GIB:,.2f} GiB"
        return f"{math.ceil(used / limit)} times the chips: the state alone takes {state_size}"
    less = math.ceil((used - state) / (limit - state)) if used and limit else 2
    batch = f"per_device_batch_size= divided by {max(less, 2)}"
    return f"remat_policy=full if it is another, {batch}, or more chips"


def _placed(plan: Plan, peak: float | None) -> tuple[LikeRuns | None, tuple[NextStep, ...]]:
    """Published runs of such a model on these chips, and what would place it better."""
    step, rate = plan.step_time_seconds, plan.tokens_per_sec_per_chip
    if not (peak and plan.model_flops and step):
        return None, ()
    from mfu_jax.published import like_runs  # the analytic counts: 0.3 s

    tokens = (rate or 0.0) * step * plan.chips / (plan.devices or plan.chips)  # of a device
    found = like_runs(
        chip=plan.hardware,
        dtype="bf16",
        peak_flops_per_sec=peak,
        flops_per_token=plan.model_flops / tokens if tokens else None,
        convention=plan.convention,
    )
    return found, (NextStep(text=TOKENS),) if found and not tokens else ()
