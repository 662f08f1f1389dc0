"""Sinks that need packages of their own; each test is skipped where its package is missing."""

import sys
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks import StepRecord, make_sink

RECORD = StepRecord(step=7, unix_seconds=0.0, scalars={"perf/mfu": 0.25, "learning/loss": 2.5})


@pytest.mark.parametrize("name", ["wandb", "mlflow", "prometheus"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "prometheus_client" if name == "prometheus" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"needs the package '{module}'.*pip install"):
        make_sink(name)


def test_prometheus_serves_the_last_values() -> None:
    pytest.importorskip("prometheus_client")
    with pytest.MonkeyPatch.context() as patch:
        served: list[object] = []
        patch.setattr(
            "prometheus_client.start_http_server", lambda port, registry: served.append(registry)
        )
        sink = make_sink("prometheus", 9400)
    sink.write(RECORD)
    sink.write(StepRecord(step=8, unix_seconds=0.0, scalars={"perf/mfu": 0.5}))
    registry = served[0]
    assert registry.get_sample_value("mfu_jax_perf_mfu") == 0.5  # type: ignore[attr-defined]
    assert registry.get_sample_value("mfu_jax_step") == 8.0  # type: ignore[attr-defined]
    assert registry.get_sample_value("mfu_jax_learning_loss") == 2.5  # type: ignore[attr-defined]


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
