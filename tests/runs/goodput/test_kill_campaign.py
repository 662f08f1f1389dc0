"""A few kills of real processes; `python -m tests.campaigns.kills` kills 200."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.full
def test_the_report_agrees_with_the_killer(tmp_path: Path) -> None:
    """In a process of its own: it forks, which a process that uses JAX must not."""
    seed = random.Random().randrange(1000)
    command = ["-m", "tests.campaigns.kills", "--kind=loop", "--kills=3", f"--seed={seed}"]
    done = subprocess.run(
        [sys.executable, *command, f"--folder={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
