"""A run that somebody measured, as a program to plan: MaxText's keys, mesh, remat and XLA flags.

A run is one JSON object: `model_name`, `per_device_batch_size`, `max_target_length`, `hardware`
with `topology`, `device_type` or `chips`, `num_slices`; the groups `mesh`, `remat_tensors`,
`splash`, `optimizer` and `other_flags` of MaxText's keys; `remat_policy`, `attention`, `dtype`,
`quantization`, `scan_layers`; and `xla_flags`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.planning.targets import Target, parse_target

_GROUPS = ("mesh", "remat_tensors", "splash", "optimizer", "other_flags")
_SINGLE = ("remat_policy", "attention", "dtype", "quantization", "scan_layers")
_REQUIRED = ("model_name", "per_device_batch_size", "max_target_length", "hardware")
# What a plan sets itself, and what only a machine with the run's data and cluster can follow.
FIXED = {
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "steps": "3",
    "log_config": "false",
}
_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run, ready to be compiled.

    Attributes:
        target: its chips.
        keys: MaxText's, as text.
        model: the mapping that `mfu_jax.flops_breakdown` counts.
        flags: of the compiler.
        notes: what cannot be followed.
    """

    target: Target
    keys: Mapping[str, str]
    model: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_run(run: Mapping[str, Any]) -> MeasuredRun:
    """Reads one run.

    Raises:
        UserError: a key is missing or wrong, or its chips are not known.
    """
    if not isinstance(run, Mapping):
        raise UserError(f"a run is {type(run).__name__}; expected a JSON object")
    missing = [key for key in _REQUIRED if run.get(key) is None]
    if missing:
        raise UserError(f"the run lacks {', '.join(missing)}; expected {', '.join(_REQUIRED)}")
    keys: dict[str, str] = {}
    for group in _GROUPS:
        values = run.get(group) or {}
        if not isinstance(values, Mapping):
            raise UserError(f"{group} of the run is {values!r}; expected a JSON object")
        keys |= {str(key): _text(value) for key, value in values.items()}
    keys |= {key: _text(run[key]) for key in (*_REQUIRED[:3], *_SINGLE) if run.get(key) is not None}
    return MeasuredRun(
        target=_target(run),
        keys=keys,
        model={key: run[key] for key in _REQUIRED[:3]},
        flags=tuple(map(str, run.get("xla_flags") or ())),
        notes=_not_followed(run),
    )


def _target(run: Mapping[str, Any]) -> Target:
    hardware, slices = str(run["hardware"]).lower(), int(run.get("num_slices") or 1)
    if hardware not in _TPUS:
        devices = run.get("jax_devices") or run.get("chips")
        return parse_target(hardware=hardware, devices=None if devices is None else int(devices))
    shape, name = run.get("topology"), run.get("device_type")
    if shape:
        return parse_target(topology=f"{hardware}:{shape}", slices=slices)
    if name:
        return parse_target(topology=str(name), slices=slices)
    if not run.get("chips"):
        raise UserError("the run has neither topology, device_type nor chips; expected one of them")
    chips = int(run["chips"]) // slices
    cores = 2 if hardware in ("v4", "v5p", "tpu7x") else 1
    return parse_target(topology=f"{hardware}-{chips * cores}", slices=slices)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_followed(run: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if run.get("env"):
        notes.append(f"environment variables are not set: {', '.join(map(str, run['env']))}")
    if run.get("framework_commit_or_image"):
        notes.append(
            f"the run used {run['framework_commit_or_image']}; the plan, what is installed"
        )
    return tuple(notes)
