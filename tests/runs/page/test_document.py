"""The page of a run: its numbers are those of its files, whatever names they hold."""

from __future__ import annotations

import math
import re
import statistics
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.runs.comparison.runs import compare_with_runs
from mfu_jax.runs.page import page
from mfu_jax.runs.page.document import run_names
from mfu_jax.runs.report.run_data import Options, RunData, read_run_data
from mfu_jax.runs.report.verdict import wall_name
from tests.support import html_pages
from tests.support.metrics_lines import line, write_run
from tests.support.written_logs import UNIX, WrittenLog

HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>\"'&\n\x00../"
S = 1_000_000
SECONDS = [2.0 if n % 10 == 5 else 1.0 for n in range(100)]


def write_metrics(folder: Path) -> None:
    """100 steps of 1 s, each tenth of 2 s, with an evaluation beside step 25."""
    folder.mkdir(parents=True, exist_ok=True)
    at, lines = UNIX + 110.0, []
    for n, seconds in enumerate(SECONDS):
        at += seconds
        more: dict[str, Any] = {"unix_seconds": at, "learning/loss": 5 - n / 50, "perf/hfu": 0.3}
        if n == 25:
            more["goodput/eval_seconds"] = 3.0
        if n == 35:
            more["notes"] = ["clock jumped by 2 s"]
        lines.append(line(n, seconds, **more))
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_job(folder: Path) -> None:
    """The same run with its log, a restart after step 49 and a set-up."""
    write_metrics(folder)
    log = WrittenLog(folder)
    us = [round(S * seconds) for seconds in SECONDS]
    log.start(100.0, 102.0)
    log.steps(165.0, 0, us[:50], optimal_s=0.2)  # 55 s of steps, from 110 on
    log.alive(165.0)
    log.start(175.0, 176.0, pid=8)  # 10 s after it was killed
    log.steps(235.0, 50, us[50:], optimal_s=0.2)
    log.stop(240.0)
    log.alive(240.0)
    values = {"devices": "8 × H100 (1 processes)", "peak of one device": "10 TFLOP/s"}
    ledger = "  FLOPs per step        FLOPs  of executed\n  model         1,000       50.00%  x\n"
    ledger += "  = executed    2,000      100.00%  what ran"
    texts = {"config": "steps=100 learning_rate=0.1", "ledger": ledger}
    log.line("setup", 177.0, values=values, texts=texts)


def read(folder: Path, **options: Any) -> RunData:
    return read_run_data(str(folder), Options(**options))


def time_ledger(text: str) -> dict[str, float]:
    """Seconds by name, of every bar of the wall clock."""
    bars = re.findall(r'class="bar"[^>]*data-bar="([^"]+)">.*?data-seconds="(.*?)"', text)
    return {name: float(seconds) for name, seconds in bars}


def check_numbers(text: str) -> None:
    """What the files were written with, by arithmetic."""
    shown = html_pages.headlines(text)
    total = math.fsum(SECONDS)
    assert total == 110
    assert shown["MFU"] == pytest.approx(100 * 0.2 / total)  # 2 TFLOP at a peak of 10
    assert shown["HFU"] == pytest.approx(0.3)
    assert shown["step time"] == statistics.mean(SECONDS)
    assert shown["tokens/s/device"] == pytest.approx(1024 * 100 / total)
    assert shown["steps"] == 100
    assert shown["wall clock"] == pytest.approx(140)  # 100 to 240
    assert shown["goodput"] == pytest.approx(110 / 140)
    assert shown["effective MFU"] == pytest.approx(shown["MFU"] * 110 / 140)
    spent = time_ledger(text)
    assert math.fsum(spent.values()) == pytest.approx(140)
    assert spent["train"] + spent["slow steps"] == pytest.approx(110)
    assert spent["no process"] == pytest.approx(10, abs=0.1)


