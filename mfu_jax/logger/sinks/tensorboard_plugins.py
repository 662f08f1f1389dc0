"""What TensorBoard's plugins need besides scalars: a layout, hyperparameters, a run's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.logger.sinks.markdown import pairs_of
from mfu_jax.util.optional_deps import require

# Pages and charts of the plugin Custom Scalars; tags are regular expressions.
_LAYOUT = {
    "efficiency": {
        "MFU and HFU": ["^perf/mfu$", "^perf/hfu$", "^rolling/mfu$", "^perf/mfu_at_clock$"],
        "step time (s)": ["^perf/step_time_seconds$", "^rolling/step_time_seconds_p(90|99)$"],
        "seconds beside the steps": [r"^goodput/.*_seconds$", "^compile/seconds$"],
        "TFLOP/s per device": ["^perf/per_device_tflops_per_sec$"],
    },
    "learning": {
        "loss": ["^learning/loss$", "^eval/avg_loss$"],
        "gradient norm": ["^learning/grad_norm$"],
    },
    "health": {
        "hosts that are slow or missing": ["^hosts/slow$", "^hosts/missing$"],
        "slow steps (s above the median)": ["^health/outlier_.*seconds$"],
        "device memory (bytes)": ["^memory/.*"],
        "GPU power (W) and heat (°C)": ["^gpu/power_watts$", "^gpu/temperature_celsius$"],
    },
}
OVERVIEW = {
    "perf/mfu": "Overview/1 MFU",
    "perf/hfu": "Overview/2 HFU",
    "perf/step_time_seconds": "Overview/3 step time in seconds",
    "perf/per_device_tokens_per_sec": "Overview/4 tokens per second per device",
    "learning/loss": "Overview/5 loss",
}
"""Metric → its card in the group that TensorBoard shows first: the first tab sorts groups by name,
and those of other metrics begin with lower-case letters."""

_RESULTS = ("perf/mfu", "perf/hfu", "perf/step_time_seconds", "learning/loss")
# Longer values are texts, unsuited to be columns in a table of runs.
_LONGEST_VALUE = 100


def layout() -> Any:
    """A ``Summary`` with the pages of the plugin Custom Scalars."""
    charts = {
        page: {title: ["Multiline", tags] for title, tags in group.items()}
        for page, group in _LAYOUT.items()
    }
    return tensorboardx("summary").custom_scalars(charts)


def hyperparameters(values: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """What distinguishes runs: the set-up's short values, and the keys of a configuration."""
    found: dict[str, Any] = {k: v for k, v in values.items() if k != "run"}
    for text in texts.values():
        found |= {key: _number(value) for key, value in pairs_of(text).items()}
    plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in found.items()}
    return {
        k: v for k, v in plain.items() if not isinstance(v, str) or 0 < len(v) <= _LONGEST_VALUE
    }


def experiment(values: Mapping[str, Any]) -> list[Any]:
    """The ``Summary``s that begin a run in the plugin HParams."""
    first, start, _ = tensorboardx("summary").hparams(dict(values), dict.fromkeys(_RESULTS, 0.0))
    return [first, start]


def ended(has_failed: bool) -> Any:
    """The ``Summary`` that ends that run."""
    *_, summary = tensorboardx("summary").hparams({}, {})
    if has_failed:
        data = summary.value[0].metadata.plugin_data
        content = tensorboardx("proto.plugin_hparams_pb2").HParamsPluginData.FromString(
            data.content
        )
        content.session_end_info.status = tensorboardx("proto.api_pb2").STATUS_FAILURE
        data.content = content.SerializeToString()
    return summary


def _number(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def tensorboardx(module: str) -> Any:
    """A module of the package, imported when a run writes events."""
    return require(f"tensorboardX.{module}", "the sink 'tensorboard'", install="tensorboardX")
