"""What one process reports to the others about a window of its steps.

Adding a cause: a field here, a rule in `findings`, and a planted fault in
tests/campaigns/stragglers.py.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """Means over the steps of one window, in seconds per step, as one process saw them.

    Attributes:
        process: process number.
        host: name of its host.
        step: the last step of the window.
        unix_seconds: wall clock when it was written.
        steps: steps in the window; 0: only a sign of life.
        step_time: time of a step.
        slack: how long the loop waited for the device: the host's lead over it.
        data: loop time in declared waits (``logger.waiting("data")``).
        dispatch: loop time in the call of an instrumented step.
        python: the rest of the loop time between two steps.
        late_data: `data` of the steps whose device was idle when the loop came back; 0 if the
            host runs ahead. Likewise `late_dispatch` and `late_python`.
        late_dispatch: see `late_data`.
        late_python: see `late_data`.
        gc: garbage collection, included in the others.
        cpu: CPU time of threads that Python did not start, mostly XLA's, which is the step's own
            work if the CPU is the device; None: not known here.
        starved: time in which these and the main thread could run but had no core; None: not known.
        stopped: time in which the process did not run at all, though it had a core.
    """

    process: int
    host: str = ""
    step: int = -1
    unix_seconds: float = 0.0
    steps: int = 0
    step_time: float = 0.0
    slack: float = 0.0
    data: float = 0.0
    dispatch: float = 0.0
    python: float = 0.0
    late_data: float = 0.0
    late_dispatch: float = 0.0
    late_python: float = 0.0
    gc: float = 0.0
    cpu: float | None = None
    starved: float | None = None
    stopped: float = 0.0

    def to_text(self) -> str:
        """One line of JSON; seconds to the nanosecond."""
        values = {
            name: float(f"{value:.6g}")
            if type(value) is float and name != "unix_seconds"
            else value
            for name, value in dataclasses.asdict(self).items()
        }
        return json.dumps(values, separators=(",", ":"), allow_nan=False)

    @classmethod
    def of_text(cls, text: str) -> HostReport:
        """Reads what `to_text` wrote; unknown fields of other versions are ignored.

        Raises:
            ValueError: it is not a report.
        """
        values: Any = json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("process"), int):
            raise ValueError(f"no report of a host: {text[:100]!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
