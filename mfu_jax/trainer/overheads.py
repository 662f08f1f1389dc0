"""What a mesh makes each device execute beyond its share of the model, from the config alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from mfu_jax.flops.analytic.totals import FlopsRow, flops_breakdown
from mfu_jax.flops.ledger import OVERHEAD_ATTENTION
from mfu_jax.layers.families import model_spec
from mfu_jax.layers.pipeline import Schedule, schedule_of
from mfu_jax.trainer.pyconfig import Config

# The halves of experts' adapters that `tensor` does not split (see `layers/experts.py`).
_WHOLE_HALVES = ("wi_0/lora_a", "wi_1/lora_a", "wo/lora_b")
_FIRST = "layers/first"
_Rows = Sequence[FlopsRow]


def pipeline_schedule(config: Config) -> Schedule | None:
    """The stages' turns; None without a pipeline."""
    return schedule_of(config, model_spec(config).layers)


def known_overheads(config: Config) -> dict[str, int]:
    """Matmul FLOPs of one step on one device, by the label of their line in the ledger.

    Args:
        config: of the run; every axis of its mesh is a number.
    """
    rows = flops_breakdown(config, "dense")
    schedule = pipeline_schedule(config)
    # Of a stage's turns, microbatches × repeats are the model's.
    turns = schedule.turns if schedule else 1
    of_model = schedule.turns - schedule.stages + 1 if schedule else 1
    bubble, worked = Fraction(turns - of_model, of_model), Fraction(turns, of_model)
    layers = _training_flops(rows, lambda row: row.component != "logits")
    attention = _training_flops(rows, lambda row: row.kind == "attention")
    below, below_attention = _below_the_first_layer(rows) if schedule else (Fraction(0),) * 2
    experts = _training_flops(rows, lambda row: "moe/experts/" in row.component)
    halves = _training_flops(rows, lambda row: row.component.endswith(_WHOLE_HALVES))
    others = config.tensor * config.dcn_tensor_parallelism - 1
    neighbours = config.expert * config.dcn_expert_parallelism - 1
    is_dropless = config.num_experts > 1 and config.capacity_factor <= 0
    repeated = halves * others * worked if is_dropless else Fraction(0)
    found = {
        "pipeline bubble": (layers + below - attention - below_attention) * bubble,
        # The attention of the next line is here, too: kernels run both.
        OVERHEAD_ATTENTION: (attention + below_attention) * bubble + below_attention,
        # A stage scans all of its layers, also the one whose input needs no gradient.
        "gradients below the first layer": below - below_attention,
        "halves of adapters on every device": repeated,
        # Sorted with a device's own rows; grouped kernels skip them, a count of shapes does not.
        "rows of other devices' experts": (experts * worked + repeated) * neighbours
        if is_dropless
        else Fraction(0),
    }
    return {label: round(flops) for label, flops in found.items() if flops}


def _training_flops(rows: _Rows, counts: Callable[[FlopsRow], bool]) -> Fraction:
    return sum((Fraction(row.training_flops) for row in rows if counts(row)), Fraction(0))


def _below_the_first_layer(rows: _Rows) -> tuple[Fraction, Fraction]:
    """FLOPs that the first layer lacks of what a later one has, and attention's part of them."""
    later = {row.component: row for row in rows if row.layer != _FIRST and row.forward_flops}
    lacking = {
        row: row.forward_flops * Fraction(other.training_flops, other.forward_flops)
        - row.training_flops
        for row in rows
        if row.layer == _FIRST and (other := later.get(row.component)) is not None
    }
    attention = (flops for row, flops in lacking.items() if row.kind == "attention")
    return sum(lacking.values(), Fraction(0)), sum(attention, Fraction(0))
