"""JAX beyond its stable API: used in one file only, and each name still there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from mfu_jax.util import jax_internals
from tests.support.paths import ROOT

# Every name that jax_internals.py imports -> what we use it for.
PURPOSES = {
    "jax.experimental.mesh_utils.create_device_mesh": "the trainer's mesh on a split TPU torus",
    "jax.experimental.multihost_utils": "the trainer's processes stop after the same step",
    "jax.experimental.topologies": "steps are compiled for chips that are not here",
    "jax.experimental.xla_metadata.set_xla_metadata": "traces without checkpoints get cache keys",
    "jax.extend.core.ClosedJaxpr": "constants of inner jaxprs",
    "jax.extend.core.Jaxpr": "inner jaxprs are found among an equation's parameters",
    "jax.extend.core.Literal": "literal operands: bounds of loops, parts of masks",
    "jax.extend.core.Primitive": "names of the primitives that cost no FLOPs",
    "jax.extend.core.primitives": "names of the primitives that cost no FLOPs",
    "jax.extend.core.primitives.remat_p": "tracing with jax.checkpoint switched off",
    "jax.interpreters.partial_eval.dce_jaxpr": "dead code is not counted",
    "jax._src.cudnn.fused_attention_stablehlo": "cuDNN attention is compiled for absent GPUs",
    "jax._src.compiler": "a step that another process lowered is compiled",
    "jax._src.state.discharge.discharge_state": "what branches read from a jax.Ref is known",
    "jax._src.interpreters.mlir": "a step that another process lowered is parsed",
    "jax._src.lib.xla_client": "a step that another process lowered is compiled",
    "jax._src.distributed.global_state": "the trainer's processes find and watch each other",
    "jax._src.lib.tpu": "the bodies of Pallas kernels in TPU programs",
    "jaxlib._hlo": "HLO protos that XLA dumps",
    "jax._src.lib.mosaic_gpu_dialect": "the bodies of Pallas kernels in GPU programs",
    "jaxlib.mlir._mlir_libs._jax_mlir_ext": "the bodies of Pallas kernels in GPU programs",
    "jaxlib.mlir.ir": "the bodies of Pallas kernels",
    "jaxlib.mlir.passmanager.PassManager": "the bodies of Pallas kernels",
    "jaxlib.version.__version__": "which bodies of kernels can be read",
    "jaxlib.triton.dialect": "the bodies of Pallas kernels in GPU programs",
}
OF_OLD_VERSIONS = {  # jax_internals.py says of which
    "jax._src.ad_checkpoint.remat_p",
    "jax._src.lib._jax",
    "jax._src.monitoring._unregister_event_duration_listener_by_callback",
}
UNSTABLE = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")


def unstable_imports(source: str) -> Iterator[str]:
    """Full names of what a file imports from JAX's unstable modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (n for n in names if f"{n}.".startswith(tuple(f"{m}." for m in UNSTABLE)))


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    if hasattr(found, attribute):
        return True
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("name", PURPOSES)
def test_jax_still_has(name: str) -> None:
    if name.endswith(".primitives.remat_p") and jax.__version_info__ < (0, 8, 3):
        pytest.skip("exported since JAX 0.8.3")
    if name == "jaxlib._hlo" and jax.__version_info__ < (0, 10):
        pytest.skip("a part of jaxlib._jax before JAX 0.10")
    assert exists(name), f"JAX {jax.__version__} has no {name}; used for: {PURPOSES[name]}"


def test_a_missing_name_is_missed() -> None:
    assert not exists("jax.extend.core.no_such_name")
    assert not exists("jax.no_such_module.name")


def test_every_unstable_name_has_a_purpose() -> None:
    source = Path(jax_internals.__file__).read_text(encoding="utf-8")
    assert set(unstable_imports(source)) == PURPOSES.keys() | OF_OLD_VERSIONS


@pytest.mark.full
def test_unstable_names_are_imported_in_one_file_only() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): list(unstable_imports(path.read_text(encoding="utf-8")))
        for path in (ROOT / "mfu_jax").rglob("*.py")
    }
    assert [path for path, names in found.items() if names] == ["mfu_jax/util/jax_internals.py"]


def test_layers_have_private_names_in_one_file_only_and_jax_has_them() -> None:
    private = re.compile(r"jax\._src|splash_attention_kernel\._")
    files = (ROOT / "layers").rglob("*.py")
    found = [path for path in files if private.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(ROOT).as_posix() for path in found] == ["layers/jax_internals.py"]
    assert exists("jax._src.cudnn.fused_attention_stablehlo.dot_product_attention")
    assert exists(
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel._splash_attention_bwd"
    )


def test_an_unstable_import_is_recognised() -> None:
    planted = "import jax.extend\ndef f():\n    from jax._src.core import x\nimport jax.numpy\n"
    assert list(unstable_imports(planted)) == ["jax.extend", "jax._src.core.x"]


def test_literals_of_a_jaxpr_are_numpy_values() -> None:
    """On JAX 0.8 they are wrapped; a wrapped constant was unknown, and so was a mask made of it."""
    closed = jax.make_jaxpr(lambda x: x + np.arange(3) * jax.numpy.int32(2))(np.arange(3))
    literals = [
        atom.val
        for eqn in closed.eqns
        for atom in eqn.invars
        if isinstance(atom, jax_internals.Literal)
    ]
    values = [jax_internals.host_value(value) for value in [*literals, *closed.consts]]
    assert values
    assert all(isinstance(value, int | np.ndarray | np.generic | jax.Array) for value in values)


def test_dead_code_goes_and_inputs_stay() -> None:
    def f(x: jax.Array, unused: jax.Array) -> tuple[jax.Array, jax.Array]:
        _ = x @ x
        return x + 1, x - 1

    jaxpr = jax.make_jaxpr(f)(np.ones((2, 2)), np.ones(3)).jaxpr
    kept = jax_internals.without_dead_code(jaxpr)
    assert [eqn.primitive.name for eqn in kept.eqns] == ["add", "sub"]
    assert len(kept.invars) == 2
