"""Compiles MaxText's own train step for chips that are not attached, in a child process.

    python -m mfu_jax.planning.compilation.maxtext_step REQUEST.json OUT.mfu

The request has `config.arguments`: MaxText's ``key=value`` arguments. MaxText's own
`train_compile` makes the mesh, the state and the step; only its table of topologies and its use of
the compiled step are replaced. Progress goes to stdout, one word per line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mfu_jax.planning.compilation.absent_devices import absent_devices
from mfu_jax.planning.compilation.child_process import obey_parent

_HARDWARE = {"tpu": "tpu", "cuda": "gpu"}


def main(argv: list[str]) -> None:
    """Compiles what the request describes, and writes the dump."""
    obey_parent()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    print("tracing", flush=True)
    import maxtext
    from maxtext.trainers.pre_train import train_compile

    _plan_for(train_compile, request, argv[1])
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    os.environ["LIBTPU_INIT_ARGS"] = flags
    train_compile.main([sys.argv[0], str(base), *request["config"]["arguments"], *chips(request)])


def chips(request: dict[str, Any]) -> list[str]:
    """MaxText's arguments for a request's chips."""
    return [
        f"compile_topology={request['topology']}",
        f"compile_topology_num_slices={request['slices']}",
        f"hardware={_HARDWARE[request['platform']]}",
    ]


def _plan_for(train_compile: Any, request: dict[str, Any], out: str) -> None:
    """Replaces MaxText's table of topologies with the request's, and its saving with a dump."""
    compile_step = train_compile.jit_and_compile
    # MaxText takes GPUs from `jax.devices()`, but a topology named as a TPU's from the function.
    system = SimpleNamespace(
        platform="tpu",
        topology_name=request["topology"],
        chip_config_name=None,
        chips_per_host_bounds=None,
        devices_per_slice=request["devices"] // request["slices"],
        wrap=None,
    )

    def described(**_: Any) -> Any:
        return SimpleNamespace(devices=absent_devices(request))

    def compiled(*args: Any, **kwargs: Any) -> None:
        print("compiling", flush=True)
        step = compile_step(*args, **kwargs)
        print("writing", flush=True)
        from mfu_jax.dumps.recording import dump

        dump(step, out)
        os._exit(0)  # MaxText would go on to print and serialise what it compiled

    table = train_compile.accelerator_to_spec_map
    table.get_system_characteristics = lambda _: system
    train_compile.get_topology_desc = described
    train_compile.jit_and_compile = compiled


if __name__ == "__main__":
    main(sys.argv[1:])
