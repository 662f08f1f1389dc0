"""MaxText's own metric logger, called as in its training loop, for comparison."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any, Self


class MaxTextLogger:
    """MaxText's `MetricLogger` with its log lines, a metrics file and TensorBoard on.

    Args:
        logger: MaxText's logger.
        key: names its metadata entries.
    """

    def __init__(self, logger: Any, key: Any) -> None:
        self._logger = logger
        self._seconds = datetime.timedelta(seconds=0.005)
        logger.metadata[key.PER_DEVICE_TFLOPS] = 0.001
        logger.metadata[key.PER_DEVICE_TOKENS] = 2048

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """A logger that writes to `folder`; None where MaxText is not installed."""
        if importlib.util.find_spec("maxtext") is None:
            return None
        module = importlib.import_module("maxtext.common.metric_logger")
        pyconfig = importlib.import_module("maxtext.configs.pyconfig")
        base = Path(str(pyconfig.__file__)).with_name("base.yml")
        folder.mkdir(parents=True)
        options = {
            "run_name": "bench",
            "base_output_directory": str(folder),
            "metrics_file": str(folder / "metrics.jsonl"),
            "enable_checkpointing": "false",
            "skip_jax_distributed_system": "true",
        }
        words = [f"{key}={value}" for key, value in options.items()]
        with contextlib.redirect_stdout(io.StringIO()):
            config = pyconfig.initialize(["", str(base), *words])
        return cls(module.MetricLogger(config, lambda step: 1e-3), module.MetadataKey)

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes the metrics of a step; writes those of the step before."""
        scalars = {f"learning/{name}": value for name, value in metrics.items()}
        with contextlib.redirect_stdout(io.StringIO()):
            self._logger.buffer_and_write_metrics({"scalar": scalars}, step, self._seconds)

    def close(self) -> None:
        """Writes the last step and closes the files."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._logger.flush_metrics_and_cleanup()
