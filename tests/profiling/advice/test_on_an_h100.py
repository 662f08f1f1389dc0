"""Faults planted on an H100, and what removing them brought.

Of the loops in h100_loops.tar.xz (jax 0.10.2, `instrument`), whole traces: a scan of four layers of
4,096, on 8,192 rows in bfloat16, with all that its host did; each with its program. The array of
134 MB is handed over in each call; `float(loss)` is followed by 4 ms of sleep.

h100_barriers.mfu and h100_no_barriers.mfu are that step with twelve elementwise ops in each layer,
with and without barriers between them, compiled for an absent H100; their times are the roofs'.

The others were planted in the reference trainer's step.
Recorded by tests/campaigns/planted/on_gpu.py (unrolled, two layers; jax 0.11.2): the GPU's
plane of each faulty step's trace, with its program. The times are medians of seven turns, untraced.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from mfu_jax.profiling.profile import read_profile
from tests.support.archives import unpack
from tests.support.written_profiles import scheduled_profile

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
    unpack("h100_faults.tar.xz", folder)
    for step in folder.glob("*/step"):
        programs = step.parent / "programs"
        programs.mkdir()
        (programs / "train_step.mfu").write_bytes(lzma.compress(step.read_bytes(), preset=0))
    return folder


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    unpack("h100_loops.tar.xz", folder)
    return folder


@pytest.mark.parametrize(
    ("loop", "cause", "within"),
    [("host_transfer", "host-to-device transfer", 0.02), ("sync_host", "sync in the loop", 0.1)],
)
def test_what_a_loop_waits_for_is_named_first_with_its_gain(
    loops: Path, loop: str, cause: str, within: float
) -> None:
    profile, healthy = read_profile(loops / loop), read_profile(loops / "healthy")
    assert profile.coverage == pytest.approx(1.0)
    assert not healthy.advice
    assert profile.advice[0].cause == cause
    brought = profile.measured.step_seconds - healthy.measured.step_seconds
    assert profile.advice[0].gain_seconds == pytest.approx(brought, rel=within)


def test_an_array_from_the_host_is_the_only_advice(loops: Path) -> None:
    profile = read_profile(loops / "host_transfer")
    (advice,) = profile.advice
    assert "f32[8192,4096]" in advice.evidence
    assert advice.remedy.startswith("jax.device_put")
    copies = next(b for b in profile.waterfall if b.name == "exposed copies to and from the host")
    assert copies.seconds == pytest.approx(2.486e-3, abs=1e-6)


def test_barriers_between_ops_whose_results_are_saved_and_loaded(tmp_path: Path) -> None:
    profile, healthy = (
        scheduled_profile(DATA / f"h100_{name}.mfu", tmp_path / name)
        for name in ("barriers", "no_barriers")
    )
    assert not healthy.advice
    (advice,) = profile.advice
    assert advice.cause == "unfused elementwise chain"
    brought = profile.measured.step_seconds - healthy.measured.step_seconds
    assert advice.gain_seconds == pytest.approx(brought, rel=0.02)


@pytest.mark.parametrize("fault", BROUGHT)
def test_a_fault_is_named_first_with_its_gain(faults: Path, fault: str) -> None:
    cause, milliseconds = BROUGHT[fault]
    profile = read_profile(faults / fault)
    assert profile.coverage == pytest.approx(1.0)
    assert profile.advice[0].cause == cause
    assert profile.advice[0].gain_seconds == pytest.approx(milliseconds / 1e3, rel=0.2)


def test_a_healthy_step_gets_no_advice(faults: Path) -> None:
    assert not read_profile(faults / "none").advice
