"""What a step executes on each device beyond its share of the model, from the config alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from mfu_jax.flops.analytic import names
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.totals import (
    FlopsRow,
    calculate_tokens_per_device,
    flops_breakdown,
)
from mfu_jax.flops.names import OVERHEAD_ATTENTION
from mfu_jax.layers.families import model_spec
from mfu_jax.layers.stack.pipeline import PipelineSchedule, schedule_of
from mfu_jax.trainer.config.pyconfig import Config

# Halves of experts' adapters that `tensor` does not split: layers/feed_forward/experts.py.
_WHOLE_HALVES = (f"wi_0/{names.LORA_A}", f"wi_1/{names.LORA_A}", f"wo/{names.LORA_B}")
_FIRST = f"layers/{names.FIRST}"


def pipeline_schedule(config: Config) -> PipelineSchedule | None:
    """The pipeline's schedule; None without a pipeline."""
    return schedule_of(config, model_spec(config).layers)


def known_overheads(config: Config) -> dict[str, int]:
    """Matmul FLOPs of one step on one device, by the label of their ledger line.

    Args:
        config: of the run; every mesh axis is a number.
    """
    rows = _executed_rows(config)
    schedule = pipeline_schedule(config)
    # Of a stage's turns, microbatches × repeats do the model's work.
    turns = schedule.turns if schedule else 1
    of_model = schedule.turns - schedule.stages + 1 if schedule else 1
    bubble, worked = Fraction(turns - of_model, of_model), Fraction(turns, of_model)
    layers = _training_flops(rows, lambda row: row.component != names.LOGITS)
    attention = _training_flops(rows, lambda row: row.has_pairs)
    below, below_attention = _below_the_first_layer(rows) if schedule else (Fraction(0),) * 2
    experts = _training_flops(rows, lambda row: f"{names.EXPERTS}/" in row.component)
    halves = _training_flops(rows, lambda row: row.component.endswith(_WHOLE_HALVES))
    others = config.tensor * config.dcn_tensor_parallelism - 1
    other_expert_devices = config.expert * config.dcn_expert_parallelism - 1
    is_dropless = config.num_experts > 1 and config.capacity_factor <= 0
    repeated = halves * others * worked if is_dropless else Fraction(0)
    beyond = _sum(rows) - _sum(flops_breakdown(config, "dense"))
    found = {
        # Products within a chunk, and its triangular system.
        "delta nets in chunks": beyond,
        "pipeline bubble": (layers + below - attention - below_attention) * bubble,
        # Includes the attention of the next line, because kernels run both.
        OVERHEAD_ATTENTION: (attention + below_attention) * bubble + below_attention,
        # A stage scans all of its layers, including the one whose input needs no gradient.
        "gradients below the first layer": below - below_attention,
        "halves of adapters on every device": repeated,
        # Sorted with a device's own rows; grouped kernels skip them, counting by shape does not.
        "rows of other devices' experts": (experts * worked + repeated) * other_expert_devices
        if is_dropless
        else Fraction(0),
    }
    return {label: round(flops) for label, flops in found.items() if flops}


def _executed_rows(config: Config) -> list[FlopsRow]:
    """The model's rows, with delta nets as executed: in whole chunks."""
    chunk, length = config.gdn_chunk_size, config.max_target_length
    sizes = as_model_config(config).replace(scan_chunk_size=chunk)
    padded = Fraction(-(-length // chunk) * chunk, length)
    inverse = config.gdn_num_value_heads * chunk**2  # FLOPs per token: C³ per chunk and head

    def as_it_runs(row: FlopsRow) -> FlopsRow:
        if not row.component.endswith(f"{names.DELTA_NET}/{names.CORE_CHUNKED}"):
            return row
        tokens = calculate_tokens_per_device(sizes) * row.repeats
        forward, training = row.forward_flops, row.training_flops
        solved = inverse * tokens
        # The gradient of an inverse is one more solve and a product of two matrices, 2·C³.
        backward = solved * 3 * Fraction(training - forward, 2 * forward)
        return row._replace(
            forward_flops=padded * (forward + solved),
            training_flops=padded * (training + solved + backward),
        )

    return [as_it_runs(row) for row in flops_breakdown(sizes, "dense")]


def _training_flops(rows: Sequence[FlopsRow], counts: Callable[[FlopsRow], bool]) -> Fraction:
    return sum((Fraction(row.training_flops) for row in rows if counts(row)), Fraction(0))


def _sum(rows: Sequence[FlopsRow]) -> Fraction:
    return _training_flops(rows, lambda row: True)


def _below_the_first_layer(rows: Sequence[FlopsRow]) -> tuple[Fraction, Fraction]:
    """FLOPs that a later layer has and the first layer lacks, and attention's part of them."""
    later = {row.component: row for row in rows if row.layer != _FIRST and row.forward_flops}
    lacking = {
        row: row.forward_flops * Fraction(other.training_flops, other.forward_flops)
        - row.training_flops
        for row in rows
        if row.layer == _FIRST and (other := later.get(row.component)) is not None
    }
    attention = (flops for row, flops in lacking.items() if row.has_pairs)
    return sum(lacking.values(), Fraction(0)), sum(attention, Fraction(0))
