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
SAMPLE = ("split_positions_between", "contrasted_batches")


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


def test_a_failure_of_ours_is_a_warning_and_no_finding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mfu_jax.flops.executed.resharding.findings._Doctor", fail)
    assert found_in(PLANTS["forgotten_batch"](setting())) == ()
    assert "whether tensors are resharded is not known" in caplog.text
