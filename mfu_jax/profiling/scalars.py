"""A trace's numbers as one line of JSON, for the run that made it.

    python -m mfu_jax.profiling.scalars FOLDER [TFLOPS [HARDWARE]]

`mfu_jax.instrumentation.device_trace` runs it beside a training process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from mfu_jax.errors import UserError, first_line, one_line
from mfu_jax.profiling.profile import read_profile

_LOWER = 10  # niceness: everything else on the machine goes first


def main(argv: Sequence[str]) -> int:
    """Prints `Profile.scalars` of a trace.

    Args:
        argv: its folder; then the peak of one device in TFLOP/s and a chip of the table, each empty
            if the other one, or the trace, gives it.

    Returns:
        The exit code: 2, and one line on stderr, if the trace cannot be read.
    """
    folder, tflops, hardware = [*argv, "", ""][:3]
    os.nice(_LOWER)
    try:
        profile = read_profile(
            folder,
            peak_tflops_per_device=float(tflops) if tflops else None,
            hardware=hardware,
        )
    except UserError as error:
        print(one_line(first_line(error)), file=sys.stderr)
        return 2
    print(json.dumps(profile.scalars()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
