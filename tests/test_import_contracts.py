"""The import contracts of pyproject.toml catch what they are there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# A line planted at the end of a file -> the contract that must break.
PLANTED = {
    ("mfu_jax/hardware/chips.py", "import mfu_jax.train"): "The house",
    ("mfu_jax/logger/records/summary.py", "import mfu_jax.cli"): "The house",
    (
        "mfu_jax/flops/executed/control_flow/loops.py",
        "import mfu_jax.flops.traced.control_flow.decisions",
    ): "Three counts",
    ("mfu_jax/flops/analytic/mixers.py", "import mfu_jax.flops.analytic.totals"): "analytic:",
    (
        "mfu_jax/flops/analytic/huggingface/latent.py",
        "import mfu_jax.flops.analytic.architectures.plain_decoders",
    ): "config.json and layers",
    (
        "mfu_jax/flops/executed/hlo/module.py",
        "import mfu_jax.flops.executed.costs.reader",
    ): "executed:",
    ("mfu_jax/logger/timing/timer.py", "import mfu_jax.logger.loop.spans"): "logger:",
    (
        "mfu_jax/profiling/trace/wire.py",
        "import mfu_jax.profiling.breakdown.waterfall",
    ): "profiling:",
    (
        "mfu_jax/profiling/breakdown/tables.py",
        "import mfu_jax.logger.records.summary",
    ): "Profiles are read",
    ("mfu_jax/planning/targets.py", "import mfu_jax.planning.result.plan"): "planning:",
    ("mfu_jax/planning/result/plan.py", "import mfu_jax.trainer.step.train_step"): "Plans are made",
    ("mfu_jax/flops/analytic/formulas.py", "import jax"): "A laptop's answer",
    ("mfu_jax/util/jax_internals.py", "import mfu_jax.util.values"): "util:",
    (
        "mfu_jax/instrumentation/device_trace.py",
        "import mfu_jax.profiling.scalars",
    ): "The core knows nothing",
    ("layers/projections/linears.py", "import mfu_jax.errors"): "The reference model",
}


def broken_contracts(folder: Path) -> tuple[list[str], str]:
    """The names of the contracts that break, and the whole report with single spaces."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as lint; lint()",
    ]
    done = subprocess.run([*command, "--no-cache"], cwd=folder, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    broken = [line.partition(" BROKEN")[0] for line in lines if " BROKEN" in line]
    assert bool(broken) == (done.returncode != 0), done.stdout + done.stderr
    assert any("Contracts: " in line for line in lines), done.stdout + done.stderr
    return broken, " ".join(done.stdout.split())


@pytest.mark.full
def test_each_planted_violation_breaks_its_contract(tmp_path: Path) -> None:
    for name in ("mfu_jax", "layers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert broken_contracts(tmp_path)[0] == []
    for file, line in PLANTED:
        with (tmp_path / file).open("a") as stream:
            stream.write(f"{line}\n")
    broken, report = broken_contracts(tmp_path)
    for (file, line), contract in PLANTED.items():
        assert any(name.startswith(contract) for name in broken), contract
        importer = file.removesuffix(".py").replace("/", ".")
        assert f"{importer} -> {line.removeprefix('import ')} (l." in report, file
