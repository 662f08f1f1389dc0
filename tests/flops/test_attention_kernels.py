"""The rows of attention kernels, and that a new one is known to both counts."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from mfu_jax.flops import attention_kernels as kernels
from mfu_jax.flops.attention_kernels import KERNELS, AttentionKernel, kernels_named
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support import program_kernels as programs
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.paths import RECORDED
from tests.support.recorded import count


def rows(*names: str) -> list[AttentionKernel]:
    return [row for name in names for row in kernels_named(name)]


def test_every_row_can_be_recognised_and_runs_what_it_recomputes() -> None:
    for row in KERNELS:
        assert kernels_named("an_mlp") == ()
        assert row.primitives or row.scope != "(?!)" or not row.name.startswith("(?!)")
        assert not Counter(row.recomputed) - Counter(row.products)


@pytest.mark.parametrize(
    "names",
    [
        ("_flash_attention_dkv_kernel", "_flash_attention_dq_kernel"),
        ("flash_mha_bwd_dkv_block_q=128", "flash_mha_bwd_dq_block_q=128"),
        ("mha_backward",),
    ],
)
def test_a_backward_pass_needs_each_gradient_once(names: tuple[str, ...]) -> None:
    needed = Counter(product for row in rows(*names) for product in row.needed)
    assert needed == Counter(["dP", "dV", "dQ", "dK"])


def test_splash_attentions_backward_is_fused_or_in_two_kernels() -> None:
    fused, dkv = kernels_named("splash_mha_dkv_no_residuals")
    (dq,) = kernels_named("splash_mha_dq_no_residuals")
    assert Counter(fused.needed) == Counter([*dkv.needed, *dq.needed])
    assert (fused.share_recomputed, dkv.share_recomputed) == (Fraction(1, 5), Fraction(1, 2))


def test_a_kernel_in_a_scope_of_a_common_name_is_attention_by_its_shapes() -> None:
    q, k, row = (2, 256, 4, 64), (2, 128, 2, 64), (2, 4, 256)
    backward = (q, k, k, q, row, row)
    find = kernels.kernel_in_scope
    forward = find("jit(f)/jit(attention)/entry/mpmd_map", (q, k, k), (q, row))
    dq = find("jit(f)/transpose(jvp())/anonymous/mpmd_map", backward, (q,))
    dkv = find("jit(f)/transpose(jvp())/anonymous/mpmd_map", backward, (k, k))
    assert forward
    assert dq
    assert dkv
    assert (*forward.needed, *dq.needed, *dkv.needed) == ("S", "O", "dP", "dQ", "dV", "dK")
    for scope, operands, results in (
        ("jit(f)/my_entry", (q, k, k), (q,)),
        ("jit(f)/entry", (q, k, q), (q,)),
        ("jit(f)/entry", (q[1:], k[1:], k[1:]), (q[1:],)),
        ("jit(f)/anonymous", (q, k, k), (q,)),
        ("jit(f)/anonymous", (q, k, k, q, row, q), (q,)),
    ):
        assert find(scope, operands, results) is None


@pytest.fixture
def new_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    row = AttentionKernel(
        name="^my_backward$", products=("S", "dP", "dV", "dK", "dQ"), recomputed=("S",)
    )
    monkeypatch.setattr(kernels, "KERNELS", (*KERNELS, row))
    kernels_named.cache_clear()
    yield
    kernels_named.cache_clear()


def recorded() -> str:
    """A step whose fused backward kernel is 2.5 times its forward kernel."""
    text = lzma.decompress((RECORDED / "v5e_splash_fused.hlo.xz").read_bytes()).decode()
    return text.replace("splash_mha_dkv_no_residuals", "my_backward")


def test_without_its_row_a_kernel_recomputes_nothing() -> None:
    assert executed_flops(recorded()).rematerialized == 0


@reads_recorded_kernels
@pytest.mark.usefixtures("new_row")
def test_a_new_row_is_known_to_the_executed_count() -> None:
    count = executed_flops(recorded())
    assert count.rematerialized * 5 == count.kernels["my_backward"] > 0


@pytest.mark.usefixtures("new_row")
def test_a_new_row_is_known_to_the_traced_count() -> None:
    size = 16

    def body(*refs: jax.Array) -> None:
        *_, x, y, out = refs
        out[...] = sum((x[...] @ y[...] for _ in range(5)), jnp.zeros((size, size)))

    def backward(q: jax.Array, k: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
        return pl.pallas_call(body, name="my_backward", out_shape=shape)(q, k)

    square = jax.ShapeDtypeStruct((size, size), jnp.float32)
    assert count_model_flops(backward, square, square).total == 4 * 2 * size**3


@reads_recorded_kernels
def test_a_linear_attention_beside_a_kernel_is_no_part_of_its_pairs() -> None:
    pairs = programs.BATCH * programs.HEADS * programs.LENGTH**2
    flash = 3 * 2 * (2 * pairs * programs.HEAD_DIM)  # Q·Kᵀ and P·V, forward and backward
    # Chunks as long as a head is wide: scores, values, what the state gives, and what it gets.
    linear = 3 * 4 * (2 * programs.BATCH * programs.HEADS * programs.LENGTH * programs.HEAD_DIM**2)
    model = count_model_flops(programs.beside_linear_attention, *programs.TPU_QKV)
    executed = count("v5e_flash_beside_linear")
    assert model.total == flash + linear
    assert flash < model.activations < model.total
    assert executed.attention_kernels == flash * 36 // 64  # the blocks on and below the diagonal
    assert sum(executed.attention_operations.values()) == executed.attention_kernels
    ledger = compare_flops(model=model, executed=executed)
    lines = {line.label: line.flops for line in ledger.lines if line.flops}
    assert lines["masked pairs"] == -flash * 28 // 64
    assert ledger.residual == ledger.removed == 0
