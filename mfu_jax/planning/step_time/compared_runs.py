"""How far predictions were from measured runs, and thus the expected range of the next run."""

from __future__ import annotations

import functools
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from mfu_jax.util.yaml_files import read_mapping

_FILE = Path(__file__).with_name("compared_runs.yml")
_FEWEST = 4  # runs needed to estimate a spread
_LIBTPU = re.compile(r"libtpu 0\.0\.(\d+)")
_FIRST_NEWER = 43  # 0.0.42 waits for transfers that the newer ones hide, and its plans are longer
# 95% quantiles of Student's t with 1, 2, … degrees of freedom (NIST e-Handbook, 1.3.6.7.2).
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A measured run and its prediction. Times are seconds per step.

    Attributes:
        run: its id.
        platform: ``tpu`` or ``cuda``.
        step: whose step was compiled: ``maxtext`` or ``reference``.
        measured_seconds: as reported by whoever ran it.
        predicted_seconds: from the walk of the schedule.
        bound_seconds: lower bound on the program's time.
        fitted: an efficiency was fitted to this run alone, so it cannot be judged.
        experts: whether the model has experts.
        newer_seconds: predicted with jax 0.12.0's libtpu, 0.0.50; 0: not planned with it.
        note: where the compiled step is known to differ.
    """

    run: str
    platform: str
    step: str
    measured_seconds: float
    predicted_seconds: float
    bound_seconds: float
    fitted: bool = False
    experts: bool = False
    newer_seconds: float = 0.0
    note: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction against the measured time."""
        return self.predicted_seconds / self.measured_seconds - 1


@functools.cache
def compared_runs() -> tuple[ComparedRun, ...]:
    """All compared runs, bad predictions included."""
    return tuple(ComparedRun(**row) for row in read_mapping(_FILE)["runs"])


def is_newer(compiled_by: str) -> bool:
    """Whether a plan's compiler is one of which `ComparedRun.newer_seconds` speaks.

    >>> is_newer("jax 0.12.0.1, libtpu 0.0.50.1"), is_newer("jax 0.10.2, libtpu 0.0.42.1")
    (True, False)
    """
    found = _LIBTPU.search(compiled_by)
    return found is not None and int(found[1]) >= _FIRST_NEWER


def residuals(
    platform: str, experts: bool | None = None, compiled_by: str = ""
) -> tuple[float, float] | None:
    """Range of measured / predicted times expected for nine of ten runs similar to these.

    The prediction interval of a normal distribution of log(measured / predicted).

    Args:
        platform: ``tpu`` or ``cuda``.
        experts: for models with (True) or without (False) experts; None: for all models. Few models
            with experts were compared, so their range is at least as wide as that of all.
        compiled_by: the plan's compiler, as `Plan.compiled_by`.

    Returns:
        The lower and the upper ratio; None if too few runs were compared.
    """
    newer = is_newer(compiled_by)
    own, of_all = _interval(platform, experts, newer), _interval(platform, None, newer)
    if not experts or own is None or of_all is None:
        return own or of_all
    return min(own[0], of_all[0]), max(own[1], of_all[1])


def _interval(platform: str, experts: bool | None, newer: bool) -> tuple[float, float] | None:
    predicted = [
        (run, run.newer_seconds if newer else run.predicted_seconds)
        for run in compared_runs()
        if run.platform == platform and not run.fitted and experts in (None, run.experts)
    ]
    ratios = [math.log(run.measured_seconds / seconds) for run, seconds in predicted if seconds]
    if len(ratios) < _FEWEST:
        return None
    freedom = min(len(ratios) - 1, len(_T))
    spread = statistics.stdev(ratios) * math.sqrt(1 + 1 / len(ratios))
    middle, half = statistics.mean(ratios), _T[freedom - 1] * spread
    return math.exp(middle - half), math.exp(middle + half)