def test_the_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    write_job(tmp_path / "run")
    run = read(tmp_path / "run")
    text = page([run])
    check_numbers(text)
    words = unescape(re.sub("<[^>]+>", "", text))
    _, _, below = words.partition(run.verdict.sentence)
    assert below.index("MFU") < below.index("largest loss") < below.index("step time")
    answer = run.answer
    spent = {wall_name(name): seconds for name, seconds in answer["time"].items() if seconds}
    assert time_ledger(text) == spent
    assert html_pages.headlines(text)["effective MFU"] == answer["effective_mfu"]
    titles = [e.text for e in html_pages.elements(text) if e.tag == "h2"]
    assert titles == [
        *("Where the wall clock went", "Over steps", "Step times"),
        "What the records say",
        *("From model FLOPs to what ran", "Configuration", "All metrics of step 99"),
    ]
    assert not html_pages.outside(text)


@pytest.mark.parametrize("unit", ["step", "call"])
def test_the_ledger_is_that_of_what_the_set_up_names(tmp_path: Path, unit: str) -> None:
    write_job(tmp_path / "run")
    log = WrittenLog(tmp_path / "run")
    rows = f"  FLOPs per {unit} per device  FLOPs  of executed\n  model  1,000  50.00%"
    values = {f"model TFLOP per device per {unit}": "1e-09 (maxtext; traced)"}
    log.line("setup", 300.0, values=values, texts={"ledger": rows})
    run = read(tmp_path / "run")
    assert [row.flops for row in run.setup.ledger] == [1000]
    assert f"FLOPs per {unit} and device" in page([run])


