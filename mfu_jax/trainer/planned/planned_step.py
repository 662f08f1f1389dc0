"""The trainer's step for `mfu-jax plan`: words, config, mesh; and its compile in a child process.

    python -m mfu_jax.trainer.planned.planned_step REQUEST.json OUT.mfu

compiles it for chips that are not attached. The request has `config.arguments` (as the trainer
takes them), `platform` and `topology` as JAX names them, `slices`, and for GPUs `target_config`, an
XLA text proto. The parent sets the variables that libtpu and the CUDA plugin read on loading.
Progress goes to stdout, one word per line, and notes. Only this child imports JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.planning.compilation.absent_devices import absent_devices, write_dump
from mfu_jax.planning.compilation.child_process import obey_parent
from mfu_jax.planning.compilation.gpu_autotuning import autotuned
from mfu_jax.planning.result.plan import StepWork
from mfu_jax.planning.step_sources import DEVICE_BATCH, pipeline_ticks, work_of
from mfu_jax.planning.targets import Target
from mfu_jax.trainer.config.mesh_axes import (
    axis_keys,
    check_batch,
    check_shape,
    mesh_shape,
    own_names,
)
from mfu_jax.trainer.config.pyconfig import Config, load
from mfu_jax.util.formatting import counted
from mfu_jax.util.values import typed


class TrainerStep:
    """The reference trainer's step.

    Args:
        target: the chips.
        files: the user's config files.
    """

    module = "mfu_jax.trainer.planned.planned_step"
    python = sys.executable

    def __init__(self, target: Target, files: Sequence[str] = ()) -> None:
        self.target = target
        self.files = tuple(files)

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The trainer's arguments; without a mesh, weights are split over all devices."""
        keys = own_names(values, "command line")
        if not any(key in keys for key in axis_keys()):
            keys |= {"data": "1", "fsdp": "-1"}
        with contextlib.suppress(UserError):  # `invalid` reports it
            keys |= self._sizes(keys)
        return [*self.files, *(f"{key}={value}" for key, value in keys.items())]

    def _sizes(self, keys: Mapping[str, Any]) -> dict[str, str]:
        """The given axes of -1, as numbers."""
        given = {key: typed(key, keys.get(key, 1), int) for key in axis_keys()}
        shape = mesh_shape(SimpleNamespace(**given), self.target.devices, self.target.slices)
        return {key: str(size) for key, size in shape.keys.items() if str(keys.get(key)) == "-1"}

    def run_words(self, values: Mapping[str, str]) -> list[str]:
        """The same words: the trainer runs exactly what was planned."""
        return self.words(values)

    def named(self, values: Mapping[str, str]) -> str:
        """The model and the batch; one without a name by its sizes and the file that has them."""
        config = load(self.words(values))
        given = dataclasses.asdict(config)
        given["per_device_batch_size"] = f"{config.per_device_batch_size:g}"
        sizes = f"({counted(config.num_decoder_layers, 'layer')}, emb_dim={config.emb_dim})"
        where = Path(self.files[-1]).name if self.files else "base.yml"
        name = f"{config.model_name or f'the model of {where}'} {sizes}"
        return DEVICE_BATCH.format_map({**given, "model_name": name})

    def work(self, values: Mapping[str, str]) -> StepWork:
        """What the step is for."""
        config = load(self.words(values))
        return self.placed(work_of(config, config.convention), values)

    def placed(self, work: StepWork, values: Mapping[str, str]) -> StepWork:
        """The work, with what the mesh decides.

        A device gathers the rows of its neighbours along the expert axis, too, and multiplies those
        of its own experts.
        """
        config = load(self.words(values))
        return dataclasses.replace(
            work,
            own_rows=1 / (config.expert * config.dcn_expert_parallelism),
            mesh=self._mesh(config),
            pipeline=pipeline_ticks(
                config,
                config.pipeline * config.dcn_pipeline_parallelism,
                config.num_layers_per_pipeline_stage,
                config.num_pipeline_microbatches,
            ),
        )

    def _mesh(self, config: Config) -> Mapping[str, int]:
        with contextlib.suppress(UserError):  # `invalid` reports it
            return mesh_shape(config, self.target.devices, self.target.slices).sizes
        return {}

    def identity(self, values: Mapping[str, str]) -> Mapping[str, Any]:
        """Every key of the config."""
        config = dataclasses.asdict(load(self.words(values)))
        return {"config": {key: str(value) for key, value in config.items()}}

    def invalid(self, values: Mapping[str, str]) -> UserError | None:
        """The trainer's own error about the config, or its mesh on these chips."""
        try:
            config = load(self.words(values))
            shape = mesh_shape(config, self.target.devices, self.target.slices)
            check_shape(config, shape)
            check_batch(config, shape, self.target.devices)
        except UserError as error:
            return error
        return None


def main(argv: list[str]) -> None:
    """The child process: compiles what the request describes, and writes the dump."""
    obey_parent()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    print("tracing", flush=True)
    lowered = lower(request["config"]["arguments"], absent_devices(request))
    print("compiling", flush=True)
    compiled = lowered.compile(compiler_options=autotuned(request, lowered.as_text()))
    write_dump(compiled, argv[1])


def lower(arguments: Sequence[str], devices: list[Any]) -> Any:
    """The trainer's step for a config, lowered for the devices."""
    from mfu_jax.trainer.step.mesh import make_mesh, with_mesh_sizes
    from mfu_jax.trainer.step.state import abstract_state, resolve_attention
    from mfu_jax.trainer.step.train_step import lower_train_step

    config = with_mesh_sizes(load(arguments), devices)
    mesh = make_mesh(config, devices)
    asked, config = config.remat_policy, resolve_attention(config, mesh)
    if asked != config.remat_policy:
        print(f"note: remat_policy={asked} is {config.remat_policy} here", flush=True)
    return lower_train_step(config, mesh, abstract_state(config, mesh))


if __name__ == "__main__":
    main(sys.argv[1:])
