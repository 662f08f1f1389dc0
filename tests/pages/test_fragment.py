"""What a notebook shows: tables with the numbers of the text, small, and text only."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
from flax import nnx

from mfu_jax.flops.ledger import Ledger
from mfu_jax.flops.ledger_lines import LedgerLine
from mfu_jax.flops.traced.module_table import tabulate
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import Summary
from mfu_jax.pages.fragment import fragment
from mfu_jax.planning.result.plan import Plan
from mfu_jax.profiling.profile import read_profile
from mfu_jax.sinks import ConsoleSink
from tests.support import accelerator_traces as traces
from tests.support import html_pages

LEDGER = Ledger(
    model=1000,
    convention="maxtext",
    lines=(LedgerLine(label="model", flops=1000), LedgerLine(label="<masked>", flops=500)),
    executed=2000,
    xla_reported=None,
    causes=(),
    notes=("a & b",),
)


def cells(text: str) -> list[str]:
    found = html_pages.elements(text)
    assert not [e for e in found if e.tag in ("script", "img", "link")]
    assert len(text) < 10_000
    return [e.text for e in found if e.tag in ("td", "th")]


def test_a_ledger() -> None:
    text = LEDGER._repr_html_()
    shown = cells(text)
    assert shown[:8] == [
        *("FLOPs per step per device", "FLOPs", "of executed", ""),
        *("model", "1,000", "50.00%", ""),
    ]
    assert "+ <masked>" in shown
    assert '<td style="--share:50.00%">50.00%</td>' in text  # a bar behind it
    assert "margin: 0" in text  # Jupyter centres tables
    assert shown[shown.index("+ unexplained") :][:3] == ["+ unexplained", "500", "25.00%"]
    assert "<p>a &amp; b</p>" in text


def test_a_summary_has_the_lines_of_its_text() -> None:
    summary = Summary(
        steps=2, mean_seconds=0.75, median_seconds=0.5, p90_seconds=1.0, p99_seconds=1.0, mfu=0.41
    )
    assert cells(summary._repr_html_())[2:] == [
        *("step time", "mean 0.750 s, median 0.500 s, p90 1.000 s, p99 1.000 s"),
        *("rates", "mean n/a TFLOP/s/device"),
        *("utilisation", "mean MFU 41.0%, HFU n/a"),
    ]


def test_a_summary_draws_its_steps_and_its_json_leaves_them_out() -> None:
    times = [0.5] * 900 + [2.0] + [0.5] * 99
    summary = Summary(steps=1000, mean_seconds=0.5015, times=times)
    text = summary._repr_html_()
    cells(text)  # small, no scripts
    figure = ElementTree.fromstring(text[text.index("<figure") : text.index("</figure>") + 9])
    (line,) = figure.iter("polyline")
    assert len(line.get("points", "").split()) == 60
    assert "593.750 ms (500.000 ms to 2.000 s)" in line.get("data-y", "")
    assert "times" not in summary.to_json()
    assert summary == replace(summary, times=())


def test_a_table_of_modules() -> None:
    model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jax.nn.relu)
    shown = cells(tabulate(model, jax.ShapeDtypeStruct((2, 8), "float32"))._repr_html_())
    # 8·4 + 4 parameters; 2·2·8·4 FLOPs forward.
    assert shown[12:18] == ["layers/0", "Linear", "36", "128", "128", "100.0%"]


def test_a_plan() -> None:
    plan = Plan(
        target="8 × TPU v5p",
        chips=8,
        fits=True,
        memory_peak_bytes=2**30,
        memory_limit_bytes=2**31,
        step_time_seconds=2.0,
        mfu=0.5,
        time_by_cause={"matmuls": 1.5, "exposed all-gather": 0.5},
    )
    text = plan._repr_html_()
    assert cells(text)[3:9] == [
        *("matmuls", "1.500 s", "75.0%", "exposed all-gather", "500.000 ms", "25.0%")
    ]
    assert "8 × TPU v5p: fits, 1.00 of 2.00 GiB" in text


def test_a_profile(tmp_path: Path) -> None:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu())
    profile = read_profile(tmp_path)
    shown = cells(profile._repr_html_())
    assert shown[3::3] == [bar.name for bar in profile.waterfall]
    assert shown[5::3] == [f"{bar.mfu_points:.2f}" for bar in profile.waterfall]
    ends = re.findall(r"--from:([\d.]+)%;--share:([\d.]+)%", profile._repr_html_())
    assert len(ends) == len(profile.waterfall)
    assert ends[0][0] == "0"
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert float(ends[-1][1]) == pytest.approx(100, abs=0.01)


def test_a_long_table_is_cut() -> None:
    text = fragment("t", ("n",), ([str(n)] for n in range(10**6)))
    assert text.count("<tr>") == 201
    assert "<p>…</p>" in text


def test_the_lines_of_a_cell_have_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    out, errors = io.StringIO(), io.StringIO()  # as a kernel's streams: no terminals
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", errors)
    sink = ConsoleSink(total_steps=3)
    for step in range(3):
        scalars = {"perf/step_time_seconds": 0.5, "learning/loss": 4.0}
        sink.write(StepRecord(step=step, unix_seconds=0.0, scalars=scalars))
    sink.close()
    assert out.getvalue().count("\n") == 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out.getvalue())
    assert errors.getvalue() == ""
