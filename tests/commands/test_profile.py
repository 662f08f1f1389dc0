"""`mfu-jax profile`: its pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax import cli
from tests.support import accelerator_traces as traces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu())
    return tmp_path


def test_the_page_goes_beside_the_trace_or_where_it_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(folder), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "profile.html")
    assert cli.main(["profile", str(folder), "--html", str(folder / "other.html")]) == 0
    page = (folder / "other.html").read_text(encoding="utf-8")
    assert page == (folder / "profile.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")


def test_pages_that_cannot_be_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, error in (
        ([str(folder), "--html", str(folder / "programs" / "step.mfu" / "p.html")], "--html"),
        ([str(folder), "p.html"], "'p.html' without --html"),
        ([str(folder), "--html", "--json"], "expected one of them"),
        ([str(folder)] * 3, "expected a folder with a trace"),
        ([str(folder), str(folder), "--html", "--json"], "expected one of them"),
        ([str(folder), str(folder), "--html"], "--html and two profiles: expected one folder"),
        ([], "got none"),
        ([str(folder), "perfetto=nowhere://bucket/t.json"], "cannot be reached"),
    ):
        assert cli.main(["profile", *words]) == 2
        assert error in capsys.readouterr().err
