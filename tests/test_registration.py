"""What is registered does not depend on what was imported before, and no file is forgotten."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import mfu_jax
from mfu_jax.flops.analytic.architectures.families import FAMILIES
from mfu_jax.flops.analytic.huggingface import type_table
from mfu_jax.logger.sinks.base import OURS
from tests.support.paths import ROOT

ANALYTIC = ROOT / "mfu_jax" / "flops" / "analytic"


def functions(room: str) -> dict[str, ast.FunctionDef]:
    """The top-level functions in a room's files, by ``module.function``."""
    return {
        f"{path.stem}.{node.name}": node
        for path in (ANALYTIC / room).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def printed(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_architecture_is_in_the_table() -> None:
    builders = {
        name
        for name, node in functions("architectures").items()
        if not node.name.startswith("_")
        and ast.unparse(node.args) == "config: ModelConfig"
        and node.returns is not None
        and ast.unparse(node.returns) == "Layers"
    }
    assert builders - {"families.build"} == set(FAMILIES.values())


@pytest.mark.full
def test_only_the_counted_family_is_loaded() -> None:
    loaded = printed(
        "import mfu_jax, sys;"
        "mfu_jax.calculate_tflops_per_device('llama3-8b');"
        "print(*(m.split('.')[-1] for m in sys.modules if 'analytic.architectures.' in m))"
    )
    assert loaded == {"families", "blocks", "plain_decoders"}


@pytest.mark.full
def test_every_model_type_in_a_row_or_decorator_is_known() -> None:
    known = printed(
        "from mfu_jax.flops.analytic.huggingface import TRANSLATIONS; print(*TRANSLATIONS)"
    )
    decorators = (
        call for node in functions("huggingface").values() for call in node.decorator_list
    )
    named = {
        ast.literal_eval(argument)
        for call in decorators
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "model_type"
        for argument in call.args
    }
    in_rows = {name for row in type_table.ROWS for name in row["types"]}
    assert not named & in_rows
    assert known == named | in_rows


def test_every_rule_is_in_a_row() -> None:
    rules = {name.split(".")[1] for name in functions("huggingface") if "rules." in name}
    groups = [group for row in type_table.ROWS for group in row.get("with", ())]
    values = [v for row in type_table.ROWS for v in row.values() if isinstance(v, dict)]
    named = {group if isinstance(group, str) else next(iter(group)) for group in groups}
    assert rules <= named | {value["rule"] for value in values if "rule" in value}


@pytest.mark.full
@pytest.mark.parametrize(
    "room",
    ["mfu_jax.flops.analytic.huggingface", "mfu_jax.flops.executed.kernels"],
)
def test_a_room_of_registered_things_imports_each_of_its_files(room: str) -> None:
    imported = printed(f"import sys, {room}; print(*sys.modules)")
    folder = ROOT / room.replace(".", "/")
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    modules = {".".join((room, *file.parts)).removesuffix(".__init__") for file in files}
    assert len(modules) > 4
    assert modules <= imported


@pytest.mark.full
def test_every_sink_is_imported_when_it_is_asked_for_by_name() -> None:
    registered = {}
    for path in (ROOT / "mfu_jax" / "logger" / "sinks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_sink":
                    name = ast.literal_eval(call.args[0])
                    registered[name] = path.stem
    assert len(registered) > 4
    assert registered == OURS
    found = printed(
        "from mfu_jax.logger.sinks.base import OURS, find_sink;"
        "print(*(name for name in OURS if find_sink(name)))"
    )
    assert found == set(registered)


@pytest.mark.parametrize(
    "name", ["conventions.register_convention", "kernels.register_kernel", "sinks.register_sink"]
)
def test_what_pages_register_with_needs_no_import_of_its_module(name: str) -> None:
    module, function = name.split(".")
    assert callable(getattr(mfu_jax.__getattr__(module), function))  # as before any import of it
