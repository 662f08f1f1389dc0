"""Programs that try to fool the counters: every FLOP is where it belongs, or under a name."""

from __future__ import annotations

import jax
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.operation_diff import missing_operations
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation.counts import count_program, traced_model
from tests.support.audit import ROWS
from tests.support.audit_algebra import ALGEBRA, spectral_norm
from tests.support.audit_programs import AUDIT as PROGRAMS
from tests.support.audit_programs import CHUNKS, FORWARD, ONE

AUDIT = PROGRAMS | ALGEBRA


@pytest.mark.parametrize("name", AUDIT)
def test_no_program_fools_the_counters(name: str) -> None:
    audit = AUDIT[name]
    traced = count_model_flops(audit.function, *audit.arguments)
    assert (traced.forward, traced.backward) == (audit.forward, audit.backward)
    assert (traced.optimizer, traced.evaluation) == (audit.optimizer, audit.evaluation)
    assert sum(traced.by_operation.values()) == traced.total

    step = jax.jit(audit.function)
    model = traced_model(step, audit.arguments, {}, devices=1)
    flops = count_program(step.lower(*audit.arguments).compile(), model)
    executed = flops.executed
    assert not traced.unaccounted
    assert not executed.unaccounted
    assert flops.ledger.residual == 0
    assert executed.padding == 0
    assert executed.expansion == audit.expansion
    if audit.removed is None:
        return
    assert flops.ledger.removed == audit.removed
    needed = executed.forward + executed.backward - executed.expansion
    assert needed == audit.forward + audit.backward - audit.removed
    if not audit.removed:
        assert (executed.optimizer, executed.evaluation) == (audit.optimizer, audit.evaluation)


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("loss_again_as_a_metric", f"evaluation dot_general ({FORWARD:,})"),
        ("gradient_of_a_linear_chunked_loss", f"backward dot_general ({(CHUNKS - 1) * ONE:,})"),
        ("rollout", f"forward dot_general ({FORWARD:,})"),
    ],
)
def test_the_ledger_names_the_operations_that_xla_removed(name: str, removed: str) -> None:
    audit = AUDIT[name]
    step = jax.jit(audit.function)
    model = traced_model(step, audit.arguments, {}, devices=1)
    ledger = count_program(step.lower(*audit.arguments).compile(), model).ledger
    assert removed in str(ledger)


def test_work_under_a_neighbours_name_is_not_missing() -> None:
    model = {"forward a/dot_general": 6, "forward b/dot_general": 4, "backward a/dot_general": 9}
    moved = {"forward a/add": 6, "backward a/dot_general": 9}
    assert missing_operations(model, moved) == {"forward b/dot_general": 4}
    elsewhere = {"forward a/dot_general": 10, "backward c/mul": 9}
    assert missing_operations(model, elsewhere) == {}


def test_an_evaluation_is_a_part_of_the_executed_flops_with_a_row_of_its_own() -> None:
    audit = AUDIT["evaluation_after_adam"]
    step = jax.jit(audit.function)
    model = traced_model(step, audit.arguments, {}, devices=1)
    ledger = count_program(step.lower(*audit.arguments).compile(), model).ledger
    assert [(line.label, line.flops) for line in ledger.of_which] == [("evaluation", FORWARD)]
    assert "of which evaluation" in str(ledger)


def test_a_gradient_that_only_the_update_names_is_backward_work() -> None:
    of = jax.ShapeDtypeStruct
    width, hidden, rows = 128, 256, 16
    shapes = [of(dims, "float32") for dims in ((width, hidden), (1, hidden), (rows, width))]
    executed = executed_flops(jax.jit(spectral_norm).lower(*shapes).compile())
    vector, matmul = 2 * width * hidden, 2 * rows * width * hidden
    # Forward u·wᵀ, v·w (twice in the code, once in the program) and v·w·u; each product of w has a
    # gradient by w, and all but the first one by v; so have both sides of the last product.
    assert executed.forward == matmul + 2 * vector + 2 * hidden
    assert executed.backward - executed.duplicated == matmul + 5 * vector + 4 * hidden
    assert executed.optimizer == 0


def test_given_group_sizes_explain_a_ragged_product_with_rows_of_no_group() -> None:
    audit = AUDIT["ragged_training"]
    sizes = (5, 0, 7, 8)  # of 32 rows
    model = count_model_flops(audit.function, *audit.arguments, group_sizes=sizes)
    assert (model.forward, model.backward) == (
        audit.forward * sum(sizes) // ROWS,
        audit.backward * sum(sizes) // ROWS,
    )
    compiled = jax.jit(audit.function).lower(*audit.arguments).compile()
    executed = executed_flops(compiled, group_sizes=sizes)
    ledger = compare_flops(model=model.total, executed=executed, is_whole=True)
    assert ledger.executed == audit.forward + audit.backward + audit.expansion
    assert executed.expansion == ledger.executed - model.total
    assert ledger.residual == ledger.removed == 0
