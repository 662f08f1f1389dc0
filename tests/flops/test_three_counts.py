"""Every kind of bundled model: analytic (`dense`) = traced = executed, as ints, and it trains.

Compiled and run on this CPU; compiled for a TPU v5e and an H100 and recorded.
"""

from __future__ import annotations

import resource

import jax
import numpy as np
import pytest

from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.totals import flops_breakdown, model_flops_per_device
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.names import DENSE_EXPANSION, DUPLICATED, REMOVED, ZERO_PADDING
from mfu_jax.flops.traced.counting import TracedCount, count_model_flops
from mfu_jax.instrumentation.counts import count_program
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import split_row, with_images
from mfu_jax.trainer.run.run_logger import model_of
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step
from tests.support import program_families, tiny_models
from tests.support.compilation import only_counted
from tests.support.jax_versions import FASTER_TO_COMPILE, has_nnx_list, reads_recorded_kernels
from tests.support.recorded import text_of
from tests.support.tiny_models import LENGTH, ROWS
from tests.support.work import count_calls

# Rows that a TPU's grouped matmul multiplies at once, with the weights of one expert.
TILE = 128
# Weights that no gradient reaches: a router's bias for the choice follows the load, and the choice
# of an indexer without a loss has none.
UNTRAINED = ("choice_bias",)
# Of models that are alike but for their size, one that sees.
_SEEING = {"qwen3-0.6b": "qwen3-vl-2b"}
NAMES = [_SEEING.get(name, name) for name in tiny_models.one_of_each_kind()]


def routed(config: Config) -> int:
    """Training FLOPs of the routed experts: three products of each row, each of equal size."""
    rows = flops_breakdown(as_model_config(config), "dense")
    return sum(int(row.training_flops) for row in rows if "experts/" in row.component)


def named_lines(
    model: int, executed: ExecutedCount, traced: TracedCount | None = None
) -> dict[str, int]:
    """The lines of the ledger beyond the model, which explain all that runs.

    Args:
        model: model FLOPs.
        executed: what the program runs.
        traced: the same FLOPs by operation, where XLA leaves some of them out.
    """
    ledger = compare_flops(
        model=model,
        executed=executed,
        convention="dense",
        is_whole=True,
        operations=traced.by_operation if traced else {},
        avoidable=traced.avoidable if traced else {},
    )
    assert ledger.residual == 0
    assert not executed.unaccounted
    assert not executed.flags
    return {line.label: line.flops for line in ledger.lines[1:] if line.flops}


@pytest.mark.full
@has_nnx_list
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_runs_the_flops_that_are_counted_and_trains(name: str) -> None:
    config = tiny_models.one_period(name)
    step, (shapes, batch) = tiny_models.gradient(config)
    step = jax.jit(step)  # traced once for both
    with only_counted():  # test_step has XLA's own choice
        compiled = step.lower(shapes, batch).compile(FASTER_TO_COMPILE)
    traced, executed = count_model_flops(step, shapes, batch), executed_flops(compiled)
    model = tiny_models.analytic(config)
    assert traced.total == model
    assert traced.unaccounted == ()
    lines = named_lines(model, executed)
    # Outer products are cheap: XLA writes some of them into each fusion that uses them.
    assert lines.pop(DUPLICATED, 0) <= executed.vector_matmuls
    # The CPU has no grouped matmul: all experts multiply all rows.
    expansion = (config.num_experts - 1) * routed(config)
    assert lines == ({DENSE_EXPANSION: expansion} if expansion else {})
    assert count_program(compiled, model_of(config)).ledger.residual == 0  # what a run shows
    if not executed.duplicated:
        assert executed.forward == traced.forward + expansion // 3
        assert executed.backward == traced.backward + 2 * expansion // 3

    weights = tiny_models.some_weights(shapes)
    batch = some_batch(config)
    (first, parts), grads = compiled(weights, batch)
    untrained = (*UNTRAINED, *(() if config.indexer_loss_scaling_factor else ("indexer",)))
    for path, grad in jax.tree.leaves_with_path(grads):
        is_trained = not any(part in jax.tree_util.keystr(path) for part in untrained)
        assert (0 < np.abs(grad).max() < np.inf) == is_trained, path
    rate = 0.01 / parts.weights
    weights = jax.tree.map(lambda w, g: np.asarray(w - rate * g), weights, grads)
    (second, _), _ = compiled(weights, batch)
    assert second < first < np.inf


