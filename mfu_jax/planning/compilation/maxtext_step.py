"""Compiles MaxText's own train step for chips that are not attached, in a child process.

    python -m mfu_jax.planning.compilation.maxtext_step REQUEST.json OUT.mfu

The request has `config.arguments`: MaxText's ``key=value`` arguments. MaxText's own
`train_compile` makes the mesh, the state and the step; only its table of topologies, the Linen
model that it forgets to quantize with Qwix, and its use of the compiled step are replaced. Progress
goes to stdout, one word per line.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mfu_jax.planning.compilation.absent_devices import absent_devices, write_dump
from mfu_jax.planning.compilation.child_process import obey_parent

_HARDWARE = {"tpu": "tpu", "cuda": "gpu"}


def main(argv: list[str]) -> None:
    """Compiles what the request describes, and writes the dump."""
    obey_parent()
    request = with_hosts_as_slices(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    print("tracing", flush=True)
    import maxtext
    from maxtext.trainers.pre_train import train_compile

    _plan_for(train_compile, request, argv[1])
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    os.environ["LIBTPU_INIT_ARGS"] = flags
    train_compile.main([sys.argv[0], str(base), *request["config"]["arguments"], *chips(request)])


def with_hosts_as_slices(request: dict[str, Any]) -> dict[str, Any]:
    """The request; with dcn axes, the hosts of GPUs are slices to MaxText."""
    axes = (argument.partition("=") for argument in request["config"]["arguments"])
    has_dcn = any(axis.startswith("dcn_") and size != "1" for axis, _, size in axes)
    if request["platform"] != "cuda" or not has_dcn:
        return request
    return {**request, "slices": int(request["topology"].split("x")[1])}


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
        write_dump(step, out)
        os._exit(0)  # MaxText would go on to print and serialise what it compiled

    if request["platform"] == "cuda" and request["slices"] > 1:
        from maxtext.utils.maxtext_utils import mesh_utils

        # JAX's devices of absent GPUs are all of one slice.
        by_slice = mesh_utils.create_hybrid_device_mesh
        mesh_utils.create_hybrid_device_mesh = partial(by_slice, process_is_granule=True)
    if linen := getattr(train_compile, "Transformer", None):  # NNX's comes quantized

        def quantized(config: Any, *args: Any, **kwargs: Any) -> Any:
            """As MaxText trains it: its train_compile forgets Qwix."""
            return train_compile.quantizations.maybe_quantize_model(
                linen(config, *args, **kwargs), config
            )

        train_compile.Transformer = quantized
    table = train_compile.accelerator_to_spec_map
    table.get_system_characteristics = lambda _: system
    train_compile.get_topology_desc = described
    train_compile.jit_and_compile = compiled


if __name__ == "__main__":
    main(sys.argv[1:])
