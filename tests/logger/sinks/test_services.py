"""Sinks that need packages of their own; each test is skipped where its package is missing."""

from __future__ import annotations

import math
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.sinks import PrometheusSink, StepRecord, make_sink
from tests.support.work import HANG_SECONDS

RECORD = StepRecord(step=7, unix_seconds=0.0, scalars={"perf/mfu": 0.25, "learning/loss": 2.5})


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow with a store of its own."""
    package = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    package.set_tracking_uri(tmp_path.as_uri())
    package.set_experiment("test")
    return package


@pytest.mark.parametrize("name", ["wandb", "mlflow", "prometheus"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "prometheus_client" if name == "prometheus" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"(?s)needs the package '{module}'.*pip install"):
        make_sink(name)


def test_prometheus_serves_the_last_values() -> None:
    pytest.importorskip("prometheus_client")
    sink = make_sink("prometheus", port=0)
    assert isinstance(sink, PrometheusSink)
    sink.write(RECORD)
    sink.write(StepRecord(step=8, unix_seconds=0.0, scalars={"perf/mfu": 0.5}))
    served = gauges(sink)
    assert served == {"mfu_jax_perf_mfu": 0.5, "mfu_jax_step": 8.0, "mfu_jax_learning_loss": 2.5}
    sink.close()


def test_prometheus_serves_this_machine_only_and_stops_with_close() -> None:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(port=0)
    host, port = sink._server.server_address
    assert host == "127.0.0.1"
    sink.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)
    again = PrometheusSink(port=port)  # the port is free
    again.close()


def test_prometheus_refuses_a_port_in_use() -> None:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(port=0)
    with pytest.raises(UserError, match=rf"127.0.0.1:{sink.port} cannot be served"):
        PrometheusSink(port=sink.port)
    sink.close()


def test_names_that_prometheus_would_merge_are_gauges_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(port=None)
    scalars = {"top-1": 1.0, "top_1": 2.0, "step": 3.0, "": 4.0, "é": math.inf}
    for step in (7, 8):
        sink.write(StepRecord(step=step, unix_seconds=0.0, scalars=scalars))
    assert values(sink.registry) == {
        "mfu_jax_step": 8.0,
        "mfu_jax_top_1": 1.0,
        "mfu_jax_top_1_2": 2.0,
        "mfu_jax_step_2": 3.0,
        "mfu_jax__": 4.0,
        "mfu_jax___2": math.inf,
    }
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "metric 'top_1' is written as 'top_1_2'" in told[0]


def test_node_exporter_reads_a_file_that_is_always_whole(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = tmp_path / "mfu.prom"
    sink = make_sink("prometheus", port=None, textfile=path)
    sink.write(RECORD)
    first = path.read_text()
    sink.write(StepRecord(step=8, unix_seconds=0.0, scalars={"perf/mfu": 0.5}))
    assert path.read_text() == first  # not at every step
    sink.close()
    families = parser.text_string_to_metric_families(path.read_text())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["mfu_jax_perf_mfu"] == 0.5
    assert found["mfu_jax_step"] == 8.0
    assert [file.name for file in tmp_path.iterdir()] == ["mfu.prom"]


@pytest.mark.parametrize("name", ["metrics.txt", "nowhere/mfu.prom", "gs://bucket/mfu.prom"])
def test_a_file_that_node_exporter_would_not_read_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UserError, match="expected a name that ends in"):
        make_sink("prometheus", port=None, textfile=path)


def gauges(sink: PrometheusSink) -> dict[str, float]:
    """What the server answers: ``name value`` lines among comments."""
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def values(registry: Any) -> dict[str, float]:
    return {s.name: s.value for metric in registry.collect() for s in metric.samples}


@pytest.mark.full
def test_mlflow_keeps_metrics_by_step(mlflow: Any) -> None:
    sink = make_sink("mlflow", run_name="test")
    sink.write(RECORD)
    sink.write_text("setup/ledger", "rows")
    sink.close()
    client = mlflow.MlflowClient()
    (run,) = mlflow.search_runs(output_format="list")
    (metric,) = client.get_metric_history(run.info.run_id, "perf/mfu")
    assert (metric.step, metric.value) == (7, 0.25)
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["setup"]
    assert run.info.status == "FINISHED"


@pytest.mark.full
def test_wandb_keeps_metrics_by_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sink = make_sink("wandb", project="test", mode="offline", dir=str(tmp_path))
    sink.write_setup({"peak": 1.0}, {})
    sink.write(RECORD)
    run = sink._run  # type: ignore[attr-defined]
    assert run.summary["perf/mfu"] == 0.25
    assert run.config["peak"] == 1.0
    assert run.step == 8  # the next one
    sink.close()


def test_mlflow_takes_every_name_and_ends_as_told(mlflow: Any) -> None:
    sink = make_sink("mlflow", run_name="test")
    assert mlflow.active_run() is None  # the caller's own code may start one
    scalars = {"acc@1": 1.0, "acc_1": 2.0, "..": 3.0, "x/y": 4.0, "x": 5.0, "": 6.0, "n" * 300: 7.0}
    sink.write(StepRecord(step=7, unix_seconds=12.5, scalars=scalars))
    sink.write_setup({"peak": 2e12, "config": "c" * 6001}, {"ledger": "rows"})
    sink.write_failure("ValueError('x')")
    sink.close()
    client = mlflow.MlflowClient()
    (run,) = mlflow.search_runs(output_format="list")
    expected = {"acc_1": 1.0, "acc_1_2": 2.0, "_": 3.0, "x/y": 4.0, "x_2": 5.0, "__2": 6.0}
    assert run.data.metrics == expected | {"n" * 250: 7.0}
    (metric,) = client.get_metric_history(run.info.run_id, "acc_1")
    assert (metric.step, metric.timestamp) == (7, 12500)
    assert run.data.params == {"peak": "2000000000000.0"}
    files = [file.path for file in client.list_artifacts(run.info.run_id, "setup")]
    assert files == ["setup/config.txt", "setup/ledger.txt"]
    assert (run.info.status, run.data.tags["failure"]) == ("FAILED", "ValueError('x')")


def test_mlflow_resumes_a_run_whose_setup_changed(mlflow: Any) -> None:
    first = make_sink("mlflow")
    first.write_setup({"devices": "8", "peak": "1"}, {})
    first.close()
    (run,) = mlflow.search_runs(output_format="list")
    second = make_sink("mlflow", run_id=run.info.run_id)
    second.write_setup({"devices": "16", "peak": "1", "new": "2"}, {})
    second.close()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.params == {"devices": "8", "peak": "1", "new": "2"}
    assert run.data.tags["devices"] == "16"
    assert run.info.status == "FINISHED"


def test_an_mlflow_run_of_the_caller_is_used_and_left_open(mlflow: Any) -> None:
    with mlflow.start_run() as mine:
        sink = make_sink("mlflow")
        sink.write(RECORD)
        sink.close()
        run = mlflow.MlflowClient().get_run(mine.info.run_id)
        assert (run.info.status, run.data.metrics["perf/mfu"]) == ("RUNNING", 0.25)


class FakeWandb:
    """What the sink uses of the package and of its run."""

    def __init__(self) -> None:
        self.run: FakeWandb | None = None
        self.rows: list[tuple[dict[str, Any], int | None]] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> FakeWandb:
        if "mode" in options and options["mode"] == "wrong":
            raise RuntimeError("No API key configured.\nmore")
        return self

    def log(self, row: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        assert commit is (step is not None)
        self.rows.append((row, step))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_wandb_ends_as_told_and_keeps_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandb())
    sink = make_sink("wandb", project="x")
    sink.write(StepRecord(step=7, unix_seconds=0.0, scalars={"_step": 1.0, "step/kind": 2.0}))
    sink.write_failure("ValueError('x')")
    sink.close()
    assert wandb.rows == [({"step/kind": "step", "_step_2": 1.0, "step/kind_2": 2.0}, 7)]
    assert (wandb.summary, wandb.exit_codes) == ({"failure": "ValueError('x')"}, [1])


def test_a_wandb_run_of_the_caller_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandb())
    wandb.run = wandb
    sink = make_sink("wandb")
    sink.write(StepRecord(step=7, unix_seconds=0.0, scalars={"x": 1.0}))
    sink.close()
    assert wandb.rows == [({"step/kind": "step", "x": 1.0, "step/number": 7}, None)]
    assert wandb.exit_codes == []


def test_a_service_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(UserError, match=r"wandb could not start a run \(No API key configured.\)"):
        make_sink("wandb", mode="wrong")
