"""Kernels that VMEM cannot hold: refused as libtpu 0.0.42.1 refused them, with its figures."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.hlo.parsing import parse_hlo
from mfu_jax.flops.executed.kernels.registry import MOSAIC_TPU, KernelCall
from mfu_jax.hardware.chips import named
from mfu_jax.planning.result.vmem import check_kernels, least_mib, matmul_share
from scripts import results
from tests.support.recorded import text_of

MIB = 2**20
HLO = """HloModule m
ENTRY %main (x: f32[{rows},1024]) -> f32[{out},1024] {{
  %x = f32[{rows},1024]{{1,0{memory}}} parameter(0)
  ROOT %k = f32[{out},1024]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", {config}
}}
"""
FLAG = "--xla_tpu_scoped_vmem_limit_kib=65536"


def double(x: Any, out: Any, *total: Any) -> None:
    if total:
        total[0][...] += x[...]
    out[...] = (total[0] if total else x)[...] * 2


def _program(
    rows: int, *, steps: int = 8, sums: bool = False, limit: int = 0, memory: str = ""
) -> str:
    """A kernel on blocks of rows × 1,024 float32, as JAX lowers it.

    Args:
        rows: of a block; 256 are 1 MiB.
        steps: of its grid.
        sums: into scratch, and all into one block of results.
        limit: MiB that it allows itself.
        memory: the operand's.
    """
    out = rows if sums else rows * steps
    call = pl.pallas_call(
        double,
        grid=(steps,),
        in_specs=[pl.BlockSpec((rows, 1024), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((rows, 1024), lambda i: (0 if sums else i, 0)),
        out_shape=jax.ShapeDtypeStruct((out, 1024), jnp.float32),
        scratch_shapes=[pltpu.VMEM((rows, 1024), jnp.float32)] if sums else [],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit * MIB or None),
    )
    x = jax.ShapeDtypeStruct((rows * steps, 1024), jnp.float32)
    text = jax.jit(call).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    (config,) = re.findall(r'backend_config = "([^"]*)"', text)
    config = "backend_config=" + config.replace("\\22", '"')
    return HLO.format(rows=rows * steps, out=out, config=config, memory=memory)


@pytest.mark.parametrize(
    ("chip", "kernel", "flags", "figures"),
    [
        ("v5e", {"rows": 1024}, "", ()),
        ("v5e", {"rows": 2048}, "", (32, 16)),
        ("v5e", {"rows": 2048, "steps": 1}, "", ()),
        ("v5e", {"rows": 1024, "sums": True}, "", ()),  # 2 × 4, 4 and 4 of scratch
        ("v5e", {"rows": 2048, "sums": True}, "", (32, 16)),
        ("v5e", {"rows": 2048, "limit": 24}, "", (32, 24)),
        ("v5e", {"rows": 2048, "limit": 40}, "", ()),
        ("v5e", {"rows": 2048}, FLAG, ()),
        ("v5e", {"rows": 5120}, FLAG, (80, 64)),
        ("v5e", {"rows": 2048, "limit": 24}, FLAG, (32, 24)),
        ("v5e", {"rows": 5120, "limit": 100}, FLAG, ()),
        ("v5p", {"rows": 1032}, "", (16.12, 16)),
        ("v6e", {"rows": 2048}, "", ()),
        ("v6e", {"rows": 2056}, "", (32.12, 32)),
        ("v6e", {"rows": 8064, "limit": 200}, "", ()),
        ("tpu7x", {"rows": 2056}, "", (32.12, 32)),
        ("tpu7x", {"rows": 5120, "limit": 200}, "", (80, 64)),
        ("v4", {"rows": 8192}, "", ()),  # its limits are not known
    ],
)
def test_a_kernel_is_refused_as_libtpu_refuses_it(
    chip: str, kernel: dict[str, Any], flags: str, figures: tuple[float, ...]
) -> None:
    module = parse_hlo(_program(**kernel))
    if not figures:
        check_kernels(module, named(chip), (flags,))
        return
    with pytest.raises(UserError) as refused:
        check_kernels(module, named(chip), (flags,))
    said = [float(number) for number in re.findall(r"([\d.]+) MiB", str(refused.value))]
    assert said == pytest.approx(figures, abs=0.01)


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_matmuls_in_the_default_vmem_are_as_slow_as_xla_says(chip: str) -> None:
    (table,) = results.read("matmul_vmem")
    by_width = []
    for width in (4096, 8192):
        rows = [r for r in table["rows"] if r["chip"] == chip and r["width"] == width]
        raised, default = (
            sum(row[ms] * row["in a layer"] for row in rows) for ms in ("raised ms", "default ms")
        )
        by_width.append(raised / default)
    for flags in ((), ("--xla_tpu_scoped_vmem_limit_kib=16384",)):
        share = matmul_share(named(chip), flags)
        assert share == pytest.approx(math.prod(by_width) ** 0.5, abs=0.005)
    assert matmul_share(named(chip), (FLAG,)) == 1


def test_matmuls_of_narrow_units_do_not_need_more_vmem() -> None:
    assert matmul_share(named("v5e"), ()) == matmul_share(named("v5p"), ()) == 1


def test_an_array_in_vmem_has_no_buffers() -> None:
    module = parse_hlo(_program(2048, memory=":T(8,128)S(1)"))
    (call,) = _kernels(module)
    assert least_mib(call) == 16  # of the results


@pytest.mark.parametrize(
    "name", ["v5p_llama70b", "v5e_flash_causal", "v6e_megablox", "v6e_tokamax_loss"]
)
def test_the_compilers_own_figure_is_never_below(name: str) -> None:
    """Where all arrays are in HBM and it adds nothing, as in v5p_llama70b, it is the same."""
    pairs = []
    for call in _kernels(parse_hlo(text_of(name))):
        (used,) = call.config["used_scoped_memory_configs"]
        pairs.append((least_mib(call), int(used["size"]) / MIB))
    assert pairs
    assert all(least <= used for least, used in pairs)
    assert all(least == used for least, used in pairs) or name != "v5p_llama70b"


def _kernels(module: Any) -> list[KernelCall]:
    calls = [
        KernelCall(computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    ]
    return [call for call in calls if call.target == MOSAIC_TPU]
