"""Totals of the phases of a run."""

from __future__ import annotations

import dataclasses
import threading

from mfu_jax.logger.records.step_cost import StepCost, add_costs


class PhaseTotals:
    """Totals of each phase; any thread may add to them."""

    def __init__(self) -> None:
        self._of_name: dict[str, _Total] = {}
        self._lock = threading.Lock()

    def add(self, name: str, times: int, seconds: float, cost: StepCost | None) -> None:
        """Adds `times` runs of a phase, which took `seconds` in total."""
        with self._lock:
            self._of_name.setdefault(name, _Total()).add(times, seconds, cost)

    def values(self) -> dict[str, dict[str, float]]:
        """All totals.

        Returns:
            Phase → ``times``, total ``seconds``, and, if known, ``tflops_per_sec_per_device``,
            ``mfu`` and ``hfu``.
        """
        with self._lock:
            return {name: total.values() for name, total in self._of_name.items()}


@dataclasses.dataclass(slots=True)
class _Total:
    times: int = 0
    seconds: float = 0.0
    cost: StepCost | None = None

    def add(self, times: int, seconds: float, cost: StepCost | None) -> None:
        self.times += times
        self.seconds += seconds
        if cost is not None:
            self.cost = cost if self.cost is None else add_costs((self.cost, cost))

    def values(self) -> dict[str, float]:
        values = {"times": self.times, "seconds": self.seconds}
        if self.cost is not None and self.seconds > 0:
            rates = self.cost.rates(self.seconds)
            names = {
                "perf/per_device_tflops_per_sec": "tflops_per_sec_per_device",
                "perf/mfu": "mfu",
                "perf/hfu": "hfu",
            }
            values |= {name: rates[n] for n, name in names.items() if n in rates}
        return values
