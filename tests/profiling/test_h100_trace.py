"""A trace of an H100 with command buffers: four steps of GPT-2 124M, scanned, cuDNN attention.

Recorded from the reference trainer (jax 0.11.2, CUDA 13) with its program; only the GPU's plane is
kept. Every kernel's ``hlo_op`` is the command buffer. What runs is read here with JAX's own reader.
"""

from __future__ import annotations

import lzma
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from mfu_jax.dumps import load
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.profiling.join.unnamed_kernels import KernelSchedule
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.page import page

DATA = Path(__file__).parents[1] / "data"
STEPS = 5  # that were traced; the last one only ends the one before
LAYERS = 12
# Of JAX 0.12's reader on Python 3.13; as an error it would abort the process.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__")
BACKWARD = ("dot_do_o", "bprop", "convert_dq")  # cuDNN's kernels of one backward pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("h100")
    trace = path / "plugins" / "profile" / "2026_11_26_22_09_27" / "gpu.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(lzma.decompress((DATA / "h100_gpt2.xplane.pb.xz").read_bytes()))
    (path / "programs").mkdir()
    shutil.copy(DATA / "h100_gpt2.mfu", path / "programs" / "train_step.mfu")
    return path


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return read_profile(folder)


def events(folder: Path) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Name, start, seconds and stats of all that ran, in order of start."""
    found = []
    for plane in ProfileData.from_file(str(next(folder.rglob("*.xplane.pb")))).planes:
        for line in plane.lines:
            for event in line.events:  # is gone with its line
                stats = dict(event.stats)
                found.append((event.name, event.start_ns, event.duration_ns / 1e9, stats))
    yield from sorted(found, key=lambda event: event[1])


def test_no_event_names_its_instruction(folder: Path) -> None:
    named = [stats["hlo_op"] for *_, stats in events(folder) if "hlo_op" in stats]
    assert len(named) > 7000
    assert all(name.startswith("command_buffer_") for name in named)


def test_the_kernels_of_command_buffers_have_their_instructions(profile: Profile) -> None:
    assert profile.coverage > 0.999  # the rest are the trainer's copies of scalars
    assert profile.measured.steps == STEPS - 1
    assert 0.2 < profile.mfu < 0.3
    assert sum(bar.seconds for bar in profile.waterfall) == pytest.approx(
        profile.measured.step_seconds
    )


def test_tiles_in_the_names_of_cublas_kernels_are_beyond_executed(profile: Profile) -> None:
    """Nine matmuls with 32,768 rows in tiles of 160: 205 of them, 32 rows too many."""
    executed = profile.program.costs.executed
    rows = {line.label: line.flops for line in profile.beyond}
    width, hidden = 768, 3072
    columns = 2 * hidden + 2 * width + 6 * width  # two to or from the hidden layer, and QKV's parts
    of_cublas = LAYERS * 2 * (205 * 160 - 32_768) * columns * width
    assert rows["tiles, stated"] == executed.beyond["tiles, stated"] + of_cublas
    assert rows["tiles, assumed"] == executed.beyond["tiles, assumed"]
    assert profile.overview()["beyond_executed"] == rows
    shown = page(profile)
    assert all(f"beyond it: {label}" in shown for label in rows)
    assert f"{rows['tiles, stated']:,}" in shown


def test_every_instruction_runs_as_often_as_its_loop_says(profile: Profile) -> None:
    runs = {op.op.record.name: op.runs for op in profile.measured.ops if op.op.record}
    for record in profile.program.costs.records.values():
        if record.is_control or record.started_by:
            continue
        if record.runs == LAYERS + 1:  # conditions of loops whose trips are known do not run
            assert record.name not in runs
            continue
        assert runs[record.name] == pytest.approx(record.runs), record.name
    executed = profile.program.costs.executed.total
    assert sum(row.flops for row in profile.table("op")) == executed


def test_library_calls_get_all_their_kernels(folder: Path, profile: Profile) -> None:
    starts = [start for name, start, *_ in events(folder) if name == "loop_broadcast_fusion"]
    first, last = starts[0], starts[STEPS - 1]
    seconds: Counter[str] = Counter()
    for name, start, length, _ in events(folder):
        if first <= start < last:
            seconds["backward"] += length if any(part in name for part in BACKWARD) else 0
            seconds["forward"] += length if "fprop" in name else 0
    ops = [(op.op.record, op.seconds) for op in profile.measured.ops if op.op.record]
    calls = {
        "backward": [pair for pair in ops if pair[0].shape.target.endswith("SoftmaxBackward")],
        "forward": [pair for pair in ops if pair[0].shape.target.endswith("Softmax")],
    }
    assert [record.runs for record, _ in calls["backward"]] == [LAYERS]
    assert [record.runs for record, _ in calls["forward"]] == [LAYERS, LAYERS]
    for name, pairs in calls.items():
        own = sum(length for _, length in pairs)
        # a call also clears its workspace
        assert own == pytest.approx(seconds[name] / (STEPS - 1), rel=0.01), name


def test_instructions_with_the_same_code_share_a_kernels_name(profile: Profile) -> None:
    names = {op.op.record.name: op.seconds for op in profile.measured.ops if op.op.record}
    same = [names[f"loop_convert_fusion.{n}"] for n in (11, 12, 10)]  # all loop_convert_fusion_11
    assert all(0 < seconds < 60e-6 for seconds in same)


def test_a_lost_kernel_moves_no_other(folder: Path) -> None:
    """The profiler drops events when its buffers are full."""
    costs = instruction_costs(load(DATA / "h100_gpt2.mfu"))
    launches: dict[int, list[str]] = {}
    for name, _, _, stats in events(folder):
        if stats.get("hlo_op") == "command_buffer_101":
            launches.setdefault(stats["correlation_id"], []).append(name)
    kernels = next(iter(launches.values()))
    assert len(kernels) == 85
    records = [r for r in costs.records.values() if r.computation == "region_22.81"]
    schedule = KernelSchedule(records, costs.records)
    whole = schedule.aligned(kernels).records
    assert all(whole)
    chance = random.Random(0)
    for _ in range(20):
        lost = sorted(chance.sample(range(len(kernels)), 3))
        kept = [n for n in range(len(kernels)) if n not in lost]
        found = schedule.aligned([kernels[n] for n in kept]).records
        moved = [n for n, record in zip(kept, found, strict=True) if record is not whole[n]]
        # A neighbour with the same code may take a lost kernel's place.
        assert len(moved) <= 6


def test_kernels_that_name_no_command_buffer_either(folder: Path, tmp_path: Path) -> None:
    """As before JAX 0.11: only the CUDA graph, whose nodes are numbered, holds them together."""
    path = tmp_path / "h100"
    shutil.copytree(folder, path)
    trace = next(path.rglob("*.xplane.pb"))
    content = trace.read_bytes()
    for name in (b"hlo_op", b"hlo_module", b"program_id"):
        assert name in content
        content = content.replace(name, name[:-2] + b"__")
    trace.write_bytes(content)
    found = read_profile(path)
    assert found.coverage > 0.999
    assert found.measured.steps == STEPS - 1
    runs = {op.op.record.name: op.runs for op in found.measured.ops if op.op.record}
    assert runs["dot_product_attention_bwd.8"] == LAYERS
