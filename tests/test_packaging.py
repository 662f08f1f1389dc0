"""The wheel works outside of the checkout, and the light modules stay light."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "module",
    [
        "mfu_jax",
        "mfu_jax.commands.report",
        "mfu_jax.flops.analytic.totals",
        "mfu_jax.hardware",
        "mfu_jax.trainer.pyconfig",
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
