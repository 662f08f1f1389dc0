"""A metrics file that grows, is torn, rotated and resumed, followed as the run writes it."""

import json
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.runs.live.following import KEPT_STEPS, MetricsTail, local_metrics_file
from mfu_jax.sinks import JsonlSink, StepRecord
from tests.support.written_logs import WrittenLog


def write(path: Path, steps: range, *, notes: tuple[str, ...] = ()) -> None:
    """A run of these steps, by the sink that runs use."""
    sink = JsonlSink(path, resume_from_step=steps.start)
    for step in steps:
        scalars = {"perf/mfu": step / 1000, "learning/loss": float("nan")}
        sink.write(StepRecord(step=step, unix_seconds=step, scalars=scalars, notes=notes))
    sink.close()


def numbers(follower: MetricsTail) -> list[int]:
    return [step.step for step in follower.steps]


def test_what_is_new_is_read_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3), notes=("recompiled",))
    follower = MetricsTail(path)
    assert follower.update()
    assert numbers(follower) == [0, 1, 2]
    assert follower.steps[2].scalars["perf/mfu"] == 0.002
    assert follower.notes[0] == (0, "recompiled")
    line = json.dumps({"step": 3, "kind": "step", "perf/mfu": 0.5}).encode()
    with open(path, "ab") as file:
        file.write(line[:20])
        file.flush()
        follower.update()
        assert numbers(follower) == [0, 1, 2]
        file.write(line[20:] + b"\n")
    follower.update()
    assert numbers(follower) == [0, 1, 2, 3]
    assert follower.restarts == 0


def test_a_resume_replaces_the_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(6))
    follower = MetricsTail(path)
    follower.update()
    write(path, range(4, 8))
    follower.update()
    assert numbers(follower) == list(range(8))
    assert follower.restarts == 1


def test_a_new_run_in_place_of_the_old_one_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(6))
    follower = MetricsTail(path)
    follower.update()
    write(path, range(2))  # the sink renames the old file
    follower.update()
    assert numbers(follower) == [0, 1]
    path.unlink()
    assert not follower.update()
    assert numbers(follower) == [0, 1]


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    padding = "x" * 2000
    with open(path, "w") as file:
        for step in range(5000):
            file.write(json.dumps({"step": step, "text": padding, "perf/mfu": 0.5}) + "\n")
    follower = MetricsTail(path)
    follower.update()
    assert numbers(follower) == list(range(5000 - KEPT_STEPS, 5000))


def test_broken_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b"\xff\xfe", b"[]", b'{"step": null}', b"{", b'{"step": 4, "a/b": true, "kind": 0.5}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    follower = MetricsTail(path)
    follower.update()
    assert numbers(follower) == [4]
    assert (follower.steps[0].scalars, follower.steps[0].kind) == ({}, "step")


def test_the_run_is_a_folder_or_a_file(tmp_path: Path) -> None:
    other = tmp_path / "run" / "train_metrics.jsonl"
    write(other, range(1))
    assert local_metrics_file(other.parent) == other
    (other.parent / f"{other.name}.events.0.jsonl").touch()
    assert local_metrics_file(other.parent) == other
    write(other.parent / "metrics.jsonl", range(1))
    assert local_metrics_file(str(other.parent)) == other.parent / "metrics.jsonl"
    assert local_metrics_file(other) == other
    with pytest.raises(UserError, match="has no metrics file"):
        local_metrics_file(tmp_path / "nothing")
    with pytest.raises(UserError, match="in an object store"):
        local_metrics_file("gs://bucket/run")


def test_the_last_exchange_of_the_hosts_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    follower = MetricsTail(path)
    follower.update()
    assert follower.hosts == {}
    old = path.with_name("metrics.jsonl.hosts.json")
    for step in (1, 2):  # of version 0.1.0
        old.write_text(json.dumps({"step": step}))
        follower.update()
        assert follower.hosts["step"] == step
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    for step in (3, 4):
        log.line("hosts", 2.0 + step, step=step, processes=8)
        log.alive(2.5 + step)
        with log.path.open("a") as file:
            file.write('{"e":"hosts","seq":3,"t":1.0')
        follower.update()
        assert follower.hosts["step"] == step
        with log.path.open("a") as file:
            file.write("\n")
