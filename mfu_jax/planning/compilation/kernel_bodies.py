"""Kernels that a newer JAX compiled, in the form of the JAX that counts them.

    python -m mfu_jax.planning.compilation.kernel_bodies VERSION PROGRAM.txt OUT.txt

Mosaic, TPU kernels' MLIR, has a numbered stable form. An older jaxlib cannot read a newer one, but
a newer jaxlib can write an older one: MaxText's Python rewrites what it compiled.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.util.child_process import child_environment

_BODY = re.compile(r'("body":\s*")([A-Za-z0-9+/=]+)(")')
_VERSION = "stable_mosaic.version"
_SECONDS = 120.0


def in_own_form(program: ProgramDump, python: str) -> ProgramDump:
    """The program with TPU kernels that this process's jaxlib can read, where that is possible.

    What cannot be rewritten is left as it is; whoever counts it says that it cannot be read.

    Args:
        program: what `python` compiled.
        python: an interpreter with the jaxlib that compiled it.
    """
    if python == sys.executable or not _BODY.search(program.text):
        return program
    with tempfile.TemporaryDirectory(prefix="mfu-jax-plan-") as folder:
        text, out = Path(folder, "program.txt"), Path(folder, "rewritten.txt")
        text.write_text(program.text, encoding="utf-8")
        try:
            words = [python, "-m", __name__, str(written_version()), str(text), str(out)]
            environment = child_environment(JAX_PLATFORMS="cpu")
            subprocess.run(
                words, env=environment, check=True, capture_output=True, timeout=_SECONDS
            )
            return dataclasses.replace(program, text=out.read_text(encoding="utf-8"))
        except Exception:  # bindings of another jaxlib may lack anything
            return program


def written_version() -> int:
    """The version of the form that this process's jaxlib writes, and the newest that it reads.

    Raises:
        ImportError: jaxlib is missing.
    """
    with _mosaic() as (ir, run):
        module = ir.Module.parse("module {}")
        run("serialize=true", module)
        return int(ir.IntegerAttr(module.operation.attributes[_VERSION]).value)


def rewritten(text: str, version: int) -> str:
    """HLO text whose kernels of a newer version are written as `version`."""

    @functools.cache
    def body(encoded: str) -> str:
        raw = base64.b64decode(encoded)
        with _mosaic() as (ir, run):
            try:
                module = ir.Module.parse(raw)
                attributes = module.operation.attributes
                if _VERSION not in attributes:
                    return encoded
                if ir.IntegerAttr(attributes[_VERSION]).value <= version:
                    return encoded
                run("serialize=false", module)
                run(f"serialize=true target-version={version}", module)
            except (ValueError, RuntimeError, ir.MLIRError):  # it has no such form
                return encoded
            out = io.BytesIO()
            module.operation.write_bytecode(out)
            return base64.b64encode(out.getvalue()).decode()

    return _BODY.sub(lambda match: f"{match[1]}{body(match[2])}{match[3]}", text)


@contextlib.contextmanager
def _mosaic() -> Iterator[tuple[Any, Callable[[str, Any], None]]]:
    """MLIR's bindings, and a function that runs Mosaic's serialization pass on a module."""
    from mfu_jax.util.jax_internals import mlir_bindings

    register, ir, pass_manager = mlir_bindings("tpu")

    def run(options: str, module: Any) -> None:
        pass_manager.parse(f"builtin.module(mosaic-serde{{{options}}})").run(module.operation)

    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        # A message that is not UTF-8 makes the bindings abort.
        context.emit_error_diagnostics = True
        context.attach_diagnostic_handler(lambda diagnostic: True)
        register(context, False)
        yield ir, run


def main(argv: list[str]) -> None:
    """Rewrites the kernels of a file."""
    version, text, out = argv
    written = rewritten(Path(text).read_text(encoding="utf-8"), int(version))
    Path(out).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
