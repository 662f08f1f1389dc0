"""How far predictions were from measured runs, and so the range in which the next run will lie."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from mfu_jax.yaml_files import read_mapping

_FILE = Path(__file__).with_name("compared_runs.yml")
_FEWEST = 4  # runs of which a spread is known
# 95% quantiles of Student's t with 1, 2, … degrees of freedom (NIST e-Handbook, 1.3.6.7.2).
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A measured run and its prediction. Times in seconds of a step.

    Attributes:
        run: its id.
        platform: ``tpu`` or ``cuda``.
        step: whose step was compiled: ``maxtext`` or ``reference``.
        measured_seconds: by whoever ran it.
        predicted_seconds: by the walk of the schedule.
        bound_seconds: no run of the program is faster.
        left_out_seconds: predicted with the shares as they are fitted to the other runs; None if
            nothing was fitted to it.
        fitted: a share was fitted to it alone: it cannot be judged.
        experts: whether the model has any.
        note: where the compiled step is known to differ.
    """

    run: str
    platform: str
    step: str
    measured_seconds: float
    predicted_seconds: float
    bound_seconds: float
    left_out_seconds: float | None = None
    fitted: bool = False
    experts: bool = False
    note: str = ""

    @property
    def error(self) -> float:
        """Of the prediction that knows nothing of this run, relative to the measured time."""
        return self.judged_seconds / self.measured_seconds - 1

    @property
    def judged_seconds(self) -> float:
        """The prediction with nothing fitted to this run."""
        return self.left_out_seconds or self.predicted_seconds


@functools.cache
def compared_runs() -> tuple[ComparedRun, ...]:
    """All of them, the bad ones too."""
    return tuple(ComparedRun(**row) for row in read_mapping(_FILE)["runs"])


def compared_by() -> str:
    """The versions that compiled the steps."""
    return str(read_mapping(_FILE)["compiled_by"])


def residuals(platform: str, experts: bool | None = None) -> tuple[float, float] | None:
    """Measured / predicted times between which nine of ten runs would lie, were they like these.

    The prediction interval of a normal distribution of log(measured / predicted).

    Args:
        platform: ``tpu`` or ``cuda``.
        experts: of models with experts, or without; None: of all.

    Returns:
        None if too few runs were compared.
    """
    ratios = [
        math.log(run.measured_seconds / run.judged_seconds)
        for run in compared_runs()
        if run.platform == platform and not run.fitted and experts in (None, run.experts)
    ]
    if len(ratios) < _FEWEST:
        return None
    freedom = min(len(ratios) - 1, len(_T))
    spread = statistics.stdev(ratios) * math.sqrt(1 + 1 / len(ratios))
    middle, half = statistics.mean(ratios), _T[freedom - 1] * spread
    return math.exp(middle - half), math.exp(middle + half)
