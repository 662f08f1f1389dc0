"""Whose step is planned: what compiles it, from which words, and what its config alone says."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs import as_model_config
from mfu_jax.flops.analytic.totals import (
    calculate_tokens_per_device,
    flops_breakdown,
    model_flops_per_device,
)
from mfu_jax.planning.measured_runs import FIXED
from mfu_jax.planning.plan import Work
from mfu_jax.planning.sweep.search import REMAT, Analytic

# The forward pass that each policy runs again: of everything in the layers, or of attention only.
_RECOMPUTED = {"none": (), "minimal": ("attention",), "full": ("attention", "weight")}


class StepSource(Protocol):
    """Makes the program of a step from ``key=value``.

    Attributes:
        module: that compiles it in a child process.
        python: the interpreter that has what the module needs.
    """

    module: str
    python: str

    def words(self, values: Mapping[str, str]) -> list[str]:
        """What the module reads."""

    def run_words(self, values: Mapping[str, str]) -> list[str]:
        """What the trainer takes to run the step."""

    def work(self, values: Mapping[str, str]) -> Work:
        """What the step is for.

        Raises:
            UserError: the config is wrong, or does not say the sizes of the model.
        """

    def own_rows(self, values: Mapping[str, str]) -> float:
        """As `Work.own_rows`."""

    def identity(self, values: Mapping[str, str]) -> Mapping[str, Any]:
        """What decides the program beside the words: files that they name, our own source."""

    def invalid(self, values: Mapping[str, str]) -> str:
        """Why no such step can be compiled, as far as the config says; empty if it can."""

    def analytic(self, values: Mapping[str, str]) -> Analytic:
        """What the config says of FLOPs and memory."""


class MaxTextStep:
    """MaxText's own step.

    Args:
        python: the interpreter that has MaxText; empty: this one.
    """

    module = "mfu_jax.planning.maxtext_step"

    def __init__(self, python: str = "") -> None:
        self.python = python or sys.executable

    def words(self, values: Mapping[str, str]) -> list[str]:
        """MaxText's arguments."""
        return [f"{key}={value}" for key, value in {**FIXED, **values}.items()]

    def run_words(self, values: Mapping[str, str]) -> list[str]:
        """MaxText's arguments without those of a plan."""
        return [f"{key}={value}" for key, value in values.items()]

    def work(self, values: Mapping[str, str]) -> Work:
        """What the step is for, by the bundled config of the model and MaxText's own keys."""
        return work_of(values)

    def own_rows(self, values: Mapping[str, str]) -> float:
        """All: what its kernels skip is not known here."""
        return 1.0

    def identity(self, values: Mapping[str, str]) -> Mapping[str, Any]:
        """Nothing: MaxText's version is in the key already."""
        return {}

    def invalid(self, values: Mapping[str, str]) -> str:
        """Only MaxText knows."""
        return ""

    def analytic(self, values: Mapping[str, str]) -> Analytic:
        """FLOPs; MaxText's rules decide how the state is split."""
        policy = values.get(REMAT, "full")  # MaxText's default
        with contextlib.suppress(UserError):  # sizes that only MaxText's own defaults have
            return Analytic(executed_flops=executed_flops_of(values, policy))
        return Analytic()


def work_of(config: Any, convention: str = "maxtext") -> Work:
    """What a step of a config with MaxText's keys is for.

    Raises:
        UserError: a size is missing or wrong.
    """
    return Work(
        model_flops=round(model_flops_per_device(config, convention).training),
        tokens=float(calculate_tokens_per_device(config)),
        convention=convention,
        experts=as_model_config(config).experts.num_experts > 1,
    )


def executed_flops_of(config: Any, policy: str) -> float | None:
    """FLOPs of a step with what a remat policy runs again; None if the policy is not known."""
    kinds: Sequence[str] | None = _RECOMPUTED.get(policy)
    if kinds is None:
        return None
    rows = flops_breakdown(config, "dense")
    again = sum(r.forward_flops for r in rows if r.kind in kinds and r.component != "logits")
    return float(sum(row.training_flops for row in rows) + again)
