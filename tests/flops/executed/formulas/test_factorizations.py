"""Factorisations, solves and FFTs count by the textbook, in the trace and in every program."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support import program_factorizations as programs
from tests.support.recorded import text_of


@pytest.mark.parametrize("platform", programs.PLATFORMS)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_optimizers_with_factorisations_have_no_gap(platform: str, name: str) -> None:
    function, arguments, flops = programs.PROGRAMS[name]
    executed = executed_flops(text_of(f"{platform}_factorizations_{name}"))
    assert count_model_flops(function, *arguments).total == flops == executed.total
    assert executed.unaccounted == ()


def test_an_expansion_is_found_by_names_that_end_in_an_instructions_own() -> None:
    text = text_of("v5e_factorizations_newton")
    as_they_are = executed_flops(text)
    own = text.replace('/triangular_solve"', '/triangular_solve/custom-call.1"')
    own = own.replace('/cholesky"', '/cholesky/dot.12"')
    assert own != text
    found = executed_flops(own)
    assert (found.total, found.unaccounted) == (as_they_are.total, ())


def test_an_expansion_whose_size_cannot_be_read_is_listed() -> None:
    text = text_of("v5e_factorizations_newton")
    lines = text.replace("/triangular_solve", "/other").splitlines()
    block = next(i for i, line in enumerate(lines) if '"InvertDiag' in line and "/other" in line)
    lines[block] = lines[block].replace("/other", "/triangular_solve")
    executed = executed_flops("\n".join(lines))
    assert [item.name for item in executed.unaccounted] == ["triangular_solve"]


def test_a_prefetched_block_is_the_same_block() -> None:
    """The gradient's solves read the blocks that the primal's inverted."""
    text = text_of("v5e_patterns_implicit")
    for reader, block in (("3", "17"), ("1", "18")):  # of the primal's solves
        use = f"%fusion.{reader} = f32[16]{{0:T(128)S(1)}} fusion(%custom-call.{block},"
        assert use in text
        prefetched = (
            f"%go.{block} = (f32[1,16,16], f32[1,16,16], u32[]) copy-start(%custom-call.{block})",
            f"%here.{block} = f32[1,16,16] copy-done(%go.{block})",
            use.replace("%custom-call", "%here"),
        )
        text = text.replace(use, "\n  ".join(prefetched))
    executed = executed_flops(text)
    assert executed.total == 2 * 16**3 // 3 + 4 * 16**2  # an LU, and two solves each way
    assert executed.kernels["triangular_solve"] == 4 * 16**2


def compiled_count(function: Callable[..., object], *shapes: tuple[int, ...]) -> ExecutedCount:
    """The executed count of a function on this CPU."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return executed_flops(jax.jit(function).lower(*arguments).compile())


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (jnp.linalg.cholesky, [(5, 12, 12)], 5 * 576),  # 12³/3
        (jnp.linalg.solve, [(9, 9), (9, 4)], 486 + 2 * 81 * 4),  # 2·9³/3, two solves
        (jnp.linalg.qr, [(2, 12, 6)], 2 * 2 * 720),  # 2·12·36 − 144, and Q the same
        (jnp.linalg.eigh, [(4, 6, 6)], 4 * 9 * 216),
        (lambda a: jnp.linalg.svd(a, full_matrices=False), [(8, 4)], 14 * 8 * 16 + 8 * 64),
        (lambda a: jnp.linalg.svd(a), [(8, 4)], 4 * 64 * 4 + 8 * 8 * 16 + 9 * 64),
        (lambda a: jnp.linalg.svd(a, compute_uv=False), [(8, 4)], 512 - 86),  # 4·64/3 up
        (jnp.linalg.eigvals, [(6, 6)], 10 * 216),
        (jnp.linalg.eig, [(6, 6)], 25 * 216),
        (jnp.fft.fft, [(3, 64)], 3 * 5 * 64 * 6),
        (jnp.fft.rfft, [(3, 64)], 3 * 5 * 64 * 6 // 2),
        (lambda x: jnp.fft.irfft(x, 64), [(3, 33)], 3 * 5 * 64 * 6 // 2),
        (jnp.fft.fft2, [(8, 16)], 5 * 128 * 7),
    ],
)
def test_by_hand_on_this_cpu(
    function: Callable[..., object], shapes: list[tuple[int, ...]], flops: int
) -> None:
    executed = compiled_count(function, *shapes)
    assert (executed.total, executed.unaccounted) == (flops, ())


def test_complex_products_are_four_real_ones() -> None:
    a = jax.ShapeDtypeStruct((8, 16), jnp.complex64)
    b = jax.ShapeDtypeStruct((16, 4), jnp.complex64)
    flops = 8 * 8 * 16 * 4
    assert count_model_flops(jnp.matmul, a, b).total == flops
    assert executed_flops(jax.jit(jnp.matmul).lower(a, b).compile()).total == flops


