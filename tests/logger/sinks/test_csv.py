"""The CSV table: columns come when they are needed, rows stay."""

import csv
import errno
import math
import os
import shutil
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RecordError
from mfu_jax.logger.sinks.base import is_permanent
from mfu_jax.sinks import CsvSink, StepRecord


def record(step: int, **scalars: float) -> StepRecord:
    return StepRecord(step=step, unix_seconds=1.0, scalars=scalars)


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


def test_a_late_column_parses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv, "reader", lambda *_: pytest.fail("rows are parsed"))
    path = tmp_path / "metrics.csv"
    rows = {0: {"a,b": 1.0}, 1: {}, 2: {"late": 2.0, "later": 3.0}, 3: {'"': 4.0}}
    write(path, rows)
    assert path.read_text() == (
        'step,kind,unix_seconds,"a,b",late,later,""""\n'
        "0,step,1.0,1.0,,,\n1,step,1.0,,,,\n2,step,1.0,,2.0,3.0,\n3,step,1.0,,,,4.0\n"
    )


@pytest.mark.parametrize("first", [1, 0])
def test_a_failure_while_a_column_is_added_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    def open_nothing(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    sink = CsvSink(tmp_path / "metrics.csv")
    for step in range(first):
        sink.write(record(step, loss=1.0))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("mfu_jax.storage.files._open_regular", open_nothing)
            with pytest.raises(UserError, match="Too many open files") as raised:
                sink.write(record(first, loss=2.0, late=3.0))
        assert not is_permanent(raised.value)
    for step in (first, first + 1):
        sink.write(record(step, loss=2.0, late=3.0))
    sink.close()
    expected = [{"loss": "1.0", "late": ""}] * first + [{"loss": "2.0", "late": "3.0"}] * 2
    assert [{name: row[name] for name in ("loss", "late")} for row in read(sink.path)] == expected
    assert sink.path.read_text().count("step,") == 1 + len(expected)  # one header
    assert not caplog.messages


def test_a_resumed_table_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {step: {"loss": 1.0} for step in range(4)})
    with open(path, "a") as file:
        file.write("4,step,1.")  # torn
    write(path, {step: {"loss": 2.0, "new": 3.0} for step in range(2, 6)}, resume_from_step=2)
    rows = read(path)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row["loss"] for row in rows] == ["1.0", "1.0", "2.0", "2.0", "2.0", "2.0"]


def test_a_damaged_table_loses_its_broken_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {step: {"loss": 1.0} for step in range(4)})
    whole = path.read_bytes().splitlines(keepends=True)
    broken = [b'"\n', b"\n", b"x,step\n", b"9" * 30 + b"\n", b"\xff\r\0\n"]
    path.write_bytes(b"".join([*whole[:3], *broken, *whole[3:], b"4,st"]))
    write(path, {4: {"loss": 2.0}}, resume_from_step=4)
    assert path.read_bytes() == b"".join([*whole, b"4,step,1.0,2.0\n"])
    path.write_bytes(b"step,kind,unix_sec")  # killed in its first write
    write(path, {4: {"loss": 2.0}}, resume_from_step=4)
    assert [(row["step"], row["loss"]) for row in read(path)] == [("4", "2.0")]


def test_a_new_run_keeps_the_table_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {0: {"loss": 1.0}})
    write(path, {0: {"loss": 2.0}})
    assert read(path)[0]["loss"] == "2.0"
    assert read(tmp_path / "metrics.csv.previous1")[0]["loss"] == "1.0"
    assert "previous1" in caplog.messages[0]


def test_a_later_loggers_table_gets_no_row_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first, second = CsvSink(path), CsvSink(path)
    second.write(record(10, a=1.0))
    with pytest.raises(RecordError, match="later logger of this process"):
        first.write(record(0, b=2.0))
    first.close()
    second.close()
    assert [row["step"] for row in read(path)] == ["10"]


def test_another_kind_of_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("name,age\nAda,36\n")
    with pytest.raises(UserError, match="no column 'step'"):
        CsvSink(path, resume_from_step=3)
    assert path.read_text() == "name,age\nAda,36\n"


def test_several_steps_are_one_write_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(record(0, loss=1.0))
    pieces: list[bytes] = []
    with monkeypatch.context() as patch:
        patch.setattr(sink._file, "append", pieces.append)
        sink.write_many([record(1, loss=2.0), record(2, loss=3.0)])
    assert pieces == [b"1,step,1.0,2.0\n2,step,1.0,3.0\n"]
    with pytest.raises(RecordError, match="steps 3 to 4 cannot be rows"):
        sink.write_many([record(3, loss=1.0), record(4, **{"\ud800": 1.0})])
    sink.write(record(5, loss=4.0))
    sink.close()
    assert [row["step"] for row in read(sink.path)] == ["0", "5"]


@pytest.mark.parametrize("kind", ["device", "FIFO"])
def test_what_is_no_file_is_refused_and_not_replaced(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/full") if kind == "device" else tmp_path / "fifo"
    if kind == "FIFO":
        os.mkfifo(path)
    with pytest.raises(UserError, match=f"(?s)csv_file .* cannot be written .it is a {kind}"):
        CsvSink(path)
    assert not path.is_file()
    assert not list(tmp_path.glob("*.lock"))


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "metrics.csv"
    link.symlink_to(tmp_path / "disk" / "real.csv")
    write(link, {0: {"loss": 1.0}, 1: {"loss": 2.0, "eval": 3.0}})
    assert link.is_symlink()
    assert [row["eval"] for row in read(tmp_path / "disk" / "real.csv")] == ["", "3.0"]


def test_a_table_that_is_deleted_comes_back_before_it_gets_a_column(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    sink = CsvSink(path)
    sink.write(record(0, loss=1.0))
    shutil.rmtree(path.parent)
    sink.write(record(1, loss=2.0, eval=3.0))
    sink.close()
    assert [(row["loss"], row["eval"]) for row in read(path)] == [("1.0", ""), ("2.0", "3.0")]


def test_names_that_a_table_cannot_have_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, {0: {"step": 9.0, "a\nb": 1.0, "a_b": 2.0, 'q"uo,te': 3.0}, 1: {"late": 4.0}})
    first, second = read(path)
    assert (first["step"], first["step_2"], second["late"]) == ("0", "9.0", "4.0")
    assert (first["a_b"], first["a_b_2"], first['q"uo,te']) == ("1.0", "2.0", "3.0")


def test_values_are_written_as_python_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    values = {"a": math.nan, "b": -math.inf, "c": 1e308, "d": 2**1000, "e": 5e-324}
    write(path, {0: values})
    (row,) = read(path)
    assert math.isnan(float(row["a"]))
    assert [float(row[k]) for k in "bcde"] == [-math.inf, 1e308, float(2**1000), 5e-324]
