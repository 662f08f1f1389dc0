"""Compiles the trainer's step for chips that are not attached, in a separate process.

    python -m mfu_jax.trainer.planned.ahead_of_time REQUEST.json OUT.mfu

The request has `config.arguments` (as the trainer takes them), `platform` and `topology` as JAX
names them, `slices`, and for GPUs `target_config`, an XLA text proto. The parent sets the variables
that libtpu and the CUDA plugin read on loading. Progress goes to stdout, one word per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfu_jax.planning.compilation.absent_devices import absent_devices
from mfu_jax.planning.compilation.child_process import obey_parent
from mfu_jax.planning.compilation.gpu_autotuning import autotuned


def main(argv: list[str]) -> None:
    """Compiles what the request describes, and writes the dump."""
    obey_parent()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    print("tracing", flush=True)
    lowered = lower(request["config"]["arguments"], absent_devices(request))
    print("compiling", flush=True)
    compiled = lowered.compile(compiler_options=autotuned(request, lowered.as_text()))
    print("writing", flush=True)
    from mfu_jax.dumps.recording import dump

    dump(compiled, argv[1])


def lower(arguments: Sequence[str], devices: list[Any]) -> Any:
    """The trainer's step for a config, lowered for the devices."""
    from mfu_jax.trainer.config import pyconfig
    from mfu_jax.trainer.step.mesh import make_mesh, with_mesh_sizes
    from mfu_jax.trainer.step.state import abstract_state, resolve_attention
    from mfu_jax.trainer.step.train_step import lower_train_step

    config = with_mesh_sizes(pyconfig.load(arguments), devices)
    mesh = make_mesh(config, devices)
    config = resolve_attention(config, mesh)
    return lower_train_step(config, mesh, abstract_state(config, mesh))


if __name__ == "__main__":
    main(sys.argv[1:])
