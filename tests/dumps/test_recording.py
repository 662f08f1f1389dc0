"""A dump of a compiled program counts as the program does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mfu_jax
from mfu_jax import count_model_flops, executed_flops
from mfu_jax.dumps import load, record
from mfu_jax.errors import UserError

SIZE = 8
ONE = 2 * SIZE**3
PATTERN = (0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0)  # XLA's text leaves out more than ten elements


def layers(x: jax.Array) -> jax.Array:
    kinds = [lambda x: jnp.tanh(x @ x), jnp.sin]
    indices = jnp.arange(len(PATTERN))
    return lax.scan(lambda x, i: (lax.switch(jnp.array(PATTERN)[i], kinds, x), None), x, indices)[0]


@pytest.fixture(scope="module")
def compiled() -> Any:
    return jax.jit(layers).lower(jnp.ones((SIZE, SIZE))).compile()


def test_a_table_that_the_text_elides_is_in_the_dump(compiled: Any, tmp_path: Path) -> None:
    mfu_jax.dump(compiled, tmp_path / "step.mfu")
    dump = load(tmp_path / "step.mfu")
    assert executed_flops(compiled.as_text()).flags
    count = executed_flops(dump)
    assert (count.total, count.flags, count.unaccounted) == (PATTERN.count(0) * ONE, (), ())
    assert count == executed_flops(compiled)
    assert dump.elided == 0


def test_what_jax_says_is_in_the_dump(compiled: Any) -> None:
    dump = record(compiled)
    assert dump.cost_analysis() == compiled.cost_analysis()
    memory = compiled.memory_analysis()
    assert dump.memory_analysis().temp_size_in_bytes == memory.temp_size_in_bytes
    assert dump.memory_analysis().peak_memory_in_bytes == memory.peak_memory_in_bytes
    assert dump.versions["jax"] == jax.__version__
    assert dump.topology.platform == "cpu"
    assert (dump.topology.devices, dump.topology.processes) == (1, 1)


def test_the_mesh_is_in_the_dump() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    x = jax.device_put(jnp.ones((SIZE, SIZE)), NamedSharding(mesh, PartitionSpec("data")))
    assert record(jax.jit(layers).lower(x).compile()).topology.mesh == {"data": 1, "fsdp": 1}


def test_a_traced_count_is_the_model(compiled: Any) -> None:
    matmul = jax.jit(lambda x: x @ x)
    x = jnp.ones((SIZE, SIZE))
    dump = record(matmul.lower(x).compile(), model=count_model_flops(matmul, x))
    assert dump.model is not None
    assert (dump.model.per_device, dump.model.dense, dump.model.is_whole) == (ONE, ONE, True)
    assert record(compiled, model=3).model.per_device == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", ["text", layers])
def test_what_is_no_compiled_program_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"pass jax.jit\(step\)"):
        record(wrong)


def test_what_is_no_model_count_is_refused(compiled: Any) -> None:
    with pytest.raises(UserError, match="pass count_model_flops"):
        record(compiled, model=executed_flops(compiled))