def some_batch(config: Config) -> dict[str, np.ndarray]:
    """Random bytes, two documents in the first row, and images if the model sees."""
    rows = np.random.default_rng(1).integers(1, 256, (ROWS, LENGTH + 1))
    rows[0, LENGTH // 3] = 0
    cut = with_images(config, split_row) if config.images_per_sequence else split_row
    split = [cut(row) for row in rows]
    return {key: np.stack([row[key] for row in split]) for key in split[0]}


def equal_streams(config: Config) -> int:
    """What XLA leaves out where the first layer reads its streams, which are copies of one.

    Of a product [n] × [n, D] for each token, one row is left.
    """
    streams = max(config.mhc_expansion_rate, 1)
    return 2 * ROWS * LENGTH * (streams - 1) * config.emb_dim


def traced_streams(program: str, platform: str) -> TracedCount | None:
    """A recorded step traced, if its first layer reads copies of one stream."""
    config = program_families.config_of(program, platform)
    if not equal_streams(config):
        return None
    step, arguments = program_families.step_of(program, platform)
    return count_model_flops(step, *arguments)


@pytest.mark.parametrize("program", program_families.MODELS)
def test_a_recorded_h100_step_runs_the_flops_that_are_counted(program: str) -> None:
    config = program_families.config_of(program, "h100")
    executed = executed_flops(text_of(f"h100_family_{program}"))
    traced = traced_streams(program, "h100")
    lines = named_lines(tiny_models.analytic(config), executed, traced)
    assert lines.pop(DUPLICATED, 0) <= executed.vector_matmuls
    expected = {
        DENSE_EXPANSION: (config.num_experts - 1) * routed(config),
        REMOVED: -equal_streams(config),
    }
    assert lines == {label: flops for label, flops in expected.items() if flops}


@reads_recorded_kernels
@pytest.mark.parametrize("program", program_families.MODELS)
def test_a_recorded_v5e_step_runs_the_flops_that_are_counted(program: str) -> None:
    config = program_families.config_of(program, "v5e")
    experts, rows = config.num_experts, ROWS * LENGTH * config.num_experts_per_tok
    evenly = [rows // experts] * experts if experts > 1 else []
    executed = executed_flops(text_of(f"v5e_family_{program}"), group_sizes=evenly)
    traced = traced_streams(program, "v5e")
    lines = named_lines(tiny_models.analytic(config), executed, traced)
    assert lines.pop(DUPLICATED, 0) <= executed.vector_matmuls
    # A tile is multiplied for each expert that has a row in it, forward and for the rows' gradient.
    visits = experts * max(1, rows // experts // TILE)
    expected = {
        # The gradient of the weights is a product for each expert, over all rows.
        DENSE_EXPANSION: (experts - 1) * routed(config) // 3,
        ZERO_PADDING: 2 * routed(config) // 3 * (visits * TILE - rows) // rows,
        REMOVED: -equal_streams(config),
    }
    assert lines == {label: flops for label, flops in expected.items() if flops}


@pytest.mark.full
@has_nnx_list
def test_tracing_a_step_of_405e9_parameters_takes_little_work_and_memory() -> None:
    keys = {"model_name": "llama3.1-405b", "per_device_batch_size": 1, "max_target_length": 8192}
    options = {"remat_policy": "full", "attention": "dot_product"}
    config = pyconfig.from_mapping({}, overrides={**keys, **options})
    grid = mesh.make_mesh(config, jax.devices()[:1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = state.abstract_state(config, grid)
    batch = step.abstract_batch(config, grid, 1)
    train_step = step.make_train_step(config)
    count, calls = count_calls(lambda: count_model_flops(train_step, weights, batch))
    assert calls < 3_000_000  # 0.8 million, in half a second
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20  # KiB
    assert state.parameter_count(weights) == 405_853_388_800
    assert count.total == model_flops_per_device(config, "dense").training
    assert count.rematerialized > 0
