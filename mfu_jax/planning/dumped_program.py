"""Checks that a dumped program was compiled for the chips that it is planned for."""

from __future__ import annotations

import math
import re

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError
from mfu_jax.hardware.naming import find
from mfu_jax.planning.targets import Target

_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")  # in the first line of HLO text
_OWN_NAMES = {"gpu": "cuda"}  # a platform's name in dumps → its compiler's name


def check_dump(name: str, program: ProgramDump, target: Target) -> tuple[str, ...]:
    """A note if the program is for another chip, as far as the dump says.

    Args:
        name: the file's name, for messages.
        program: the dump.
        target: the chips.

    Raises:
        UserError: the program is for another platform, or for another number of devices.
    """
    topology = program.topology
    if _OWN_NAMES.get(topology.platform, topology.platform) not in ("", target.platform):
        raise UserError(
            f"{name} is a program for {topology.platform}; expected one for {target.platform}, as "
            f"{target} needs; usually a step compiled where no such chip is attached; plan the "
            "step itself, or pass the chips of the dump"
        )
    head = program.text.partition("\n")[0]
    devices = math.prod(int(count) for count in _DEVICES.findall(head))
    if devices != target.devices:
        raise UserError(
            f"{name} is a program of {devices} devices; expected {target.devices}, those of "
            f"{target}; usually other chips than it was compiled for; pass theirs"
        )
    if not topology.device_kind or target.chip in find(topology.device_kind):
        return ()
    return (
        f"the program was compiled for {topology.device_kind}: one for {target.chip.name} has "
        "another schedule, and may need another amount of memory",
    )
