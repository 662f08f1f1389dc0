"""Compiles MaxText's own train step for chips that are not here, in a process of its own.

    python -m mfu_jax.planning.maxtext_step REQUEST.json OUT.mfu

The request has `config.arguments`: ``key=value`` as MaxText takes them. MaxText's own
`train_compile` makes the mesh, the state and the step; only what it does with the compiled step is
replaced. Progress goes to stdout, a word a line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mfu_jax.planning.absent_devices import tpu_options
from mfu_jax.planning.child_process import obey_parent


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
    train_compile.main([sys.argv[0], str(base), *request["config"]["arguments"]])


def _plan_for(train_compile: Any, request: dict[str, Any], out: str) -> None:
    """Replaces MaxText's table of topologies by the request's, and its saving by a dump."""
    compile_step, describe = train_compile.jit_and_compile, train_compile.get_topology_desc

    def described(**_: Any) -> Any:
        return describe(request["topology"], "tpu", **tpu_options(request))

    def compiled(*args: Any, **kwargs: Any) -> None:
        print("compiling", flush=True)
        step = compile_step(*args, **kwargs)
        print("writing", flush=True)
        from mfu_jax.dumps.recording import dump

        dump(step, out)
        os._exit(0)  # MaxText would go on to print and serialise what it compiled

    train_compile.get_topology_desc = described
    train_compile.jit_and_compile = compiled


if __name__ == "__main__":
    main(sys.argv[1:])