@pytest.mark.full
@pytest.mark.skipif(html_pages.CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_the_numbers_of_the_files(tmp_path: Path) -> None:
    write_job(tmp_path / "run")
    file = tmp_path / "page.html"
    file.write_text(page([read(tmp_path / "run")]))
    dom = html_pages.in_browser(file, tmp_path / "browser")
    assert 'class="has-script"' in dom
    check_numbers(dom)


def test_restarts_are_marked_on_every_curve(tmp_path: Path) -> None:
    write_job(tmp_path / "run")
    marks = [e.text for e in html_pages.elements(page([read(tmp_path / "run")])) if e.tag == "g"]
    assert marks.count("restart before step 50") == 4  # MFU, HFU, step time, loss


def test_what_was_not_known_in_any_step_is_no_curve_at_0(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", [1.0] * 10, tokens=0.0, **{"learning/loss": 0.0})
    titles = [e.text for e in html_pages.elements(page([read(tmp_path)])) if e.tag == "b"]
    assert "loss" in titles
    assert "tokens/s/device" not in titles


def test_outliers_have_what_their_record_says(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    text = page([read(tmp_path)])
    start = text.index('data-by="outlier"')
    rows = re.findall(r"<tr><th.*?>(step \d+)<.*?word\">(.*?)</td>", text[start:])
    why = dict(rows)
    assert set(why) == {f"step {n}" for n in range(5, 100, 10)}
    assert why["step 25"] == "evaluation 3.000 s"
    assert why["step 35"] == "clock jumped by 2 s"
    assert why["step 45"] == "no cause in its record"


def test_the_cost_is_price_times_devices_times_wall_clock(tmp_path: Path) -> None:
    write_job(tmp_path)
    assert html_pages.headlines(page([read(tmp_path, price=36.0)]))["cost"] == pytest.approx(
        36 * 8 * 140 / 3600
    )
    run = read(tmp_path, price=36.0, devices=2)
    assert html_pages.headlines(page([run]))["cost"] == pytest.approx(36 * 2 * 140 / 3600)
    log = tmp_path / "metrics.jsonl.events.0.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(text for text in lines if '"e":"setup"' not in text))
    text = page([read(tmp_path, price=36.0)])
    assert "cost" not in html_pages.headlines(text)
    assert "not known in all: it needs the number of devices" in text


def test_two_runs_have_a_verdict_and_the_settings_that_differ(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 0.9)):
        seconds = [factor * (1 + 0.001 * (n % 7)) for n in range(200)]
        write_run(tmp_path / name / "metrics.jsonl", seconds)
        texts = {"config": f"steps=200 learning_rate=0.1 remat_policy={name}"}
        WrittenLog(tmp_path / name).line("setup", 1.0, values={}, texts=texts)
    runs = [read(tmp_path / name) for name in "ab"]
    found = compare_with_runs([runs[0].metrics], runs[1].metrics, warmup_steps=3)
    text = page(runs, [found])
    (verdict,) = (e for e in html_pages.elements(text) if e.attributes.get("class") == "verdict")
    assert found.to_json()["result"] == "faster"
    assert verdict.text == f"b{found.verdict[1:]}."
    assert found.verdict.startswith("B is 11.1% ± ")  # 1 / 0.9
    start = text.index('data-by="setting"')
    different = text[start : text.index("</table>", start)]
    assert re.findall(r'title="(\w+)"', different) == ["remat_policy"]


def test_the_model_of_a_trainers_settings_is_counted(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    config = (
        "run_name=x vocab_size=512 num_decoder_layers=4 emb_dim=64 num_query_heads=4 "
        "num_kv_heads=4 head_dim=16 mlp_dim=256 mlp_activations=[gelu] per_device_batch_size=2 "
        "max_target_length=128 decoder_block=gpt3"
    )
    WrittenLog(tmp_path).line("setup", 1.0, values={}, texts={"config": config})
    text = page([read(tmp_path)])
    start = text.index('data-by="convention"')
    rows = dict(re.findall(r'title="(\w+)">.*?data-value="(.*?)"', text[start:]))
    assert float(rows["dense"]) * 1e12 == 452_984_832  # of the design, and three counts


def hostile(folder: Path) -> RunData:
    write_job(folder)
    names = {f"{HOSTILE}{n}": float(n) for n in range(10_000)}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(100, 1.0, **names, notes=[HOSTILE]))
    texts = {"config": HOSTILE, "ledger": HOSTILE}
    WrittenLog(folder).line("setup", 300.0, values={HOSTILE: HOSTILE}, texts=texts)
    return read(folder)


def test_hostile_names_harm_neither_page_nor_disk(tmp_path: Path) -> None:
    run = hostile(tmp_path / "<script>alert(1)<")
    before = sorted(tmp_path.rglob("*"))
    text = page([run])
    assert sorted(tmp_path.rglob("*")) == before
    found = html_pages.elements(text)
    assert len([e for e in found if e.tag == "script"]) == 1
    assert not [e for e in found if e.tag == "img"]
    assert not [key for e in found for key in e.attributes if key.startswith("on")]
    assert "\x00" not in text
    assert escape("</script><script>") in text
    assert len(text.encode()) < 500_000
    assert "rest: 9," in text  # of 10,000 metrics


@pytest.mark.full
@pytest.mark.skipif(html_pages.CHROMIUM is None, reason="no Chromium here")
def test_hostile_names_harm_no_browser(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page([hostile(tmp_path / "<script>alert(1)<")]))
    shown = html_pages.in_browser(file, tmp_path / "browser")
    assert "<title>&lt;script&gt;alert(1)&lt;: MFU" in shown


def test_a_long_run_is_a_small_page_that_keeps_its_spike(tmp_path: Path) -> None:
    text = line(0, 1.0)
    steps = 10_000
    lines = [text.replace('"step": 0', f'"step": {n}', 1) for n in range(steps)]
    lines[5_678] = line(5_678, 77.0)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    shown = page([read(tmp_path)])
    assert len(shown.encode()) < 150_000
    assert "step 5678" in shown
    assert 77.0 in html_pages.values(shown, "data-value")


def test_names_of_runs_are_their_folders_or_files_in_full_where_they_are_alike() -> None:
    assert run_names(["x/a/metrics.jsonl", "x/b/metrics.jsonl"]) == ["a", "b"]
    assert run_names(["x/a/metrics.jsonl", "y/a/metrics.jsonl"]) == [
        "x/a/metrics.jsonl",
        "y/a/metrics.jsonl",
    ]
    assert run_names(["metrics.jsonl"]) == ["metrics.jsonl"]
