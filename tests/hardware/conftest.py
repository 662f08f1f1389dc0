"""The management library of a driver, which a process loads only once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nvml import build


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled; nvidia-ml-py keeps the first one that it finds."""
    return build(tmp_path_factory.mktemp("nvml"))
