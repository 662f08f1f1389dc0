"""Sizes of the mesh's axes from the keys of a config: what each -1 becomes, and what is refused."""

import pytest

from mfu_jax.errors import UserError
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.mesh_axes import check_batch, check_shape, mesh_shape
from tests.support.messages import is_told

AXES = ("data", "pipeline", "fsdp", "fsdp_transpose", "context", "expert", "tensor")
PRODUCT = dict.fromkeys(AXES, 1)


def config(*words: str) -> pyconfig.Config:
    return pyconfig.load(["configs/base.yml", *words])


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([], {"data": 8}),
        (["fsdp=-1"], {"fsdp": 8}),
        (["ici_fsdp_parallelism=-1", "ici_tensor_parallelism=2"], {"fsdp": 4, "tensor": 2}),
        (
            ["ici_fsdp_parallelism=-1", "ici_fsdp_transpose_parallelism=4"],
            {"fsdp": 2, "fsdp_transpose": 4},
        ),
        (["ici_context_parallelism=4"], {"data": 2, "context": 4}),
        (["ici_sequence_parallelism=2", "data=1", "expert=-1"], {"context": 2, "expert": 4}),
        (["ici_tensor_parallelism=2", "ici_tensor_transpose_parallelism=4"], {"tensor": 8}),
        (["ici_pipeline_parallelism=4", "context_parallelism=2"], {"pipeline": 4, "context": 2}),
        (["ici_autoregressive_parallelism=1", "ici_data_parallelism=8"], {"data": 8}),
    ],
)
def test_sizes_on_eight_devices(words: list[str], sizes: dict[str, int]) -> None:
    assert mesh_shape(config(*words), 8).sizes == PRODUCT | sizes


@pytest.mark.parametrize(
    ("words", "within", "between"),
    [
        # MaxText's defaults: replicas between slices, weights split within one.
        (["dcn_data_parallelism=-1", "fsdp=-1"], {"fsdp": 4}, {"data": 2}),
        (["dcn_fsdp_parallelism=2", "fsdp=2", "tensor=2"], {"fsdp": 2, "tensor": 2}, {"fsdp": 2}),
        (["dcn_pipeline_parallelism=2", "data=4"], {"data": 4}, {"pipeline": 2}),
    ],
)
def test_sizes_within_and_between_two_slices(
    words: list[str], within: dict[str, int], between: dict[str, int]
) -> None:
    shape = mesh_shape(config(*words), 8, slices=2)
    assert dict(zip(PRODUCT, shape.within, strict=True)) == PRODUCT | within
    assert dict(zip(PRODUCT, shape.between, strict=True)) == PRODUCT | between
    assert shape.sizes == {a: within.get(a, 1) * between.get(a, 1) for a in PRODUCT}


def check(words: list[str], *, slices: int) -> None:
    """As trainer and plan do on eight devices."""
    of_words = config(*words)
    shape = mesh_shape(of_words, 8, slices)
    check_shape(of_words, shape)
    check_batch(of_words, shape, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fsdp=3"], "does not fill the 8 devices; their product has to be 8"),
        (["fsdp=16"], "does not fill the 8 devices"),
        (["fsdp=-1", "tensor=-1"], "fsdp=-1 and tensor=-1: only one axis can be"),
        (["dcn_data_parallelism=4"], "does not fill the 2 slices; their product has to be 2"),
        (["dcn_data_parallelism=2", "fsdp=8"], "has to be 4 in each of 2 slices"),
        (["tensor=8"], "num_query_heads=4: not divisible by tensor=8"),
        (["context_parallelism=8", "max_target_length=100"], "max_target_length=100: not"),
        (["fsdp=2", "context_parallelism=4", "emb_dim=12"], "divisible by fsdp × context=8"),
        (["per_device_batch_size=0.5"], "not divisible by the mesh's data × pipeline × fsdp"),
        (["pipeline=4", "num_pipeline_microbatches=2"], "expected 4 or more"),
        (["pipeline=4", "num_pipeline_microbatches=5"], "a divisor of 32"),
        (["ici_fsdp_parallelism=2", "fsdp=2"], "fsdp is given twice"),
        (["ici_autoregressive_parallelism=2"], "training has no such axis"),
        (["fsdp=0"], "fsdp=0: expected 1 or more"),
        (["dcn_tensor_parallelism=-2"], "dcn_tensor_parallelism=-2: expected 1 or more"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        check(words, slices=2 if any("dcn" in word for word in words) else 1)
    assert message in str(error.value)
    assert is_told(str(error.value))
