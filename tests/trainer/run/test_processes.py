"""Jobs of several processes over the loopback: their losses, their end, their checkpoints."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from mfu_jax.runs.metrics.run_files import read_beside
from tests.support.floats import assert_close_as_float32
from tests.support.trainer_process import by_step, losses, records, run, start_job
from tests.support.work import HANG_SECONDS


@pytest.mark.full
def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    keys = ("steps=4", "eval_interval=2", "enable_checkpointing=true", "checkpoint_period=2")
    processes = start_job(tmp_path, 2, *keys, "per_device_batch_size=2", "host_log_period=1")
    outputs = [process.communicate(timeout=HANG_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1]
    # The first process alone writes.
    assert "completed step: 3" in outputs[0][0]
    assert "step" not in outputs[1][0]
    hosts = read_beside(str(tmp_path / "default" / "metrics.jsonl"), "hosts")
    assert [host["process"] for host in hosts["hosts"]] == [0, 1]
    assert hosts["missing"] == []
    code, _, err = run(tmp_path, *keys[:2], "per_device_batch_size=4", "run_name=one")
    assert code == 0, err
    tokens = 4 * 32
    assert_close_as_float32(losses(tmp_path), losses(tmp_path, "one"), terms=tokens)
    for two, one in zip(records(tmp_path), records(tmp_path, "one"), strict=True):
        assert two["perf/per_device_tflops"] * 2 == pytest.approx(one["perf/per_device_tflops"])
    two, one = (records(tmp_path, name)[-1]["eval/avg_loss"] for name in ("default", "one"))
    assert_close_as_float32(two, one, terms=tokens)


@pytest.mark.full
def test_a_killed_process_ends_the_job_and_its_checkpoint_is_read_by_one_and_by_four(
    tmp_path: Path,
) -> None:
    """Two processes, whose device each has half of the weights and all sequences; one is killed."""
    keys = ("steps=12", "enable_checkpointing=true", "checkpoint_period=2", "num_kv_heads=2")
    both = start_job(tmp_path / "two", 2, *keys, "tensor=2", "per_device_batch_size=2")
    for line in both[0].stdout:
        if "completed step: 5" in line:
            both[1].kill()
    _, err = both[0].communicate(timeout=HANG_SECONDS)
    both[1].communicate(timeout=HANG_SECONDS)
    assert both[0].returncode == 75, err
    assert "process 1 of 2 died" in err
    assert "run the same command again to resume" in err

    saved = tmp_path / "two" / "default"
    names = [folder.name for folder in (saved / "checkpoints").iterdir()]
    restored = max(int(name) for name in names if name.isdecimal())  # the kill may leave a part
    # Saving runs beside the steps: of the last checkpoint before the kill only a part may be there.
    assert restored in (2, 4, 6, 8, 10)
    for count in (1, 4):
        shutil.copytree(saved / "checkpoints", tmp_path / f"by_{count}/default/checkpoints")
    alone = ("steps=12", "num_kv_heads=2", "per_device_batch_size=4", "run_name=straight")
    code, _, err = run(tmp_path, *alone)
    assert code == 0, err
    four = start_job(
        *(tmp_path / "by_4", 4, *keys, "per_device_batch_size=1"),
        *("fsdp=2", "context_parallelism=2"),
    )
    code, _, err = run(tmp_path / "by_1", *keys, "per_device_batch_size=4")
    assert code == 0, err
    ended = [process.communicate(timeout=HANG_SECONDS)[1] for process in four]
    assert [process.returncode for process in four] == [0] * 4, ended[0]

    straight = by_step(tmp_path, "straight")
    for folder in ("two", "by_1", "by_4"):
        got = by_step(tmp_path / folder)
        first = 0 if folder == "two" else restored
        assert next(iter(got)) == first
        expected = {step: straight[step] for step in got}
        assert_close_as_float32(got, expected, terms=12 * 4 * 32)


@pytest.mark.full
def test_a_kill_among_four_processes_ends_all_with_one_line_and_leaves_the_run_to_be_resumed(
    tmp_path: Path,
) -> None:
    """Killed is one that neither coordinates nor writes."""
    keys = ("steps=10", "enable_checkpointing=true", "checkpoint_period=2", "num_kv_heads=2")
    four = start_job(tmp_path, 4, *keys, "fsdp=2", "tensor=2", "per_device_batch_size=1")
    for line in four[0].stdout:
        if "completed step: 5" in line:
            four[2].kill()
    errors = [process.communicate(timeout=HANG_SECONDS)[1] for process in four]
    assert [process.returncode for process in four] == [75, 75, -signal.SIGKILL, 75], errors
    for survivor in (0, 1, 3):
        (said,) = (line for line in errors[survivor].splitlines() if "mfu_jax.train:" in line)
        assert "process 2 of 4 died" in said
        assert "run the same command again to resume" in said

    assert list(tmp_path.rglob("metrics.jsonl")) == [tmp_path / "default" / "metrics.jsonl"]
    before = [record["step"] for record in records(tmp_path)]
    assert before == list(range(len(before)))  # no process repeats what another wrote
    assert len(before) > 5
    alone = (*keys, "per_device_batch_size=4")
    code, _, err = run(tmp_path, *alone, "run_name=straight", "enable_checkpointing=false")
    assert code == 0, err
    code, out, err = run(tmp_path, *alone)
    assert code == 0, err
    first = int(re.findall(r"completed step: (\d+)", out)[0])
    assert first in (2, 4, 6, 8)  # a checkpoint's, not the beginning
    resumed, straight = by_step(tmp_path), by_step(tmp_path, "straight")
    assert list(resumed) == list(straight) == list(range(10))
    assert_close_as_float32(resumed, straight, terms=10 * 4 * 32)
