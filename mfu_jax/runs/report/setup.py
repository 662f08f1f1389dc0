"""What a run logged before its first step: devices, peak, configuration, ledger."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mfu_jax.errors import UserError
from mfu_jax.flops.ledger_table import LedgerRow, read_rows
from mfu_jax.logger.run_log.events import SETUP
from mfu_jax.runs.metrics.run_files import read_beside

if TYPE_CHECKING:
    from mfu_jax.flops.analytic.conventions import FlopsRow

_DEVICES = re.compile(r"(\d+) × (.+?)(?: \(\d+ process(?:es)?\))?")
_PEAK = re.compile(r"([\d.e+-]+) TFLOP/s")
_MODEL_FLOPS = "model TFLOP per device"  # per step, or per call
_CONVENTION = re.compile(r"\((\w+)[:;)]")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run's set-up; empty where its logger wrote none.

    Attributes:
        values: name → value, as logged.
        config: the trainer's settings, key → text.
        ledger: from the model's FLOPs to XLA's report, per `unit` and device.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    ledger: tuple[LedgerRow, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], texts: Mapping[str, Any]) -> Setup:
        """A set-up as it is logged."""
        return cls(
            values=values,
            config=_pairs(str(texts.get("config", ""))),
            ledger=tuple(read_rows(str(texts.get("ledger", "")))),
        )

    @property
    def devices(self) -> int | None:
        """The job's number of JAX devices, if logged."""
        found = _DEVICES.fullmatch(str(self.values.get("devices", "")))
        return int(found[1]) if found else None

    @property
    def device_kind(self) -> str:
        """As JAX names it; empty if not logged."""
        found = _DEVICES.fullmatch(str(self.values.get("devices", "")))
        return found[2] if found else ""

    @property
    def peak(self) -> str | None:
        """The peak of one device, with its dtype and source; None if not known."""
        return str(self.values["peak of one device"]) if self.peak_tflops else None

    @property
    def peak_tflops(self) -> float | None:
        """The same in TFLOP/s."""
        found = _PEAK.match(str(self.values.get("peak of one device", "")))
        return float(found[1]) if found else None

    @property
    def unit(self) -> str:
        """What the FLOPs of the values and the ledger are of: a step, or a call."""
        return "call" if f"{_MODEL_FLOPS} per call" in self.values else "step"

    @property
    def convention(self) -> str:
        """How attention pairs are counted; empty if unknown."""
        texts = (text for name, text in self.values.items() if name.startswith(_MODEL_FLOPS))
        found = _CONVENTION.search(str(next(texts, "")))
        return found[1] if found else ""

    @property
    def chosen(self) -> dict[str, str]:
        """The trainer's settings that differ from their defaults; empty if it does not say."""
        return _pairs(str(self.values.get("settings", "")))

    @property
    def facts(self) -> dict[str, str]:
        """Everything except the ledger, name → text."""
        return {name: str(value) for name, value in self.values.items()} | dict(self.config)


def read_setup(metrics_file: str) -> Setup:
    """The last set-up that was logged beside a metrics file."""
    found = read_beside(metrics_file, SETUP)
    values, texts = (found.get(name) for name in ("values", "texts"))
    values, texts = (part if isinstance(part, dict) else {} for part in (values, texts))
    return Setup.of(values, texts)


def _pairs(text: str) -> dict[str, str]:
    words = (word.partition("=") for word in text.split())
    return {key: value for key, equals, value in words if equals}


@dataclass(frozen=True, kw_only=True)
class ModelBreakdown:
    """A model's FLOPs from its config, per step and device.

    Attributes:
        components: by the convention ``maxtext`` or the one requested.
        conventions: TFLOPs by convention.
    """

    components: tuple[FlopsRow, ...] = ()
    conventions: Mapping[str, float] = field(default_factory=dict)


def count_model(config: Any, convention: str) -> ModelBreakdown:
    """Counts a model.

    Args:
        config: as for `flops_breakdown`.
        convention: of the components.

    Raises:
        UserError: the config is wrong, or the convention unknown.
    """
    from mfu_jax.flops.analytic.totals import TERA, compare_conventions, flops_breakdown

    counted = compare_conventions(config)
    return ModelBreakdown(
        components=tuple(flops_breakdown(config, convention)),
        conventions={name: float(found.training) / TERA for name, found in counted.items()},
    )


def count_logged_model(setup: Setup) -> ModelBreakdown:
    """The model of a run of the reference trainer, from its logged settings; else empty."""
    from mfu_jax.flops.analytic.inputs.maxtext_keys import override_keys, parse_override
    from mfu_jax.flops.analytic.inputs.sources import as_model_config

    known = set(override_keys())
    try:
        fields = {k: parse_override(k, v) for k, v in setup.config.items() if k in known}
        if not fields:
            return ModelBreakdown()
        config = as_model_config(types.SimpleNamespace(**fields))
        return count_model(config, setup.convention or "maxtext")
    except UserError:  # settings of another trainer or version
        return ModelBreakdown()
