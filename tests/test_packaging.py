"""The wheel works outside of the checkout, and the light modules stay light."""

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.paths import DOCS, ROOT


def metadata() -> dict[str, Any]:
    """What setup.py passes to setup()."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return dict(setup.call_args.kwargs)


def test_the_core_requires_little_and_bounds_it_only_from_below() -> None:
    core = dict(requirement.split(">=") for requirement in metadata()["install_requires"])
    assert set(core) == {"absl-py", "crc32c", "jax", "numpy", "PyYAML", "tensorboardX"}
    # What current trainers pin: axlearn, levanter.
    for name, version in {"absl-py": "2.3.1", "jax": "0.8.3"}.items():
        assert numbers(core[name]) <= numbers(version)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_every_extra_is_on_the_page() -> None:
    rows = (DOCS / "install.md").read_text(encoding="utf-8").split("## Extras")[1]
    names = [cell for row in rows.splitlines() if row[:3] == "| `" for cell in [row.split("|")[1]]]
    listed = {name for cell in names for name in re.findall(r"`([\w-]+)`", cell)}
    assert listed == metadata()["extras_require"].keys()


def test_the_matrix_runs_the_pythons_of_the_classifiers() -> None:
    script = (ROOT / "scripts" / "test_matrix.sh").read_text(encoding="utf-8")
    listed = re.search(r"^PYTHONS=\((.*)\)$", script, re.MULTILINE)
    named = [c.rpartition(" :: ")[2] for c in metadata()["classifiers"]]
    assert listed
    assert listed[1].split() == [version for version in named if re.fullmatch(r"3\.\d+", version)]
    assert metadata()["python_requires"] == f">={listed[1].split()[0]}"


@pytest.mark.full
def test_a_wheel_works_outside_of_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    # build/ of an earlier build would end up in the wheel, so it is made from a copy.
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if name.split("/")[0] in {"setup.py", "pyproject.toml", "README.md", "LICENSE"} | {
            "mfu_jax",
            "layers",
            "configs",
        }:
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    installed = tmp_path / "installed"
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(installed), str(tmp_path / "source")],
        check=True,
    )
    assert not (installed / "layers").exists()
    assert not (installed / "configs").exists()
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mfu_jax.train", "configs/base.yml", "steps=2", "emb_dim=32"),
            *("num_decoder_layers=1", "max_target_length=32", "peak_tflops_per_device=5"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "XLA_FLAGS": ""},
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "completed step: 1" in run.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import mfu_jax.layers as m; print(m.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        text=True,
        capture_output=True,
        check=True,
    )
    assert where.stdout.startswith(str(installed))


@pytest.mark.full
@pytest.mark.parametrize(
    "module",
    [
        "mfu_jax",
        "mfu_jax.commands.report",
        "mfu_jax.flops.analytic.totals",
        "mfu_jax.hardware",
        "mfu_jax.trainer.config.pyconfig",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; print(*{{'jax', 'flax', 'numpy', 'pydantic'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_examples_of_the_readme_are_true() -> None:
    assert doctest.testfile(str(ROOT / "README.md"), module_relative=False).failed == 0
