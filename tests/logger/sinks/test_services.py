"""Sinks that need packages of their own; each test is skipped where its package is missing."""

import math
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks import PrometheusSink, StepRecord, make_sink
from tests.support.work import HANG_SECONDS

RECORD = StepRecord(step=7, unix_seconds=0.0, scalars={"perf/mfu": 0.25, "learning/loss": 2.5})


@pytest.mark.parametrize("name", ["wandb", "mlflow", "prometheus"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "prometheus_client" if name == "prometheus" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"needs the package '{module}'.*pip install"):
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


def gauges(sink: PrometheusSink) -> dict[str, float]:
    """What the server answers: ``name value`` lines among comments."""
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def values(registry: Any) -> dict[str, float]:
    return {s.name: s.value for metric in registry.collect() for s in metric.samples}


def test_mlflow_keeps_metrics_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("test")
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
