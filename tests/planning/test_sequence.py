"""`mfu_jax.plan_sequence`: what the other programs keep while one runs, by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.planning import sequence
from mfu_jax.planning.result.plan import Plan

WIDTH, BATCH, DEVICES, OWN, LIMIT = 64, 16, 8, 1000, 40_000
WEIGHTS, ROWS = 4 * WIDTH * WIDTH // DEVICES, 4 * BATCH * WIDTH // DEVICES


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Each program needs OWN bytes and runs for 2 s; which chips were asked for."""
    seen = []

    def plan(step, *args, **options):
        seen.append(options)
        sizes = {"memory_peak_bytes": OWN, "memory_limit_bytes": LIMIT}
        target = {"target": "v6e", "chips": DEVICES, "hardware": "v6e", "devices": DEVICES}
        return Plan(**target, **sizes, fits=True, step_time_seconds=2.0, notes=("a note",))

    monkeypatch.setattr(sequence, "plan", plan)
    return seen


def arrays(*shapes):
    mesh = AbstractMesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]


def forward_backward(weights, rows):
    return jax.grad(lambda weights: ((rows @ weights) ** 2).sum())(weights)


def update(weights, moments, gradients):
    moments = 0.9 * moments + gradients
    return weights - 0.1 * moments, moments


def test_gradients_live_between_two_programs_and_the_state_throughout(compiled):
    weights, moments, gradients, rows = arrays(*[(WIDTH, WIDTH)] * 3, (BATCH, WIDTH))
    found = mfu_jax.plan_sequence(
        {
            "accumulate": (forward_backward, weights, rows),
            "update": (jax.jit(update, donate_argnums=(0, 1)), weights, moments, gradients),
        },
        runs={"accumulate": 4},
        tokens=800,
        topology="v6e-8",
    )
    assert compiled == [{"topology": "v6e-8"}] * 2
    # The gradients are an output of the first program: its own peak has them.
    assert found.beside_bytes == {"accumulate": WEIGHTS, "update": ROWS}
    assert found.resident_bytes == 2 * WEIGHTS + ROWS
    assert found.seconds == {"accumulate": 8.0, "update": 2.0}
    assert found.tokens_per_sec_per_chip == 800 / 10 / DEVICES
    assert found.fits
    text = str(found)
    assert text.startswith("v6e: fits: 2.98 KiB of 39.1 KiB in accumulate, 4.5 KiB resident")
    assert text.endswith("note: accumulate, update: a note")  # said once
    assert found.to_json()["peak_bytes"] == {"accumulate": OWN + WEIGHTS, "update": OWN + ROWS}


def test_a_program_without_a_time_leaves_the_sequence_without_one(monkeypatch):
    refused = Plan(target="v6e", chips=1, hardware="v6e", devices=DEVICES, fits=False)
    plans = iter([replace(refused, fits=True, step_time_seconds=2.0), refused])
    monkeypatch.setattr(sequence, "plan", lambda *args, **options: next(plans))
    programs = {"train": (jnp.sin, *arrays((BATCH,))), "update": (jnp.sin, *arrays((BATCH,)))}
    found = mfu_jax.plan_sequence(programs, tokens=800)
    assert found.seconds == {"train": 2.0, "update": None}
    assert found.tokens_per_sec_per_chip is None
    assert "predicted    not known" in str(found)


def test_a_rollout_runs_beside_the_optimizer_and_a_cache_lives_only_with_it():
    policy, judge, moments, cache, rows = arrays(*[(WIDTH, WIDTH)] * 3, *[(BATCH, WIDTH)] * 2)

    def decode(policy, cache):
        return cache @ policy

    found = mfu_jax.plan_sequence(
        {
            "prefill": (lambda policy, rows: rows @ policy, policy, rows),
            "decode": (jax.jit(decode, donate_argnums=1), policy, cache),
            "judge": (lambda judge, rows: (rows @ judge).sum(-1), judge, rows),
            "train": (jax.jit(update, donate_argnums=(0, 1)), policy, moments, judge),
        },
        topology="v6e-8",
    )
    assert found.beside_bytes == {
        "prefill": 2 * WEIGHTS,
        "decode": 2 * WEIGHTS + ROWS,
        "judge": 2 * WEIGHTS,
        "train": ROWS,
    }


def test_one_object_for_several_arguments_of_a_program_is_as_many_arrays():
    """As of a state whose weights and moments are described by one `ShapeDtypeStruct`."""
    weights, rows = arrays((WIDTH, WIDTH), (BATCH, WIDTH))
    found = mfu_jax.plan_sequence(
        {
            "judge": (lambda weights, rows: rows @ weights, weights, rows),
            "train": (jax.jit(update, donate_argnums=(0, 1)), weights, weights, weights),
        },
        topology="v6e-8",
    )
    assert found.beside_bytes == {"judge": 2 * WEIGHTS, "train": ROWS}  # the first is in both
    assert found.resident_bytes == 3 * WEIGHTS + ROWS


def test_what_is_in_the_hosts_memory_takes_none_of_the_devices():
    weights, moments, rows = arrays((WIDTH, WIDTH), (WIDTH, WIDTH), (BATCH, WIDTH))
    on_device = moments.sharding.with_memory_kind("device")
    moments = moments.update(sharding=on_device.with_memory_kind("pinned_host"))

    def fetched(weights, moments, gradients):
        return update(weights, jax.device_put(moments, on_device), gradients)

    found = mfu_jax.plan_sequence(
        {
            "judge": (lambda rows: rows.sum(), rows),
            "train": (jax.jit(fetched, donate_argnums=(0, 1)), weights, moments, weights),
        },
        topology="v6e-8",
    )
    assert found.beside_bytes == {"judge": 2 * WEIGHTS, "train": ROWS}


def test_a_program_that_fits_alone_may_not_fit_beside_the_others():
    large, small = arrays((10 * WIDTH, 8 * WIDTH), (WIDTH, WIDTH))
    programs = {"a": (jnp.sum, large), "b": (jnp.sum, small)}
    found = mfu_jax.plan_sequence(programs, topology="v6e-8")
    assert not found.fits
    assert found.peak_bytes["b"] == OWN + 80 * WEIGHTS > LIMIT
    assert "does NOT fit" in str(found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runs": {"b": 2}}, "runs of b; expected a"),
        *(
            ({"runs": {"a": wrong}}, f"runs of a: {wrong!r}; expected a whole number, 1 or more")
            for wrong in (-3, 0, 0.5, 2.0, "2", None)
        ),
        ({"tokens": -5}, "tokens=-5; expected a number, 0 or more"),
        ({"tokens": float("inf")}, "tokens=inf; expected a number, 0 or more"),
        ({"tokens": float("nan")}, "tokens=nan; expected a number, 0 or more"),
    ],
)
def test_wrong_input(compiled, given, words):
    with pytest.raises(UserError, match=words):
        mfu_jax.plan_sequence({"a": (jnp.sum, *arrays((BATCH,)))}, topology="v6e-8", **given)
    assert not compiled


def test_no_programs():
    with pytest.raises(UserError, match="no programs"):
        mfu_jax.plan_sequence({}, topology="v6e-8")


def test_runs_may_be_numpys():
    programs = {"a": (jnp.sum, *arrays((BATCH,)))}
    runs = {"a": np.int64(3)}
    found = mfu_jax.plan_sequence(programs, runs=runs)
    assert found.seconds == {"a": 6.0}
    assert type(found.runs["a"]) is int  # to_json has plain values