@pytest.mark.parametrize(
    ("function", "shapes", "real"),
    [
        (jnp.linalg.cholesky, [(5, 12, 12)], 5 * 576),
        (jnp.linalg.solve, [(9, 9), (9, 4)], 486 + 2 * 81 * 4),
        (jnp.linalg.qr, [(2, 12, 6)], 2 * 2 * 720),
        (jnp.linalg.eigh, [(4, 6, 6)], 4 * 9 * 216),
        (lambda a: jnp.linalg.svd(a, full_matrices=False), [(8, 4)], 14 * 8 * 16 + 8 * 64),
        (jnp.linalg.eigvals, [(6, 6)], 10 * 216),
    ],
)
def test_complex_matrices_take_four_times_as_many(
    function: Callable[..., object], shapes: list[tuple[int, ...]], real: int
) -> None:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.complex64) for shape in shapes]
    executed = executed_flops(jax.jit(function).lower(*arguments).compile())
    assert (executed.total, executed.unaccounted) == (4 * real, ())
    assert count_model_flops(function, *arguments).total == 4 * real


# As XLA writes it for a TPU: a block routine has real and imaginary parts, a matmul is three.
_PARTS = """HloModule step
ENTRY main {
  re = f32[2,64,64] parameter(0)
  im = f32[2,64,64] parameter(1)
  re1 = f32[1,48,48] parameter(2)
  im1 = f32[1,48,48] parameter(3)
  y = f32[48,8] parameter(4)
  c = (f32[2,64,64], f32[2,64,64]) custom-call(re, im), custom_call_target="Cholesky", metadata={op_name="jit(f)/cholesky"}
  i = (f32[1,48,48], f32[1,48,48]) custom-call(re1, im1), custom_call_target="InvertDiagBlocksLowerTriangular", metadata={op_name="jit(f)/triangular_solve"}
  a = f32[1,48,48] get-tuple-element(i), index=0
  b = f32[1,48,48] get-tuple-element(i), index=1
  d = f32[1,48,8] dot(a, y), lhs_contracting_dims={2}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/triangular_solve"}
  e = f32[1,48,8] dot(b, y), lhs_contracting_dims={2}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/triangular_solve"}
  f = f32[1,48,8] dot(b, y), lhs_contracting_dims={2}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/triangular_solve"}
  ROOT t = (f32[1,48,8], f32[1,48,8], f32[1,48,8]) tuple(d, e, f)
}"""  # noqa: E501


def test_complex_expansions_on_tpu_take_four_times_as_many() -> None:
    executed = executed_flops(_PARTS)
    cholesky, solve = 2 * (64**3 // 3), 48**2 * 8
    assert executed.kernels == {"cholesky": 4 * cholesky, "triangular_solve": 4 * solve}
    assert (executed.total, executed.unaccounted) == (4 * (cholesky + solve), ())


_EIGH = """HloModule step
region {
  s = (f32[300,300], pred[]) parameter(0)
  m = f32[300,300] get-tuple-element(s), index=0
  d = f32[300,300] dot(m, m), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/jit(eigh)/jit(_eigh_work)/while/body/dot_general"}
  c = f32[] constant(1)
  e = f32[1,1] slice(d), slice={[0:1], [0:1]}
  z = f32[1,1] broadcast(c), dimensions={}
  lt = pred[1,1] compare(e, z), direction=LT
  p = pred[] reshape(lt)
  ROOT t = (f32[300,300], pred[]) tuple(d, p)
}
more {
  s = (f32[300,300], pred[]) parameter(0)
  ROOT p = pred[] get-tuple-element(s), index=1
}
ENTRY main {
  a = f32[300,300] parameter(0)
  p = pred[] parameter(1)
  t = (f32[300,300], pred[]) tuple(a, p)
  ROOT w = (f32[300,300], pred[]) while(t), body=region, condition=more, metadata={op_name="jit(f)/jit(eigh)/jit(_eigh_work)/while"}
}
"""  # noqa: E501


def test_an_eigh_that_iterates_counts_by_the_textbook_once() -> None:
    """As TPU programs have it: how often the loop runs depends on data."""
    executed = executed_flops(_EIGH)
    assert (executed.total, executed.unaccounted) == (9 * 300**3, ())
    assert executed.kernels == {"eigh": executed.total}
    (flag,) = executed.flags
    assert "iterates until it converges" in flag.text
    mine = executed_flops(_EIGH.replace("jit(_eigh_work)", "jit(my_work)"))
    assert mine.total == 2 * 300**3
    assert len(mine.unaccounted) == 1
