"""Convolutions that XLA runs on pieces of their images: in blocks, or sharded over devices.

A TPU program cuts one or two large images into overlapping blocks, the last of which is
partly empty. Devices that share an image exchange its edges; the first and the last receive zeros.
Both multiply more than the model does; how much follows from the model's own convolutions.
"""

from __future__ import annotations

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.scopes import read_scope

BLOCKS = "overlapping blocks of images"
EDGES = "edges of sharded images"

_CONVOLUTION = "conv_general_dilated"
# Opcodes that move parts of an image under the name of its convolution.
_EXCHANGES = ("collective-permute", "collective-permute-start")
# TPUs join arrays by the maximum of both, padded with -inf; integers by the sum, padded with zeros.
_JOINS = ("maximum", "concatenate")
_SUMMED = "pad"


class ImagePieces:
    """Which convolutions of a program run on pieces of their images."""

    def __init__(self, module: HloModule) -> None:
        self._label = EDGES if _names(module, _EXCHANGES) else BLOCKS
        names = _names(module, (*_EXCHANGES, *_JOINS, _SUMMED))
        self._scopes = {read_scope(name).path for name in names}

    def label(self, op_name: str) -> str:
        """The kind of pieces that a matmul of this name runs on; empty for whole images."""
        is_convolution = op_name.endswith(_CONVOLUTION)
        return self._label if is_convolution and read_scope(op_name).path in self._scopes else ""


def _names(module: HloModule, opcodes: tuple[str, ...]) -> set[str]:
    """The convolutions' names that instructions of some opcodes carry."""
    return {
        name
        for opcode in opcodes
        for computation, instruction in module.with_opcode(opcode)
        if _CONVOLUTION in instruction.attribute_text
        and (opcode != _SUMMED or _is_summed(computation, instruction))
        for name in instruction.op_name.split(";")
    }


def _is_summed(computation: HloComputation, pad: HloInstruction) -> bool:
    """Whether a padded array is added to another one."""
    return any(
        user.opcode == "add" and all(computation[name].opcode == "pad" for name in user.operands)
        for user in computation.users.get(pad.name, ())
    )
