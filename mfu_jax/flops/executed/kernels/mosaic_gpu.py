"""Pallas kernels for GPUs compiled by Mosaic: their body is in the program, down to the PTX.

Tensor-core instructions are inline assembly. A warp group of four warps runs a ``wgmma`` together,
one warp an ``mma.sync``, one thread a ``tcgen05.mma``; so the body is walked once for every warp of
every block, and each warp adds its share.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from mfu_jax.flops.executed.kernels.bodies.attributes import mlir_string
from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, UnknownBodyError
from mfu_jax.flops.executed.kernels.bodies.reader import BodyReader, integer, integers, read_body
from mfu_jax.flops.executed.kernels.body_cost import body_cost
from mfu_jax.flops.executed.kernels.registry import (
    MOSAIC_GPU,
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)

_WARP = 32  # threads
# wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16, mma.sync.aligned.m16n8k16.row.col.f32.bf16…
# mma.sp.sync.aligned.m16n8k32…: of the k elements in a row of `a`, half are stored and multiplied.
_INSTRUCTION = re.compile(
    r"\b(wgmma\.mma_async|mma)(\.sp(?:::\w+)?)?\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.([\w.]+)"
)
_WARPS = {"wgmma.mma_async": 4, "mma": 1}
# tcgen05.mma.cta_group::2.kind::f16, of Blackwell: m, n and the dtype are in a descriptor, which
# counts the rows of both blocks of a group.
_DESCRIBED = re.compile(r"\btcgen05\.mma(?:\.sp)?\.cta_group::[12]\.kind::(\w+)")
# Kind → how many elements of a row of `a` are multiplied, and dtypes by their code.
_KINDS = {
    "f16": (16, ("f16", "bf16")),
    "i8": (32, ("u8", "s8")),
    "f8f6f4": (32, ("e4m3", "e5m2")),
    "mxf8f6f4": (32, ("e4m3", "e5m2")),
    "mxf4": (64, ("", "e2m1")),
    "mxf4nvf4": (64, ("", "e2m1")),
}
_DESCRIPTOR = 3
_MULTIPLIES = re.compile(r"\bw?g?mma(_async)?\b(?!\.(commit|wait|fence))|tcgen05\.mma")
_ARGUMENT = "mosaic_gpu.from_kernel_arg_idx"
_TEXTS = ("asm_string", "intrin")
_WITH_TEXT = ("llvm.inline_asm", "llvm.call_intrinsic")


@register_kernel(MOSAIC_GPU)
def _mosaic_gpu(call: KernelCall) -> KernelCost | UnknownCost:
    """Every tensor-core instruction of the body, for each warp that reaches it."""
    return body_cost(call, lambda: _body(call))


def _body(call: KernelCall) -> KernelBody:
    module = mlir_string(call.instruction.attribute_text, "module")
    if module is None:
        raise UnknownBodyError("a Mosaic GPU kernel without its module")
    return kernel_body(module)


@functools.lru_cache(maxsize=256)
def kernel_body(module: bytes) -> KernelBody:
    """Decodes the ``module`` of a ``mosaic_gpu_v2`` call: MLIR in bytecode.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    # Bodies are stored in a version-stable form; the pass restores the plain dialects.
    return read_body(module, "mosaic_gpu", "mosaic_gpu-serde{serialize=false}", _read_module)


def _read_module(module: Any) -> KernelBody:
    launches = [op for op in _all_operations(module.operation) if op.name == "gpu.launch"]
    if len(launches) != 1:
        raise UnknownBodyError(f"a Mosaic GPU kernel with {len(launches)} launches")
    (launch,) = launches
    reader = BodyReader(_matmul)
    segments = integers(launch.attributes["operandSegmentSizes"])
    count = sum(segments[:10])  # for a token, the grid, the threads, and a cluster's blocks
    sizes = [_constant(v) for v in list(launch.operands)[segments[0] : count]]
    tables = tuple(reader.number(argument) for argument in _arguments(launch.parent))
    block = reader.block(launch.regions[0].blocks[0])
    blocks, (x, y, z), cluster = sizes[:3], sizes[3:6], sizes[6:]
    if x % _WARP:
        raise UnknownBodyError(f"a Mosaic GPU kernel with {x} threads, which are no whole warps")
    return reader.body(
        block,
        positions=block.arguments[:6],
        grid=(*blocks, x // _WARP, y, z),
        strides=(1, 1, 1, _WARP, 1, 1),
        cluster=tuple(cluster),
        tables=tables,
    )


def _arguments(function: Any) -> list[Any]:
    """The kernel's operands and results, in order, as arrays in memory."""
    found = {}
    for operation in function.regions[0].blocks[0].operations:
        if _ARGUMENT in operation.operation.attributes:
            found[integer(operation.operation, _ARGUMENT)] = operation.operation.results[0]
    return (
        [found[index] for index in sorted(found)] if sorted(found) == [*range(len(found))] else []
    )


def _all_operations(operation: Any) -> Iterator[Any]:
    """An operation and those in its regions; a launch has no launches inside."""
    yield operation
    if operation.name == "gpu.launch":
        return
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from _all_operations(inner.operation)


def _constant(value: Any) -> int:
    """A size of the grid."""
    owner = value.owner
    if getattr(owner, "name", "") != "arith.constant":
        raise UnknownBodyError("its grid depends on data")
    return int(re.sub(r" :.*", "", str(owner.attributes["value"])))


def _matmul(operation: Any) -> tuple[int, str] | None:
    """One warp's share of a tensor-core instruction's 2·m·n·k."""
    text = str(operation.name)
    if text in _WITH_TEXT:  # reading attributes takes time
        attributes = operation.attributes
        text = next((str(attributes[key]) for key in _TEXTS if key in attributes), text)
    if "mma" not in text or not _MULTIPLIES.search(text):
        return None
    if described := _DESCRIBED.search(text):
        return _described(operation, described[1])
    match = _INSTRUCTION.search(text)
    if not match:
        shown = _MULTIPLIES.search(text)
        raise UnknownBodyError(f"it multiplies by {shown[0] if shown else text}")
    m, n, k = (int(match[i]) for i in (3, 4, 5))
    multiplied = k // 2 if match[2] else k
    dtypes = [t for t in match[6].split(".") if t not in ("row", "col")]
    return 2 * m * n * multiplied // _WARPS[match[1]], dtypes[1]


def _described(operation: Any, kind: str) -> tuple[int, str]:
    """2·m·n·k of a ``tcgen05.mma`` by its descriptor (PTX ISA, "Instruction descriptor")."""
    k, dtypes = _KINDS.get(kind, (0, ()))
    try:
        descriptor = _constant(operation.operands[_DESCRIPTOR])
    except (IndexError, UnknownBodyError):
        raise UnknownBodyError("it multiplies by a tcgen05.mma of unknown size") from None
    n = (descriptor >> 17 & 0x3F) << 3
    m = (descriptor >> 27 & 0x3) << 7 if kind.startswith("mx") else (descriptor >> 24 & 0x1F) << 4
    code = descriptor >> 7 & 0x7
    if code >= len(dtypes):
        raise UnknownBodyError(f"it multiplies by a tcgen05.mma of kind {kind} and dtype {code}")
    return 2 * m * n * k, dtypes[code]
