"""Planted sharding mistakes are found with tensor and line; healthy programs are not accused."""

from __future__ import annotations

import re

import jax
import pytest

from mfu_jax.flops.executed.counting import counter_of
from mfu_jax.flops.executed.resharding.findings import resharded_tensors
from mfu_jax.flops.executed.resharding.resharded_tensor import warnings_of
from tests.campaigns import meshes
from tests.campaigns.shardings import (
    HEALTHY,
    MESHES,
    PLANTS,
    Setting,
    examined,
    found_in,
    is_found,
    setting_of,
    trainer_program,
)

QUICK = ("swapped_axes", "forgotten_batch", "replicated_moments", "split_layers")
SAMPLE = ("gathered_weights", "split_positions_between", "contrasted_batches")


def setting() -> Setting:
    return setting_of(jax.devices()[:8])


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in PLANTS]
)
def test_a_planted_mistake_is_named_with_its_tensor_and_line(name: str) -> None:
    step = PLANTS[name](setting())
    found = found_in(step)
    assert is_found(name, step, found), [one.text for one in found]


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.full) for n in HEALTHY]
)
def test_collectives_that_a_step_needs_are_not_reported(name: str) -> None:
    assert found_in(HEALTHY[name](setting())) == ()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "axes"), [pair for pair in MESHES if pair in meshes.SAMPLE])
def test_the_trainers_meshes_are_not_accused(kind: str, axes: str) -> None:
    assert examined(trainer_program(kind, axes, jax.devices()[:8])) == ()


def test_a_text_names_axes_by_size_and_stride_and_says_how_many_more_there_are() -> None:
    step = PLANTS["forgotten_batch"](setting())
    text = jax.jit(step.run).lower(*step.args).compile().as_text() or ""
    (one,) = resharded_tensors(counter_of(text), {})
    assert one.axes == "groups of 4, 2 apart"
    assert len(warnings_of([one] * 5)) == 4
    assert warnings_of([one] * 5)[-1].startswith("and 2 more")
    assert warnings_of([]) == []


def test_a_gather_without_a_line_has_its_users() -> None:
    """As in JAX 0.12, whose XLA names what it has split itself after a parameter, if at all."""
    step = PLANTS["split_layers"](setting())
    text = jax.jit(step.run).lower(*step.args).compile().as_text() or ""
    bare, gathers = re.subn(r"( all-gather\(.*), metadata=\{[^}]*\}", r"\1", text)
    named = re.sub(r"( all-gather\(.*)", r'\1, metadata={op_name="w"}', bare)
    assert gathers or "is_spmd_generated" in text
    for one in (bare, named):
        assert is_found("split_layers", step, resharded_tensors(counter_of(one), {}))


# As XLA combines the gathers of a GPU's layer: of the weight, which a matmul needs whole, and of
# the batch, of which each device then takes its own rows again.
COMBINED = """HloModule m, num_partitions=4

ENTRY main {
  w = f32[16,16]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="w"}
  x = f32[8,64]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}, metadata={op_name="x"}
  start = ((f32[16,16]{1,0}, f32[8,64]{1,0}), (f32[64,16]{1,0}, f32[32,64]{1,0})) all-gather-start(w, x), replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(f)/dot_general" source_file="model.py" source_line=8}
  done = (f32[64,16]{1,0}, f32[32,64]{1,0}) all-gather-done(start), metadata={op_name="jit(f)/dot_general" source_file="model.py" source_line=8}
  weight = f32[64,16]{1,0} get-tuple-element(done), index=0, metadata={op_name="jit(f)/dot_general" source_file="model.py" source_line=8}
  rows = f32[32,64]{1,0} get-tuple-element(done), index=1, metadata={op_name="jit(f)/add" source_file="model.py" source_line=7}
  device = u32[] partition-id()
  table = s32[4]{0} constant({0, 8, 16, 24})
  entry = s32[1]{0} dynamic-slice(table, device), dynamic_slice_sizes={1}
  first = s32[] bitcast(entry)
  zero = s32[] constant(0)
  own = f32[8,64]{1,0} dynamic-slice(rows, first, zero), dynamic_slice_sizes={8,64}
  ROOT y = f32[8,16]{1,0} dot(own, weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot_general"}
}
"""  # noqa: E501


# As XLA for GPUs has it from JAX 0.12 on: the slice is a fusion that starts and ends apart.
CUT = """
cut {
  rows = f32[32,64]{1,0} parameter(0)
  first = s32[] parameter(1)
  zero = s32[] constant(0)
  ROOT own = f32[8,64]{1,0} dynamic-slice(rows, first, zero), dynamic_slice_sizes={8,64}
}

ENTRY main {"""
STARTED = COMBINED.replace("\nENTRY main {", CUT).replace(
    "dynamic-slice(rows, first, zero), dynamic_slice_sizes={8,64}\n  ROOT y",
    "fusion-done(begun)\n  ROOT y",
).replace(
    "  own = f32[8,64]{1,0} fusion-done",
    "  begun = ((f32[32,64]{1,0}, s32[]), f32[8,64]{1,0}, u32[]) fusion-start(rows, first), "
    "kind=kLoop, calls=cut\n  own = f32[8,64]{1,0} fusion-done",
)  # fmt: skip


@pytest.mark.parametrize("text", [COMBINED, STARTED])
def test_of_combined_gathers_the_one_without_need_is_named(text: str) -> None:
    assert ("fusion-start(" in text) == (text is STARTED)  # what it is made from is still there
    (one,) = resharded_tensors(counter_of(text), {"data": 4})
    assert (one.kind, one.tensor, one.file, one.line) == (
        "full rematerialization",
        "x",
        "model.py",
        7,
    )
    assert one.bytes_moved == 32 * 64 * 4
    assert (one.before, one.after) == ("P('data')", "P('data')")


def test_a_failure_of_ours_is_a_warning_and_no_finding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mfu_jax.flops.executed.resharding.findings._Doctor", fail)
    assert found_in(PLANTS["forgotten_batch"](setting())) == ()
    assert "whether tensors are resharded is not known" in caplog.text
