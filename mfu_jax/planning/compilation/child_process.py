"""First steps of a compiling child process: it limits itself, and ends with its parent."""

from __future__ import annotations

import os
import resource
import signal
import sys

MEMORY = "MFU_JAX_COMPILE_BYTES"  # of the environment; 0 or absent: no limit
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def obey_parent() -> None:
    """Limits this process's memory; on Linux, ends it with its parent.

    Otherwise a killed command would leave a compile of half an hour behind.
    """
    if limit := int(os.environ.get(MEMORY, 0)):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
