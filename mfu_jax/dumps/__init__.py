"""Dumps: a compiled program with all that is known about it, in one compressed file.

`dump` writes one, `load` reads it back: `executed_flops`, `mfu-jax compare` and everything else
that reads compiled programs accept the result like the program itself. Reading needs no JAX.
"""

from mfu_jax.dumps.files import load, write
from mfu_jax.dumps.program import ModelFlops, ProgramDump, Topology
from mfu_jax.dumps.recording import dump, record
from mfu_jax.storage.trace_folders import DUMP_SUFFIX as SUFFIX

__all__ = [
    "SUFFIX",
    "ModelFlops",
    "ProgramDump",
    "Topology",
    "dump",
    "load",
    "record",
    "write",
]
