"""`mfu-jax report` of a run whose folder has a profile of several hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfu_jax.cli import main
from mfu_jax.commands import report
from tests.profiling.test_host_waits import write_hosts
from tests.support import accelerator_traces as traces
from tests.support import html_pages
from tests.support.metrics_lines import write_run


def test_the_report_names_the_host_that_the_others_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = write_run(tmp_path / "metrics.jsonl", [1e-4] * 30)
    write_hosts(tmp_path / "profile", 4, 17, 6)
    assert main(["report", str(metrics), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["collective_waits"]
    assert found["slowest"] == "host1"
    waits = {host["host"]: 1e6 * host["wait_seconds"] for host in found["hosts"]}
    assert waits == pytest.approx({"host0": 13, "host1": 0, "host2": 11})
    assert main(["report", str(metrics)]) == 0
    assert "host1 comes last to collectives: it spends 1.000 µs" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["report", str(metrics), "--html", str(page)]) == 0
    capsys.readouterr()
    elements = html_pages.elements(page.read_text())
    assert "Waits in collectives" in [e.text for e in elements if e.tag == "h2"]
    assert float(found["hosts"][0]["collective_seconds"]) in [
        float(e.attributes["data-value"] or "nan") for e in elements if "data-value" in e.attributes
    ]


def test_a_profile_of_one_host_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = write_run(tmp_path / "metrics.jsonl", [1e-4] * 30)
    write_hosts(tmp_path / "profile", 4)
    assert main(["report", str(metrics), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collective_waits"] is None
    assert main(["report", str(metrics), f"--profile={tmp_path / 'profile'}"]) == 2
    assert "no collectives of several hosts" in capsys.readouterr().err


def test_a_damaged_profile_costs_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = write_run(tmp_path / "metrics.jsonl", [1e-4] * 30)
    write_hosts(tmp_path / "profile", 4, 17)
    traces.write_trace(tmp_path / "profile", name="host2.x")
    assert main(["report", str(metrics), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["collective_waits"] is None
    assert any("the profile is left out" in note for note in answer["notes"])


def test_a_large_profile_is_read_if_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_MOST_BYTES", 100)
    metrics = write_run(tmp_path / "metrics.jsonl", [1e-4] * 30)
    write_hosts(tmp_path / "profile", 4, 17)
    assert main(["report", str(metrics), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["collective_waits"] is None
    (note,) = (note for note in answer["notes"] if "the profile is left out" in note)
    assert f"--profile {tmp_path / 'profile'} reads it" in note
    told = ["report", str(metrics), "--json", "--profile", str(tmp_path / "profile")]
    assert main(told) == 0
    assert json.loads(capsys.readouterr().out)["collective_waits"]["slowest"] == "host1"
