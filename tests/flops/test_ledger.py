"""The ledger's own lines, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mfu_jax.flops.count import FlopCount
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.ledger_table import read_rows
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.hardware.step_peaks import find_peaks
from mfu_jax.instrumentation.counts import count_program, traced_model
from mfu_jax.logger.records.step_cost import diagnose
from tests.support import program_shared_calls as shared_calls
from tests.support.recorded import count


def test_printing_a_ledger_shows_the_table_and_its_repr_is_one_short_line() -> None:
    ledger = compare_flops(model=1000, executed=ExecutedCount(forward=1500), xla_reported=700.0)
    assert str(ledger) == ledger.render()
    assert str(ledger).splitlines()[1].split()[:3] == ["model", "1,000", "66.67%"]
    assert repr(ledger) == "Ledger(model=1_000, executed=1_500, residual=500)"


def test_the_heading_says_what_the_flops_are_of_and_its_rows_are_read_back() -> None:
    of_step = compare_flops(model=1000, executed=ExecutedCount(forward=1500))
    of_call = dataclasses.replace(of_step, unit="call")
    assert str(of_step).startswith("  FLOPs per step per device ")
    assert "not given" in str(of_step).splitlines()[-1]  # nobody asked XLA
    assert str(of_call).startswith("  FLOPs per call per device ")
    assert "FLOPs per call per device" in of_call._repr_html_()
    rows = [row for row in of_step.rows() if row.flops]
    assert [*read_rows(str(of_call))] == [*read_rows(str(of_step))] == rows


def test_work_that_xla_merged_is_a_named_line_and_no_alarm() -> None:
    # Written twice, run once: XLA merges equal matmuls.
    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ w) + jnp.cos(x @ w)

    args = (jnp.ones((8, 16)), jnp.ones((16, 4)))
    one = 2 * 8 * 16 * 4
    step = jax.jit(twice)
    flops = count_program(step.lower(*args).compile(), traced_model(step, args, {}, devices=1))
    assert (flops.model.per_device, flops.executed.total) == (2 * one, one)
    assert flops.ledger.removed == one
    assert flops.ledger.residual == 0
    assert "+ removed by XLA" in str(flops.ledger)
    peaks = find_peaks(jax.devices()[0], {"f32": 1}, peak_tflops_per_device=1.0)
    cost = flops.cost(peaks, tokens_per_device=0)
    assert diagnose(cost, cost.rates(1.0)) == {}


def test_an_undercount_is_a_residual_and_not_removed_by_xla() -> None:
    def two(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = jnp.tanh(x @ v)
        with jax.named_scope("second"):
            return x @ w

    args = (jnp.ones((8, 16)), jnp.ones((16, 32)), jnp.ones((32, 4)))
    first, second = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
    model = count_model_flops(two, *args)
    executed = executed_flops(jax.jit(two).lower(*args).compile())
    assert compare_flops(model=model, executed=executed).residual == 0
    names = {"forward first/dot_general": first}
    fewer = dataclasses.replace(executed, forward=first, by_operation=names)
    ledger = compare_flops(model=model, executed=fewer)
    assert (ledger.residual, ledger.removed) == (-second, 0)
    # Not so if the program has no instruction of that name.
    gone = {name: n for name, n in executed.named.items() if "second" not in name}
    ledger = compare_flops(model=model, executed=dataclasses.replace(fewer, named=gone))
    assert (ledger.residual, ledger.removed) == (0, second)
    assert f"forward second/dot_general ({second:,})" in str(ledger)


def test_products_of_a_late_inlined_call_would_be_a_residual_if_they_counted_0() -> None:
    function, arguments, flops = shared_calls.PROGRAMS["decode"]
    model = count_model_flops(function, *arguments)
    found = count("v5e_shared_calls_decode")
    assert compare_flops(model=model, executed=found).residual == 0
    nothing = dataclasses.replace(found, forward=0, by_operation={})
    ledger = compare_flops(model=model, executed=nothing)
    assert (ledger.residual, ledger.removed) == (-flops, 0)


def test_missing_work_beside_work_that_xla_merged_is_a_residual() -> None:
    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ w) + jnp.cos(x @ w)

    args = (jnp.ones((8, 16)), jnp.ones((16, 4)))
    one = 2 * 8 * 16 * 4
    executed = executed_flops(jax.jit(twice).lower(*args).compile())
    nothing = dataclasses.replace(executed, forward=0, by_operation={})
    ledger = compare_flops(model=count_model_flops(twice, *args), executed=nothing)
    assert (ledger.residual, ledger.removed) == (-one, one)


def test_kernels_cannot_compute_more_than_all_pairs_or_fewer_than_the_real_ones() -> None:
    def residual(kernels: int) -> int:
        executed = ExecutedCount(forward=1000 + kernels, attention_kernels=kernels)
        model = {"model": 1400, "attention": 400, "dense": 1800}
        return compare_flops(executed=executed, **model).residual

    assert [residual(kernels) for kernels in (350, 400, 600, 800, 860)] == [-50, 0, 0, 0, 60]


def test_an_evaluation_is_a_line_only_in_full() -> None:
    executed = ExecutedCount(forward=700, evaluation=300, backward=800)
    ledger = compare_flops(model=1300, executed=executed)
    assert ledger.residual == 200
    assert [line.label for line in ledger.of_which] == ["evaluation"]


def test_missing_work_of_a_model_that_was_not_traced_stays_a_residual() -> None:
    ledger = compare_flops(model=1000, executed=ExecutedCount(forward=600))
    assert (ledger.residual, ledger.removed) == (-400, 0)


def test_an_evaluation_explains_what_a_formula_lacks_but_no_more() -> None:
    executed = ExecutedCount(forward=700, evaluation=300, backward=800)
    apart = compare_flops(model=1200, executed=executed)
    assert [(line.label, line.flops) for line in apart.lines if line.flops][1:] == [
        ("evaluation", 300)
    ]
    assert (apart.residual, apart.of_which) == (0, ())
    within = compare_flops(model=1500, executed=executed)
    assert [line.label for line in within.of_which] == ["evaluation"]
    assert "evaluation" not in {line.label for line in within.lines}
    assert compare_flops(model=1000, executed=executed).residual == 200


def test_a_traced_model_has_the_evaluation() -> None:
    executed = ExecutedCount(forward=700, evaluation=300, backward=800)
    ledger = compare_flops(model=1400, executed=executed, operations={"forward dot_general": 600})
    assert ledger.residual == 100
    assert [line.label for line in ledger.of_which] == ["evaluation"]


def test_a_traced_count_as_the_model_says_what_xla_removed() -> None:
    def twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x @ w), jnp.max(x @ w)

    args = (jnp.ones((16, 32)), jnp.ones((8, 16)))
    product = 2 * 8 * 16 * 32
    executed = executed_flops(jax.jit(twice).lower(*args).compile())
    model = count_model_flops(twice, *args)
    ledger = compare_flops(model=model, executed=executed)
    assert (ledger.model, ledger.executed, ledger.convention) == (2 * product, product, "dense")
    assert (ledger.residual, ledger.removed) == (0, product)
    assert f"forward dot_general ({product:,})" in str(ledger)
    assert "model=count_model_flops" in str(compare_flops(model=model.total, executed=executed))
    shared = compare_flops(model=model, executed=executed, devices=2)
    assert (shared.model, shared.removed) == (product, 0)


def test_complex_products_are_done_by_three_real_ones_or_their_real_part_by_two() -> None:
    model = FlopCount(forward=800, by_dtype={"c64": 800}, by_operation={"forward dot_general": 800})
    for ran, label in ((600, "complex products by three real ones"), (400, "removed by XLA")):
        names = {"forward dot_general": ran}
        executed = ExecutedCount(forward=ran, by_dtype={"f32": ran}, by_operation=names)
        ledger = compare_flops(model=model, executed=executed)
        lines = {line.label: line.flops for line in ledger.lines if line.flops}
        assert lines == {"model": 800, label: ran - 800}


def test_a_duplicate_that_the_model_has_is_not_removed() -> None:
    names, again = {"forward dot_general": 700}, {"forward dot_general": 100}
    executed = ExecutedCount(
        forward=600,
        duplicated=100,
        duplicated_operations=again,
        by_operation={"forward dot_general": 500},
        named={"forward dot_general": 6},
    )
    ledger = compare_flops(
        model=700,
        executed=executed,
        operations=names,
        avoidable={"forward dot_general": 300},
        is_whole=True,
    )
    lines = {line.label: line.flops for line in ledger.lines[1:] if line.flops}
    assert lines == {"removed by XLA": -100}
    assert ledger.residual == 0


def test_complex_products_by_three_real_ones_are_found_among_other_products() -> None:
    """As in a Fourier neural operator: 100 of 400 are missing, beside 60 of real products."""
    model = {"forward dot_general": 260, "backward dot_general": 200}
    ran = {"forward dot_general": 210, "backward dot_general": 150}
    again = {"backward dot_general": 30}
    executed = ExecutedCount(
        forward=210,
        backward=180,
        duplicated=30,
        duplicated_operations=again,
        by_operation=ran,
        by_dtype={"f32": 390},
    )
    ledger = compare_flops(
        model=460, executed=executed, operations=model, is_whole=True, complex_products=400
    )
    lines = {line.label: line.flops for line in ledger.lines[1:] if line.flops}
    assert lines == {"duplicated by XLA": 30, "complex products by three real ones": -100}
    assert ledger.residual == 0


def test_ffts_are_no_complex_products() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.fft.fft(x) @ w

    count = count_model_flops(step, jnp.ones((4, 8), "complex64"), jnp.ones((8, 2), "complex64"))
    assert count.complex_products == 8 * 4 * 8 * 2
    assert count.total > count.complex_products


def test_what_ffts_run_beyond_the_model_stands_for_no_complex_product() -> None:
    """Of complex products, 100 FLOPs are missing; the FFT runs in matmuls under its own name."""
    model = {"forward fft": 50, "forward dot_general": 400}
    ran = {"forward jit(fft)": 900, "forward dot_general": 300}
    executed = ExecutedCount(forward=1200, by_operation=ran, by_dtype={"f32": 1200})
    ledger = compare_flops(
        model=450, executed=executed, operations=model, is_whole=True, complex_products=400
    )
    lines = {line.label: line.flops for line in ledger.lines[1:] if line.flops}
    assert lines == {"FFT by matmuls": 850, "complex products by three real ones": -100}
    assert ledger.residual == 0


def test_backward_work_that_a_checkpoint_repeats_unnamed_has_a_line() -> None:
    names = {"forward dot_general": 100, "backward dot_general": 200}
    model = FlopCount(forward=100, backward=200, rematerialized=150, by_operation=names)
    ran = names | {"backward dot_general": 250}
    executed = ExecutedCount(forward=100, backward=250, rematerialized=100, by_operation=ran)
    ledger = compare_flops(model=model, executed=executed)
    assert {line.label: line.flops for line in ledger.lines}["rematerialised backward"] == 50
    assert ledger.residual == 0
    # Forward work beyond the model is no backward work done again.
    forward = names | {"forward dot_general": 150}
    executed = ExecutedCount(forward=150, backward=200, rematerialized=100, by_operation=forward)
    ledger = compare_flops(model=model, executed=executed)
    assert ledger.residual == 50


def test_work_beyond_the_model_is_named_by_its_operations() -> None:
    executed = ExecutedCount(forward=900, by_operation={"forward mlp/dot_general": 900})
    operations = {"forward mlp/dot_general": 600}
    ledger = compare_flops(model=600, executed=executed, operations=operations)
    assert ledger.residual == 300
    assert ledger.notes == ("more FLOPs than the model has of: forward mlp/dot_general (300)",)


def test_missing_work_without_a_reason_is_named_and_no_traced_model_is_asked_for_again() -> None:
    name = "forward mlp/dot_general"
    executed = ExecutedCount(forward=500, by_operation={name: 500})
    ledger = compare_flops(model=600, executed=executed, operations={name: 600})
    assert ledger.residual == -100
    assert ledger.notes == ("fewer FLOPs than the model has of: forward mlp/dot_general (100)",)
    assert "count_model_flops" not in str(ledger)
    assert "count_model_flops" in str(compare_flops(model=600, executed=executed))


def test_work_that_the_host_runs_is_not_removed() -> None:
    name = "forward dot_general"
    executed = ExecutedCount(
        forward=600, host=400, by_operation={name: 600}, host_operations={name: 400}
    )
    ledger = compare_flops(model=1000, executed=executed, is_whole=True, operations={name: 1000})
    assert [(line.label, line.flops) for line in ledger.lines[-1:]] == [("moved to the host", -400)]
    assert (ledger.residual, ledger.removed) == (0, 400)
    # An optimizer on the host is no part of the model: only what the model lacks moved.
    ledger = compare_flops(model=600, executed=executed, is_whole=True, operations={name: 600})
    assert (ledger.residual, ledger.removed) == (0, 0)


def test_what_the_model_count_lacks_is_a_note() -> None:
    def unknown_bound(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)

    step = jax.jit(unknown_bound)
    args = (jnp.ones((4, 4)),)
    flops = count_program(step.lower(*args).compile(), traced_model(step, args, {}, devices=1))
    assert "note: not counted exactly in the model: while" in str(flops.ledger)


def test_the_bubbles_attention_in_kernels_is_not_counted_twice() -> None:
    # 1000 of weights, 400 of attention by the model; a bubble of an eighth, its attention over all
    # 800 pairs: 100. Kernels run 600 of the pairs, and an eighth more: 675.
    executed = ExecutedCount(forward=1000 + 125 + 675, attention_kernels=675)
    overheads = {"pipeline bubble": 125, "pipeline bubble: attention": 100}
    ledger = compare_flops(
        model=1400, attention=400, dense=1800, executed=executed, overheads=overheads
    )
    assert ledger.residual == 0
    lines = {line.label: line.flops for line in ledger.lines}
    assert lines["masked pairs"] == 675 - 400 - 100


TWICE = """HloModule m
%one (p: f32[8,16], q: f32[16,4]) -> f32[8,4] {
  %p = f32[8,16] parameter(0)
  %q = f32[16,4] parameter(1)
  ROOT %d = f32[8,4] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, NAME
}
%two (p.1: f32[8,16], q.1: f32[16,4]) -> f32[8,4] {
  %p.1 = f32[8,16] parameter(0)
  %q.1 = f32[16,4] parameter(1)
  ROOT %e = f32[8,4] dot(%p.1, %q.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, NAME
}
ENTRY %main (x: f32[8,16], w: f32[16,4]) -> (f32[8,4], f32[8,4]) {
  %x = f32[8,16] parameter(0)
  %w = f32[16,4] parameter(1)
  %f = f32[8,4] fusion(%x, %w), kind=kOutput, calls=%one
  %g = f32[8,4] fusion(%x, %w), kind=kOutput, calls=%two
  ROOT %t = (f32[8,4], f32[8,4]) tuple(%f, %g)
}
""".replace("NAME", 'metadata={op_name="jit(f)/jvp(block)/dot_general"}')


def test_equal_products_are_duplicates_only_beyond_those_of_the_model() -> None:
    def once(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            return x @ w

    def kept_apart(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return once(x, w), once(*jax.lax.optimization_barrier((x, w)))

    args = (jnp.ones((8, 16)), jnp.ones((16, 4)))
    product = 2 * 8 * 16 * 4
    executed = executed_flops(TWICE)
    for function, wanted, duplicated in ((once, product, product), (kept_apart, 2 * product, 0)):
        ledger = compare_flops(model=count_model_flops(function, *args), executed=executed)
        flops = {line.label: line.flops for line in ledger.lines}
        assert (ledger.model, flops["duplicated by XLA"]) == (wanted, duplicated)
        assert (ledger.residual, ledger.removed) == (0, 0)


def test_a_duplicate_is_one_where_another_product_runs_under_a_neighbours_name() -> None:
    renamed = "%h = f32[8,4] dot(%y, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    program = (
        TWICE.replace("w: f32[16,4]) ->", "w: f32[16,4], y: f32[8,16], v: f32[16,4]) ->")
        .replace("-> (f32[8,4], f32[8,4])", "-> (f32[8,4], f32[8,4], f32[8,4])")
        .replace(
            "  ROOT %t = (f32[8,4], f32[8,4]) tuple(%f, %g)",
            f"""  %y = f32[8,16] parameter(2)
  %v = f32[16,4] parameter(3)
  {renamed}, metadata={{op_name="jit(f)/jvp(block)/transpose"}}
  ROOT %t = (f32[8,4], f32[8,4], f32[8,4]) tuple(%f, %g, %h)""",
        )
    )

    def products(
        x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("block"):
            return x @ w, y @ v

    args = (jnp.ones((8, 16)), jnp.ones((16, 4))) * 2
    ledger = compare_flops(
        model=count_model_flops(products, *args), executed=executed_flops(program)
    )
    flops = {line.label: line.flops for line in ledger.lines}
    assert flops["duplicated by XLA"] == 2 * 8 * 16 * 4
    assert (ledger.residual, ledger.removed) == (0, 0)


def test_an_equal_product_in_another_layout_is_removed_for_a_reason() -> None:
    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ab,bc->ca", x, w) + (x @ w).T

    args = jax.ShapeDtypeStruct((10, 20), jnp.float32), jax.ShapeDtypeStruct((20, 12), jnp.float32)
    model = count_model_flops(twice, *args)
    executed = executed_flops(jax.jit(twice).lower(*args).compile())
    ledger = compare_flops(model=model, executed=executed)
    assert (ledger.model, ledger.executed) == (2 * 4800, 4800)
    assert (ledger.removed, ledger.residual) == (4800, 0)
