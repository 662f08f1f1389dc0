"""What a mesh makes each device execute beyond its share of the model, from the config alone."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from mfu_jax.flops.analytic.totals import FlopsRow, flops_breakdown
from mfu_jax.flops.ledger import OVERHEAD_ATTENTION
from mfu_jax.layers.families import model_spec
from mfu_jax.layers.pipeline import Schedule, schedule_of
from mfu_jax.trainer.pyconfig import Config


def pipeline_schedule(config: Config) -> Schedule | None:
    """The stages' turns; None without a pipeline."""
    return schedule_of(config, model_spec(config).layers)


def known_overheads(config: Config) -> dict[str, int]:
    """Matmul FLOPs of one step on one device, by the label of their line in the ledger.

    Args:
        config: of the run; every axis of its mesh is a number.
    """
    schedule = pipeline_schedule(config)
    # Of a stage's turns, microbatches × repeats are the model's.
    turns = schedule.turns if schedule else 1
    of_model = schedule.turns - schedule.stages + 1 if schedule else 1
    layers = _training_flops(config, lambda row: row.component != "logits")
    attention = _training_flops(config, lambda row: row.kind == "attention")
    bubble = Fraction(turns - of_model, of_model)
    experts = _training_flops(config, lambda row: "moe/experts/" in row.component)
    neighbours = config.expert * config.dcn_expert_parallelism - 1
    is_dropless = config.num_experts > 1 and config.capacity_factor <= 0
    found = {
        "pipeline bubble": (layers - attention) * bubble,
        OVERHEAD_ATTENTION: attention * bubble,
        # Sorted with a device's own rows; grouped kernels skip them, a count of shapes does not.
        "rows of other devices' experts": experts * neighbours * Fraction(turns, of_model)
        if is_dropless
        else Fraction(0),
    }
    return {label: round(flops) for label, flops in found.items() if flops}


def _training_flops(config: Config, counts: Callable[[FlopsRow], bool]) -> Fraction:
    rows = flops_breakdown(config, "dense")
    return sum((Fraction(row.training_flops) for row in rows if counts(row)), Fraction(0))
