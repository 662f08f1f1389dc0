"""The devices that a child process will find."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from mfu_jax.errors import UserError, first_line
from mfu_jax.hardware.chips import Chip, find
from mfu_jax.planning.targets import Target, generation_of, parse_target, slice_name
from mfu_jax.util.child_process import child_environment, last_line

_PROBE = (
    "import json, jax; d = jax.local_devices(); s = d[0].memory_stats() or {};"
    "print(json.dumps([d[0].platform, d[0].device_kind, len(d), s.get('bytes_limit')]))"
)
_PROBE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class AttachedDevices:
    """The attached devices.

    Attributes:
        platform: tpu, gpu or cpu.
        kind: JAX's `device_kind`.
        count: of this process.
        memory_bytes: of one; 0 if the runtime does not say (CPUs).
    """

    platform: str
    kind: str
    count: int
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.count} × {self.kind}"

    @property
    def chip(self) -> Chip | None:
        """The kind of chip; None for one that the table does not know."""
        chips = find(self.kind)
        return chips[0] if len(chips) == 1 else None

    def target(self) -> Target | None:
        """The devices as chips to plan for; None for those that the table does not know."""
        chip = self.chip
        if self.platform == "cpu" or chip is None:
            return None
        try:
            if generation := generation_of(chip.name):
                name = slice_name(generation, self.count // chip.devices_per_chip)
                return parse_target(topology=name)
            return parse_target(hardware=chip.name, devices=self.count)
        except UserError:
            return None


def attached(**variables: str) -> AttachedDevices:
    """Finds the devices in a child process: a TPU belongs to one process at a time.

    Args:
        **variables: of its environment, beside this process's own.

    Raises:
        UserError: JAX does not start.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=child_environment(**variables),
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
        if done.returncode:
            raise UserError(last_line(done.stderr) or f"exit code {done.returncode}")
        platform, kind, count, limit = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(
            f"JAX finds no devices: {first_line(error)}",
            hint="usually a driver or an extra of jax is missing: run mfu-jax doctor, or pass "
            "topology=… to search by plans alone",
        ) from None
    return AttachedDevices(platform=platform, kind=kind, count=count, memory_bytes=limit or 0)
