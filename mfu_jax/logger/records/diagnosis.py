"""Impossible numbers: values that no real step can have, and their likely causes.

They are shown and marked, never clipped: a clipped MFU hides the mistake behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

from mfu_jax.logger.records.step_cost import StepCost

# Clocks and peaks are not exact to the last digit; a step at 100.1% of peak is fine.
TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One impossible number: `flag` names it in records, `text` gives the likely causes."""

    flag: str
    text: str


class Plausibility:
    """Quickly clears most steps of having impossible numbers.

    Args:
        cost: the cost of each step.
    """

    def __init__(self, cost: StepCost) -> None:
        known = (cost.model_seconds, cost.executed_seconds, cost.memory_seconds)
        self._plenty_seconds = max((best for best in known if best is not None), default=0.0)
        self._is_possible = not _runs_too_little(cost)

    def is_plausible(self, seconds: float) -> bool:
        """Whether a step that takes `seconds` needs no `diagnose`."""
        return self._is_possible and seconds > self._plenty_seconds


def diagnose(cost: StepCost, scalars: Mapping[str, float]) -> list[Finding]:
    """The impossible numbers of one step.

    Args:
        cost: the step's work and the device's peaks.
        scalars: the ``perf/`` scalars of the step.
    """
    findings: list[Finding] = []
    seconds = scalars["perf/step_time_seconds"]
    mfu, hfu, mbu = scalars.get("perf/mfu"), scalars.get("perf/hfu"), scalars.get("perf/mbu")
    limit = 1 + TOLERANCE
    if seconds <= 0:
        findings.append(
            Finding(
                flag="step_time_not_positive",
                text=f"the step took {seconds} s; a step takes time; usually record() was given "
                f"the outputs of an earlier step, or the clock stands still",
            )
        )
        return findings
    if hfu is not None and hfu > limit:
        findings.append(_too_fast("HFU", hfu, cost.executed_seconds, seconds, cost))
    elif mfu is not None and mfu > limit:
        findings.append(_too_fast("MFU", mfu, cost.model_seconds, seconds, cost))
    if mfu is not None and hfu is not None and _runs_too_little(cost):
        findings.append(_too_little(mfu, hfu, cost))
    if mbu is not None and mbu > limit:
        findings.append(
            Finding(
                flag="mbu_over_1",
                text=f"MBU {mbu:.1%} is over 100%; usually bytes that stay in caches or fused "
                f"values were counted as memory traffic, or the bandwidth is of another device",
            )
        )
    return findings


def _runs_too_little(cost: StepCost) -> bool:
    """Whether the program runs fewer FLOPs than the model needs, without an explanation.

    Compares FLOPs, not utilisation: MFU and HFU may be relative to different dtypes' peaks.
    """
    executed, model = cost.executed_flops_per_device, cost.model_flops_per_device
    if executed is None or model is None:
        return False
    needed = model - cost.removed_flops_per_device
    return 200 * executed < 199 * needed  # `TOLERANCE`, without a fraction in every step


def _too_little(mfu: float, hfu: float, cost: StepCost) -> Finding:
    executed, model = cost.executed_flops_per_device, cost.model_flops_per_device
    assert executed is not None  # without it there is no HFU
    assert model is not None  # nor MFU without this
    share = float(executed / Fraction(model))
    return Finding(
        flag="hfu_below_mfu",
        text=f"HFU {hfu:.1%}, MFU {mfu:.1%}: the program runs {share:.3g} × the model's FLOPs, "
        f"though it must run at least all of them; usually the model count takes attention pairs "
        f"that the kernel skips (convention=dense, or maxtext with a kernel that skips masked "
        f"blocks), a custom kernel has no FLOP count (see the unaccounted list), "
        f"hfu_source=cost_analysis counts each loop once, or one of the two is of the whole job "
        f"and the other of one device",
    )


_SHORT_STEP_SECONDS = 0.01


def _too_fast(
    name: str, value: float, optimal_seconds: float | None, seconds: float, cost: StepCost
) -> Finding:
    assert optimal_seconds is not None  # without it there is no utilisation
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
    if seconds < _SHORT_STEP_SECONDS:
        causes.append(
            "the previous step was seen to end late, which shortens a step as short as this one"
        )
    return Finding(
        flag=f"{name.lower()}_over_1",
        text=f"{name} {value:.1%} is over 100%: {seconds:.6g} s is shorter than the "
        f"{optimal_seconds:.6g} s that the peak allows; usually "
        f"{'; or '.join(causes)}; check the FLOPs and set "
        f"peak_tflops_per_device, or measure it with mfu-jax hardware --calibrate",
    )
