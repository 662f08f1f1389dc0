"""Measured results say where they come from, and scripts add theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import results

ABOUT = {"what", "command", "date", "commit", "machine", "versions", "notes", "rows"}


@pytest.mark.parametrize("study", results.studies())
def test_every_result_says_what_was_measured_where_and_when(study: str) -> None:
    found = results.read(study)
    path = results.FOLDER / f"{study}.json"
    assert path.read_text(encoding="utf-8") == results.text(study, found)
    assert len({one["what"] for one in found}) == len(found)
    for one in found:
        assert set(one) == ABOUT
        assert one["rows"]
        assert re.match(r"\d{4}-\d\d-\d\d", one["date"])
        assert re.fullmatch(r"[0-9a-f]{7,}\+?", one["commit"])


@pytest.mark.full
def test_a_result_replaces_that_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write("speed", "of a loop", [{"step ms": 8.0}])
    results.write("speed", "of a call", [{"µs": 20}], notes=["cold"])
    results.write("speed", "of a loop", [{"step ms": 9.0}])
    first, second = results.read("speed")
    assert (first["what"], first["rows"]) == ("of a loop", [{"step ms": 9.0}])
    assert (second["rows"], second["notes"]) == ([{"µs": 20}], ["cold"])
    assert set(first) == ABOUT


def test_rows_with_different_columns_share_a_table() -> None:
    assert results.table([{"a": 1}, {"a": 2, "b": "x"}]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 1 |  |",
        "| 2 | x |",
    ]
