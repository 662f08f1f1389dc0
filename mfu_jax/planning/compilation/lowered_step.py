"""Compiles a step lowered by another process, for chips that are not attached.

    python -m mfu_jax.planning.compilation.lowered_step REQUEST.json OUT.mfu

The request has `config.text`, from ``lowered.as_text(debug_info=True)``, and `config.mesh`, axis →
size. The parent sets the environment that libtpu and the CUDA plugin read when loaded. Progress
goes to stdout, one word per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mfu_jax.planning.compilation.absent_devices import absent_devices, write_dump
from mfu_jax.planning.compilation.child_process import obey_parent
from mfu_jax.planning.compilation.gpu_autotuning import autotuned


def main(argv: list[str]) -> None:
    """Compiles what the request describes, and writes the dump."""
    obey_parent()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    mesh = _mesh(request["config"]["mesh"], absent_devices(request), request)
    print("compiling", flush=True)
    from mfu_jax.util.jax_internals import compile_lowered

    text = request["config"]["text"]
    compiled: Any = compile_lowered(text, mesh, autotuned(request, text))
    write_dump(compiled, argv[1])


def _mesh(axes: Mapping[str, int], devices: list[Any], request: Mapping[str, Any]) -> Any:
    """A mesh whose device order suits one slice's torus; otherwise the devices' own order."""
    import numpy as np
    from jax.sharding import Mesh

    from mfu_jax.util.jax_internals import split_torus

    shape = tuple(axes.values())
    if request["platform"] == "tpu" and request["slices"] == 1:
        return Mesh(split_torus(shape, devices), tuple(axes))
    return Mesh(np.array(devices, dtype=object).reshape(shape), tuple(axes))


if __name__ == "__main__":
    main(sys.argv[1:])
