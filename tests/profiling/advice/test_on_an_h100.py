"""Faults planted in the reference trainer's step on an H100, and what removing them brought.

Recorded by tests/campaigns/planted/on_gpu.py (unrolled, two layers; jax 0.11.2): the GPU's
plane of each faulty step's trace, with its program. The times are medians of seven turns, untraced.
"""

from __future__ import annotations

import lzma
import tarfile
from pathlib import Path

import pytest

from mfu_jax.profiling.profile import read_profile

DATA = Path(__file__).parents[2] / "data"
BROUGHT = {  # fault → cause, milliseconds that a step is shorter without it
    "vocabulary": ("padding of odd shapes", 4.74),  # 50,257, against 50,304
    "float32": ("float32 matmuls", 89.21),  # at the highest precision
    "promoted": ("float32 matmuls", 9.91),  # TF32
    "attention": ("attention without a kernel", 6.46),  # dense, against cuDNN's
    "remat": ("remat heavier than memory needs", 3.84),
    "batch": ("small batch", 2.56),  # per batch, against eight times the batch
    "chain": ("unfused elementwise chain", 1.88),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    with tarfile.open(DATA / "h100_faults.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    for step in folder.glob("*/step"):
        programs = step.parent / "programs"
        programs.mkdir()
        (programs / "train_step.mfu").write_bytes(lzma.compress(step.read_bytes(), preset=0))
    return folder


@pytest.mark.parametrize("fault", BROUGHT)
def test_a_fault_is_named_first_with_its_gain(faults: Path, fault: str) -> None:
    cause, milliseconds = BROUGHT[fault]
    profile = read_profile(faults / fault)
    assert profile.coverage == pytest.approx(1.0)
    assert profile.advice[0].cause == cause
    assert profile.advice[0].gain_seconds == pytest.approx(milliseconds / 1e3, rel=0.2)


def test_a_healthy_step_gets_no_advice(faults: Path) -> None:
    assert not read_profile(faults / "none").advice
