"""A record, whether it goes to every sink, and the line that gives it back."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.logger.records.step_record import record_of
from mfu_jax.sinks import CsvSink, JsonlSink, StepRecord
from tests.support.logger_run import Run
from tests.support.sinks import ListSink

NAMES = [
    "learning/loss",
    "learning/é 損失",
    "a,b",
    'q"uo\\te',
    "step",  # a field of every line, as the next five are
    "kind",
    "unix_seconds",
    "flags",
    "notes",
    "step_2",
    "flags_2",
    "\ud800",
    "tab\t",
    "x" * 300,
    "x" * 299 + "y",
    "",
]
NUMBERS = [0, -0.0, 1.0, 1e308, 5e-324, 0.1, math.nan, math.inf, -math.inf, 2**1000, -(10**20), 7]


def odd_record(step: int, random: random.Random) -> StepRecord:
    names = random.sample(NAMES, random.randrange(len(NAMES)))
    return StepRecord(
        step=step,
        kind=random.choice(["step", "step", "warmup", "compile"]),
        unix_seconds=random.choice([0, 1.5, 1_700_000_000.123456]),
        scalars={name: random.choice(NUMBERS) for name in names},
        flags=random.choice([(), (), ("mfu_over_1", "hfu_below_mfu")]),
        notes=random.choice([(), (), ("a\nb", "\ud800 é")]),
        log_period=3,
    )


def records_of(lines: bytes, log_period: int = 1) -> list[StepRecord]:
    return [record_of(json.loads(line), log_period) for line in lines.splitlines()]


def jsonl(path: Path, records: Sequence[StepRecord]) -> bytes:
    sink = JsonlSink(path)
    sink.write_many(records)
    sink.close()
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_a_record_read_back_from_its_line_is_written_as_the_same_line(
    seed: int, tmp_path: Path
) -> None:
    odd = random.Random(seed)
    records = [odd_record(step, odd) for step in range(30)]
    lines = jsonl(tmp_path / "live.jsonl", records)
    again = records_of(lines, log_period=3)
    assert jsonl(tmp_path / "again.jsonl", again) == lines
    odd.shuffle(again)  # from whichever line reading begins
    for record in again:
        assert jsonl(tmp_path / "one.jsonl", [record]) in lines
    for before, after in zip(records, records_of(lines, log_period=3), strict=True):
        assert after.is_logged is before.is_logged
        assert repr([*after.scalars.values()]) == repr([*before.scalars.values()])
        for field in ("step", "kind", "unix_seconds", "flags", "notes"):
            assert getattr(after, field) == getattr(before, field)


@pytest.mark.parametrize("seed", range(10))
def test_a_table_is_the_same_bytes_whether_written_live_in_batches_or_from_the_log(
    seed: int, tmp_path: Path
) -> None:
    def table(name: str, records: Sequence[StepRecord], batch: int) -> bytes:
        sink = CsvSink(tmp_path / name)
        for start in range(0, len(records), batch):
            sink.write_many(records[start : start + batch])
        sink.close()
        return sink.path.read_bytes()

    odd = random.Random(seed)
    records = [odd_record(step, odd) for step in range(30)]
    for record in records:  # it has no UTF-8, so a table cannot take it
        record.scalars.pop("\ud800", None)  # type: ignore[attr-defined]
    from_log = records_of(jsonl(tmp_path / "metrics.jsonl", records))
    live = table("live", records, 1)
    assert live.count(b"\n") == 1 + len(records)
    assert table("batches", records, 7) == live
    assert table("log", from_log, 1) == live
    assert table("log in batches", from_log, 11) == live


def test_a_line_of_another_writer_needs_only_a_step_and_a_time() -> None:
    assert record_of({"step": 1, "unix_seconds": 2.0}) == StepRecord(
        step=1, unix_seconds=2.0, scalars={}
    )
    values = {"step": 1, "unix_seconds": 2.0, "x": 1, "run": "a", "y": None, "z": [1]}
    assert record_of(values).scalars == {"x": 1}
    foreign = record_of({"step": 1, "unix_seconds": 2.0, "flags": "mfu>1", "notes": [3, "why"]})
    assert (foreign.flags, foreign.notes) == (("mfu>1",), ("why",))
    assert record_of({"step": 1, "unix_seconds": 2.0, "flags": 5}).flags == ()
    with pytest.raises(KeyError):
        record_of({"unix_seconds": 2.0})


@pytest.mark.parametrize(
    ("fields", "is_logged"),
    [
        ({}, False),
        ({"step": 30}, True),
        ({"kind": "warmup"}, True),
        ({"notes": ("why",)}, True),
        ({"flags": ("mfu_over_1",)}, False),  # the first one has a note
        ({"scalars": {"eval/loss": 1.0}}, True),
        ({"scalars": {"profile/coverage": 1.0}}, True),
        ({"scalars": {"rolling/steps": 3}}, True),
        ({"scalars": {"learning/eval/loss": 1.0}}, False),
    ],
)
def test_what_must_be_seen_goes_to_all_sinks(fields: dict[str, Any], is_logged: bool) -> None:
    values: dict[str, Any] = {"step": 7, "unix_seconds": 0.0, "scalars": {}, **fields}
    assert StepRecord(**values, log_period=10).is_logged is is_logged
    assert StepRecord(**values).is_logged


def test_what_a_run_shows_can_be_told_from_its_lines(tmp_path: Path) -> None:
    path, some, every = tmp_path / "metrics.jsonl", ListSink(every_step=False), ListSink()
    run = Run(log_period=4, warmup_steps=1, sinks=[some, every, JsonlSink(path)])
    for step in range(11):
        run.logger.record(step, run.device.run(1.0))
        if step == 5:
            with run.logger.pause("eval"):
                run.logger.record_eval(step, {"mine/accuracy": 0.5})  # a name of its own
    run.logger.close()
    expected = [0, 4, 5, 8, 10]  # warm-up, the period, the eval, the period, the last
    assert some.steps == expected
    assert every.steps == [*range(11)]
    again = records_of(path.read_bytes(), log_period=4)
    assert [record.step for record in again if record.is_logged] == expected
    assert again[5].scalars["eval/step"] == 5
    assert [record.scalars.get("rolling/steps") for record in again if record.is_logged] == [
        None,
        4,
        None,
        4,
        2,
    ]
