"""The CSV table: columns come when they are needed, rows stay."""

import csv
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks import CsvSink, StepRecord


def write(path: Path, rows: dict[int, dict[str, float]], **options: int) -> CsvSink:
    sink = CsvSink(path, **options)
    for step, scalars in rows.items():
        sink.write(StepRecord(step=step, unix_seconds=1.0, scalars=scalars))
    sink.close()
    return sink


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_metric_that_comes_late_gets_a_column(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {0: {"loss": 1.0}, 1: {"loss": 2.0, "eval": 3.0}, 2: {"loss": 4.0}})
    assert [(row["step"], row["loss"], row["eval"]) for row in read(path)] == [
        ("0", "1.0", ""),
        ("1", "2.0", "3.0"),
        ("2", "4.0", ""),
    ]


def test_a_resumed_table_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {step: {"loss": 1.0} for step in range(4)})
    with open(path, "a") as file:
        file.write("4,step,1.")  # torn
    write(path, {step: {"loss": 2.0, "new": 3.0} for step in range(2, 6)}, resume_from_step=2)
    rows = read(path)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row["loss"] for row in rows] == ["1.0", "1.0", "2.0", "2.0", "2.0", "2.0"]


def test_a_new_run_keeps_the_table_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {0: {"loss": 1.0}})
    sink = write(path, {0: {"loss": 2.0}})
    assert read(path)[0]["loss"] == "2.0"
    assert read(tmp_path / "metrics.csv.previous1")[0]["loss"] == "1.0"
    assert "previous1" in sink.warnings[0]


def test_another_kind_of_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("name,age\nAda,36\n")
    with pytest.raises(UserError, match="no column 'step'"):
        CsvSink(path, resume_from_step=3)
    assert path.read_text() == "name,age\nAda,36\n"
