"""What is registered does not depend on what was imported before, and no file is forgotten."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

ANALYTIC = ROOT / "mfu_jax" / "flops" / "analytic"
REGISTRIES = {"architectures": "architecture", "huggingface": "model_type"}


def names_in_source(room: str) -> set[str]:
    """What the decorators in a room's files name, read as text."""
    found = set()
    for path in (ANALYTIC / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == REGISTRIES[room]:
                        found |= {ast.literal_eval(argument) for argument in call.args}
    return found


def printed(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("first", ["", "import mfu_jax.flops.analytic.huggingface;"])
def test_every_decorated_architecture_is_known_whatever_was_imported_first(first: str) -> None:
    known = printed(
        f"{first}from mfu_jax.flops.analytic.architectures import known_blocks;"
        "print(*known_blocks())"
    )
    assert known == names_in_source("architectures")


def test_every_decorated_model_type_is_known() -> None:
    known = printed(
        "from mfu_jax.flops.analytic.huggingface import TRANSLATIONS; print(*TRANSLATIONS)"
    )
    assert known == names_in_source("huggingface")


@pytest.mark.parametrize(
    "room",
    [
        "mfu_jax.flops.analytic.architectures",
        "mfu_jax.flops.analytic.huggingface",
        "mfu_jax.flops.executed.kernels",
        "mfu_jax.logger.sinks",
    ],
)
def test_a_room_of_registered_things_imports_each_of_its_files(room: str) -> None:
    imported = printed(f"import sys, {room}; print(*sys.modules)")
    folder = ROOT / room.replace(".", "/")
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    modules = {".".join((room, *file.parts)).removesuffix(".__init__") for file in files}
    assert len(modules) > 4
    assert modules <= imported
