"""The trainer's step as `mfu-jax plan` needs it: words, config and mesh. Nothing imports JAX."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import calculate_tokens_per_device, model_flops_per_device
from mfu_jax.planning.plan import Work
from mfu_jax.planning.step_sources import executed_flops_of
from mfu_jax.planning.sweep.search import Analytic
from mfu_jax.planning.targets import Target
from mfu_jax.trainer.pyconfig import Config, load

# MaxText's names of the mesh's axes.
_AXES = {
    "ici_data_parallelism": "data",
    "ici_fsdp_parallelism": "fsdp",
    "ici_expert_parallelism": "expert",
    "ici_tensor_parallelism": "tensor",
}
_MESH = tuple(_AXES.values())
_SOURCES = ("mfu_jax.layers", "mfu_jax.trainer")
_STATE = 3  # AdamW: weights and two moments


class TrainerStep:
    """The reference trainer's step.

    Args:
        target: the chips.
        files: the user's config files.
    """

    module = "mfu_jax.trainer.ahead_of_time"
    python = sys.executable

    def __init__(self, target: Target, files: Sequence[str] = ()) -> None:
        self.target = target
        self.files = tuple(files)

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The trainer's arguments; without a mesh, weights are split over all devices."""
        keys = {_AXES.get(key, key): value for key, value in values.items()}
        if not any(key in keys for key in _MESH):
            keys |= {"data": "1", "fsdp": "-1"}
        if keys.get("fsdp") == "-1":
            inner = math.prod(_number(keys.get(axis)) for axis in _MESH if axis != "fsdp")
            keys |= {"fsdp": str(max(1, self.target.devices // inner))}
        return [*self.files, *(f"{key}={value}" for key, value in keys.items())]

    def run_words(self, values: Mapping[str, str]) -> list[str]:
        """The same words: the trainer runs what was planned."""
        return self.words(values)

    def work(self, values: Mapping[str, str]) -> Work:
        """What the step is for."""
        config = load(self.words(values))
        return Work(
            model_flops=round(model_flops_per_device(config, config.convention).training),
            tokens=float(calculate_tokens_per_device(config)),
            convention=config.convention,
        )

    def identity(self, values: Mapping[str, str]) -> Mapping[str, Any]:
        """Every key of the config, and the source of the model and the step."""
        config = dataclasses.asdict(load(self.words(values)))
        return {"config": {key: str(value) for key, value in config.items()}, "source": _digest()}

    def invalid(self, values: Mapping[str, str]) -> str:
        """What is wrong with the config, or with its mesh on these chips."""
        try:
            config = load(self.words(values))
        except UserError as error:
            return str(error)
        return _wrong_mesh(config, self.target.devices)

    def analytic(self, values: Mapping[str, str]) -> Analytic:
        """FLOPs, and the least bytes of weights and optimizer state on a device."""
        config = load(self.words(values))
        width = {"float32": 4, "bfloat16": 2, "float16": 2}[config.weight_dtype]
        shards = config.fsdp * config.expert * config.tensor
        state = _STATE * width * count_parameters(config).total // shards
        return Analytic(
            executed_flops=executed_flops_of(config, config.remat_policy), state_bytes=state
        )


def _wrong_mesh(config: Config, devices: int) -> str:
    """As the trainer would say it, before a minute of tracing."""
    inner = config.fsdp * config.expert * config.tensor
    data = config.data if config.data != -1 else max(1, devices // inner)
    if data * inner != devices:
        return (
            f"the mesh data={config.data} fsdp={config.fsdp} expert={config.expert} "
            f"tensor={config.tensor} does not fill the {devices} devices; their product has to be "
            f"{devices} (data=-1 takes the rest)"
        )
    batch = Fraction(config.per_device_batch_size).limit_denominator(1 << 20) * devices
    rows = data * config.fsdp * config.expert
    if batch % rows:
        return (
            f"the batch of {float(batch):g} sequences (per_device_batch_size="
            f"{config.per_device_batch_size:g} × {devices} devices) is not divisible by the mesh's "
            f"data × fsdp × expert = {rows}"
        )
    return ""


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and int(text) else 1


def _digest() -> str:
    found = hashlib.sha256()
    for path in _files():
        found.update(path.read_bytes())
    return found.hexdigest()


def _files() -> Iterator[Path]:
    for name in _SOURCES:
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            yield from sorted(Path(folder).rglob("*.py"))
