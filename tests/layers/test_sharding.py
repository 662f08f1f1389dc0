"""Which mesh axes split which dimension of a weight."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P
from mfu_jax.layers.sharding import Gathering, gathering, partition_spec

SIZES = {
    "data": 1,
    "pipeline": 2,
    "fsdp": 64,
    "fsdp_transpose": 1,
    "context": 1,
    "expert": 8,
    "tensor": 4,
}


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (
            ("embed", "mlp"),
            (7168, 2048),
            P(("fsdp", "fsdp_transpose", "context", "expert"), "tensor"),
        ),
        (
            ("experts", "embed", "mlp"),
            (256, 7168, 2048),
            P("expert", ("fsdp", "fsdp_transpose", "context"), "tensor"),
        ),
        (
            ("experts", "mlp", "embed"),
            (256, 2048, 7168),
            P("expert", "tensor", ("fsdp", "fsdp_transpose", "context")),
        ),
        (
            ("whole_experts", "whole_width", "mlp"),
            (512, 7168, 2048),
            P(("expert", "fsdp", "context"), "fsdp_transpose", "tensor"),
        ),
        (
            ("whole_experts", "whole_mlp", "norm"),
            (512, 2048, 7168),
            P(("expert", "fsdp", "context"), ("tensor", "fsdp_transpose"), None),
        ),
        # The width is split already.
        (
            ("embed", "q_lora"),
            (7168, 1536),
            P(("fsdp", "fsdp_transpose", "context", "expert"), None),
        ),
        # Of 61 layers, these were 40 GB of weights and moments on every device.
        (
            ("q_lora", "q_heads", "head_dim"),
            (61, 1536, 128, 192),
            P(None, ("fsdp", "fsdp_transpose", "context", "expert"), "tensor", None),
        ),
        # 192 is 64 · 3: eight parts more do not divide it.
        (("kv_lora", "q_heads"), (192, 128), P(("fsdp", "fsdp_transpose", "context"), "tensor")),
        # Of a tiny DeepSeek V4 on 64 devices, where JAX refused it.
        (
            ("streams", "joined_heads", "q_lora"),
            (2, 32, 64),
            P(None, ("fsdp_transpose", "context", "expert"), "fsdp"),
        ),
        # In a pipeline: passes, stages, layers of a stage.
        (
            ("embed", "mlp"),
            (2, 2, 3, 7168, 2048),
            P(None, "pipeline", None, ("fsdp", "fsdp_transpose", "context", "expert"), "tensor"),
        ),
    ],
)
def test_a_weight_is_split_over_axes_that_no_other_dimension_has(
    axes: tuple[str, ...], shape: tuple[int, ...], spec: P
) -> None:
    assert partition_spec(axes, shape, SIZES) == spec


@pytest.mark.parametrize(
    ("axes", "shape", "how"),
    [
        (
            ("embed", "mlp"),
            (7168, 2048),
            Gathering(
                P(("fsdp", "fsdp_transpose", "context", "expert"), "tensor"), P(None, "tensor")
            ),
        ),
        (
            ("streams", "joined_heads", "q_lora"),
            (2, 32, 64),
            Gathering(
                P(None, ("fsdp_transpose", "context", "expert"), "fsdp"), P(None, None, None)
            ),
        ),
    ],
)
def test_what_tensor_splits_is_not_gathered(
    axes: tuple[str, ...], shape: tuple[int, ...], how: Gathering
) -> None:
    mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    with jax.sharding.use_abstract_mesh(mesh):
        assert gathering(axes, shape) == how


@pytest.mark.parametrize("mesh", [{}, {"data": 8, "fsdp": 1, "tensor": 4, "pipeline": 2}])
def test_a_weight_that_no_axis_splits_as_fsdp_does_is_not_gathered(mesh: dict[str, int]) -> None:
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    ):
        assert gathering(("embed", "mlp"), (64, 64)) is None
