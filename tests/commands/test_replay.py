"""`mfu-jax replay`: what a sink that was down gets later is what one that was up has."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.cli import main
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import (
    ConsoleSink,
    CsvSink,
    JsonlSink,
    Sink,
    StepRecord,
    TensorBoardSink,
    register_sink,
)
from mfu_jax.verdict import NextStep, Verdict
from tests.support.sinks import ListSink

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


class Down(ListSink):
    """A service that cannot be reached."""

    def write(self, record: StepRecord) -> None:
        raise OSError("down")


def run(folder: Path, *sinks: Sink, log_period: int = 1, steps: int = 60) -> None:
    """A run in which metrics come and go, with an eval, notes and a loss that is not finite."""
    files = [JsonlSink(folder / "metrics.jsonl"), *sinks]
    with MetricLogger(
        model_flops_per_device=10**9, peak_flops_per_sec=1e12, sinks=files, log_period=log_period
    ) as logger:
        logger.write_setup({"peak": 1.0}, {"ledger": "rows"})
        for step in range(steps):
            metrics: dict[str, Any] = {"loss": float("nan") if step == 4 else 1.0 / (step + 1)}
            if step % 7 == 3:
                metrics["rare"] = 0.1 * step
            logger.record(step, metrics, step_time_seconds=0.1 + 0.001 * step)
            if step == 20:
                with logger.pause("eval"):
                    logger.record_eval(step, {"accuracy": 0.5})


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    found = event_accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, event.wall_time, str(event.value)) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_a_file_that_cannot_be_read_is_one_line_and_no_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    reader = open

    def denied(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) == str(tmp_path / "metrics.jsonl"):
            raise PermissionError(13, "Permission denied", str(path))
        return reader(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", denied)
    copy = tmp_path / "copy.jsonl"
    assert main(["replay", str(tmp_path), "--sink=jsonl", f"path={copy}"]) == 2
    assert "metrics.jsonl' cannot be read (Permission denied)" in capsys.readouterr().err
    assert not copy.exists()


@pytest.mark.parametrize("log_period", [1, 10])
def test_a_file_that_is_written_later_is_the_one_that_was_written_live(
    tmp_path: Path, log_period: int
) -> None:
    live = CsvSink(tmp_path / "live.csv"), TensorBoardSink(tmp_path / "live")
    run(tmp_path, *live, log_period=log_period)
    assert main(["replay", str(tmp_path), "--sink", "csv", f"path={tmp_path / 'later.csv'}"]) == 0
    target = f"folder={tmp_path / 'later'}"
    assert main(["replay", str(tmp_path), "--sink", "tensorboard", target]) == 0
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    assert main(["replay", str(tmp_path), "--sink=jsonl", f"path={tmp_path / 'x/m.jsonl'}"]) == 0
    assert (tmp_path / "x/m.jsonl").read_bytes() == lines
    assert (tmp_path / "later.csv").read_bytes() == (tmp_path / "live.csv").read_bytes()
    assert scalars(tmp_path / "later") == scalars(tmp_path / "live")
    shown = [
        line["step"]
        for line in map(json.loads, lines.splitlines())
        if line["step"] % log_period == 0
        or line["kind"] != "step"
        or "notes" in line
        or line["step"] in (20, 59)  # the eval's, and the last
    ]
    losses = scalars(tmp_path / "later")["learning/loss"]
    assert [step for step, _, _ in losses] == shown


def test_the_console_gets_the_set_up_before_the_steps_as_a_live_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, ConsoleSink(), steps=10)
    live = capsys.readouterr().out
    assert live.startswith("peak: 1")
    assert main(["replay", str(tmp_path), "--sink=console"]) == 0
    assert capsys.readouterr().out == f"{live}written up to step 9\n"


def test_the_totals_of_a_run_that_ended_with_nan_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with MetricLogger(sinks=[JsonlSink(tmp_path / "metrics.jsonl")], warmup_steps=0) as logger:
        logger.record(0, {"loss": math.nan}, step_time_seconds=1.0)
    caplog.clear()
    assert main(["replay", str(tmp_path), "--sink=console"]) == 0
    assert "last loss    nan" in capsys.readouterr().out
    assert not caplog.messages


def test_none_is_an_argument_as_in_the_signature(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    run(tmp_path, steps=3)
    file = tmp_path / "a.prom"
    assert (
        main(["replay", str(tmp_path), "--sink=prometheus", "port=None", f"textfile={file}"]) == 0
    )
    assert "learning_loss" in file.read_text()


def test_a_run_is_not_replayed_into_its_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, steps=3)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(file)
    log = tmp_path / "metrics.jsonl.events.0.jsonl"
    told = log.read_bytes()
    targets = ["metrics.jsonl", "link.jsonl", log.name]
    for target in [str(tmp_path / name) for name in targets] + [f"file://{file}"]:
        assert main(["replay", str(tmp_path), "--sink=jsonl", f"path={target}"]) == 2
        assert "own file" in capsys.readouterr().err
    assert (file.read_bytes(), log.read_bytes()) == (lines, told)


def test_a_sink_of_ones_own_that_was_down_gets_all_and_its_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[ListSink] = []

    @register_sink("later")
    class Later(Down):
        def __init__(self, project: str) -> None:
            super().__init__(every_step=False)
            assert project == "mine"
            made.append(self)

        write = ListSink.write

    run(tmp_path, Down(), steps=5)
    assert main(["replay", str(tmp_path), "--sink", "later", "project=mine"]) == 0
    (sink,) = made
    assert sink.steps == [0, 1, 2, 3, 4]
    assert ("setup/ledger", "rows") in sink.texts
    assert sink.summary is not None
    assert sink.summary.steps == 3
    assert sink.closed
    assert "written up to step 4" in capsys.readouterr().out


def test_the_summary_has_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "unix_seconds": 1.0}\n')
    verdict = Verdict(kind="report", mfu=0.4, next_steps=(NextStep(text="go on"),))
    summary = {"e": "summary", "t": 1.0, "m": 1.0, "steps": 1, "verdict": verdict.to_json()}
    text = json.dumps(summary, separators=(",", ":"))
    (tmp_path / "metrics.jsonl.events.0.jsonl").write_text(f"{text}\n")
    assert main(["replay", str(tmp_path), "--sink=console"]) == 0
    assert f"\n{verdict.render()}\nsummary: 1 " in capsys.readouterr().out


def test_what_the_log_says_a_sink_has_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "unix_seconds": 1.0}}\n' for n in range(6)))
    behind = {"e": "behind", "seq": 0, "t": 1.0, "m": 1.0, "sink": "CsvSink", "step": 2}
    text = json.dumps(behind, separators=(",", ":"))
    (tmp_path / "metrics.jsonl.events.0.jsonl").write_text(f"{text}\n")
    table = tmp_path / "t.csv"
    table.write_text("step,kind,unix_seconds\n0,step,1.0\n1,step,1.0\n2,step,1.0\n")
    assert main(["replay", str(tmp_path), "--sink=csv", f"path={table}"]) == 0
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == ["step", *"012345"]


def test_what_a_sink_never_takes_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(ListSink):
        def write(self, record: StepRecord) -> None:
            if record.step == 2:
                raise ValueError("no")
            super().write(record)

    register_sink("refusing")(Refusing)
    run(tmp_path, steps=4)
    assert main(["replay", str(tmp_path), "--sink=refusing"]) == 1
    assert "refusing: 1 record could not be written" in capsys.readouterr().out
    assert main(["replay", str(tmp_path), "--sink=refusing", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"sink": "refusing", "first_step": 0, "last_step": 3, "lost": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no sink; expected --sink=NAME"),
        (["--sink=wandbb"], "unknown sink 'wandbb'"),
        (["--sink=csv"], "cannot be made (missing a required argument: 'path')"),
        (["--sink=csv", "path=x.csv", "pth=y"], "cannot be made"),
        (["--sink=csv", "path=x.csv", "from_step=-1"], "from_step=-1: expected 0 or more"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, steps=2)
    assert main(["replay", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err
