"""Processes as the logger writes them, read by the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfu_jax.logger.hosts.findings import HostReport, view_of
from mfu_jax.runs.page import page
from mfu_jax.runs.report.processes import read_processes
from mfu_jax.runs.report.run_data import Options, read_run_data
from tests.support import html_pages
from tests.support.metrics_lines import write_run
from tests.support.written_logs import WrittenLog

HOSTILE = "</script><b>x\n../"


def write_hosts(folder: Path) -> Path:
    """Six processes: 3 waits for data, 4 was last heard at step 100, 5 never."""
    reports = [
        HostReport(
            process=n,
            host=HOSTILE if n == 1 else f"node{n}",
            step=100 if n == 4 else 400,
            steps=100,
            step_time=1.0,
            data=0.5 if n == 3 else 0.01,
            late_data=0.5 if n == 3 else 0.0,
        )
        for n in range(5)
    ]
    before = view_of(reports, count=6, period=100, compares_cpu=False)
    view = view_of(reports, count=6, period=100, compares_cpu=False, before=before)
    metrics = write_run(folder / "metrics.jsonl", [1.0] * 30)
    (folder / "metrics.jsonl.hosts.json").write_text(json.dumps(view.to_json()))
    return metrics


def test_the_slow_and_the_missing_come_first(tmp_path: Path) -> None:
    found = read_processes(str(write_hosts(tmp_path)))
    assert found is not None
    assert [host.process for host in found.processes] == [3, 4, 5, 0, 1, 2]
    assert found.summary == "6 processes at step 400: 1 slow, 2 missing"
    slow, heard, never = found.findings
    assert slow.startswith("process 3 (node3) is slow: 0.500 s of a step of 1.000 s in the wait")
    assert heard == "process 4 (node4) is missing: last heard at step 100"
    assert never == "process 5 is missing: never heard"
    assert [line[:17] for line in found.render().splitlines()] == [
        "  hosts        6 ",
        *["    process 3 (no", "    process 4 (no", "    process 5 is "],
    ]


def test_page_and_json_have_what_the_file_has(tmp_path: Path) -> None:
    write_hosts(tmp_path)
    run = read_run_data(str(tmp_path), Options())
    written = json.loads((tmp_path / "metrics.jsonl.hosts.json").read_text())
    assert run.answer["hosts"] == written
    text = page([run])
    assert "Hosts" in [e.text for e in html_pages.elements(text) if e.tag == "h2"]
    table = text[text.index('data-by="process"') :]
    assert '<td data-value="0.5">' in table[: table.index("</table>")]
    assert "<b>x" not in text


def test_a_logged_exchange_is_read_like_the_file(tmp_path: Path) -> None:
    write_hosts(tmp_path)
    file = tmp_path / "metrics.jsonl.hosts.json"
    of_file, view = read_processes(str(tmp_path / "metrics.jsonl")), json.loads(file.read_text())
    file.unlink()
    log = WrittenLog(tmp_path)
    log.start(0.0, 1.0)
    log.line("hosts", 2.0, **{**view, "step": 3})
    log.line("hosts", 3.0, **view)
    assert read_processes(str(tmp_path / "metrics.jsonl")) == of_file
    assert read_run_data(str(tmp_path), Options()).answer["hosts"] == view


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"missing": 3}', '{"hosts": [1]}'])
def test_a_damaged_file_is_no_table(text: str, tmp_path: Path) -> None:
    write_hosts(tmp_path)
    (tmp_path / "metrics.jsonl.hosts.json").write_text(text)
    run = read_run_data(str(tmp_path), Options())
    assert run.answer["hosts"] is None
    assert "Hosts" not in [e.text for e in html_pages.elements(page([run])) if e.tag == "h2"]
