"""Impossible numbers: values that no real step can have, and their likely causes.

They are shown and marked, never clipped: a clipped MFU hides the mistake behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from mfu_jax.logger.records.step_cost import TOLERANCE, StepCost


def diagnose(cost: StepCost, scalars: Mapping[str, float]) -> dict[str, str]:
    """The impossible numbers of one step; most steps have none (`StepRates.may_take`).

    Args:
        cost: the step's work and the device's peaks.
        scalars: the ``perf/`` scalars of the step.

    Returns:
        Flag, which names it in records → its likely causes.
    """
    seconds = scalars["perf/step_time_seconds"]
    if seconds <= 0:
        return {
            "step_time_not_positive": f"the step took {seconds} s; a step takes time; usually "
            f"record() was given the outputs of an earlier step, or the clock stands still"
        }
    findings = {}
    mfu, hfu, mbu = (scalars.get(f"perf/{name}", 0.0) for name in ("mfu", "hfu", "mbu"))
    limit = 1 + TOLERANCE
    if hfu > limit:
        findings["hfu_over_1"] = _too_fast("HFU", hfu, seconds, cost)
    elif mfu > limit:
        findings["mfu_over_1"] = _too_fast("MFU", mfu, seconds, cost)
    if "perf/mfu" in scalars and "perf/hfu" in scalars and cost.runs_too_little:
        findings["hfu_below_mfu"] = _too_little(mfu, hfu, cost)
    if mbu > limit:
        findings["mbu_over_1"] = (
            f"MBU {mbu:.1%} is over 100%; usually bytes that stay in caches or fused values were "
            f"counted as memory traffic, or the bandwidth is of another device"
        )
    return findings


def _too_little(mfu: float, hfu: float, cost: StepCost) -> str:
    executed, model = cost.executed_flops_per_device or 0, cost.model_flops_per_device or 1
    share = float(Fraction(executed) / model)
    return (
        f"HFU {hfu:.1%}, MFU {mfu:.1%}: the program runs {share:.3g} × the model's FLOPs, though "
        f"it must run at least all of them; usually the model count takes attention pairs that the "
        f"kernel skips (convention=dense, or maxtext with a kernel that skips masked blocks), a "
        f"custom kernel has no FLOP count (see the unaccounted list), hfu_source=cost_analysis "
        f"counts each loop once, XLA merges work that shards or processes do twice (see the "
        f"ledger's residual), or one of the two is of the whole job and the other of one device"
    )


def _too_fast(name: str, value: float, seconds: float, cost: StepCost) -> str:
    causes = [
        "the peak is that of a lower precision (f32 where the matmuls run in bf16 or fp8), or of "
        "half a chip",
        "the FLOPs or tokens are of the whole job, not of one device",
        "the step was not waited for (record() was given outputs that it does not compute)",
    ]
    if name == "MFU" and cost.executed_flops_per_device is not None:
        # The hardware's own count is possible, so the peak and the clock are most likely right.
        causes = [
            "the model FLOPs are too high: of the whole job, or of attention pairs that the mask "
            "drops (convention=dense)",
            *causes[:1],
        ]
    elif value > 2:  # few peaks are wrong by that much
        causes = [causes[1], causes[2], causes[0]]
    return (
        f"{name} {value:.1%} is over 100%: {seconds:.6g} s is shorter than the "
        f"{value * seconds:.6g} s that the peak allows; usually {'; or '.join(causes)}; check the "
        f"FLOPs and set peak_tflops_per_device, or measure it with mfu-jax hardware --calibrate"
    )
