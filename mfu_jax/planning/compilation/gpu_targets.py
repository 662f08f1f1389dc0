"""XLA's description of a target GPU, as a text proto (gpu_targets.yml has the facts)."""

from __future__ import annotations

from pathlib import Path

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import Chip
from mfu_jax.util.yaml_files import read_mapping

_TABLE = Path(__file__).with_name("gpu_targets.yml")


def target_config(chip: Chip) -> str:
    """GpuTargetConfigProto of a chip, as text.

    Raises:
        UserError: the table does not have the chip.
    """
    table = read_mapping(_TABLE)
    if chip.name not in table["gpus"]:
        raise UserError(
            f"{chip.name}: XLA's description of it is not known here; expected one of "
            f"{', '.join(table['gpus'])}; pick the nearest"
        )
    row = {**table["common"], **table["gpus"][chip.name]}
    description = row.pop("description")
    major, minor = row.pop("compute_capability").rstrip("a").split(".")
    fields = [f"  {key}: {value}" for key, value in row.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *fields,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 1 }",
            f'device_description_str: "{description}"',
        ]
    )
