"""What NVIDIA GPUs reach in kernels that are no plain roofline: attention, odd shapes, tiny ones.

Measured on an H100, alone and in the traces of planted faults (scripts/results/gpu_kernels.json,
planted_faults.json). Other generations are assumed to reach the same shares of their own peaks: at
2,048 to 8,192 tokens, DeepSeek-V3's attention does within 9% by what NVIDIA published for H200 and
GB200, also in that file.
"""

from __future__ import annotations

from mfu_jax.flops.executed.records import InstructionRecord

LAUNCH_SECONDS = 1.5e-6
"""What a kernel takes beyond its bytes and FLOPs, in a command buffer."""

_TENSOR_CORE = 8  # elements that tensor cores load at once
_HALF_TOKENS = {True: 900, False: 1500}  # masked or not → sequences that reach half of the share
_NARROW = 0.8  # of the share, for heads of fewer than 128
_WIDE = 128


def is_attention(record: InstructionRecord) -> bool:
    """Whether it is cuDNN's attention."""
    return record.shape.target.startswith("__cudnn$fmha")


def is_masked(record: InstructionRecord) -> bool:
    """Whether cuDNN's attention reads a mask or a bias for all pairs."""
    return "ScaleBias" in record.shape.target


def attention_share(record: InstructionRecord, longest: float, *, masked: bool) -> float:
    """The share of the peak that cuDNN's attention reaches.

    Args:
        record: the call; its queries are [batch, tokens, heads, width].
        longest: the share with long sequences and heads of 128.
        masked: whether it reads a mask.
    """
    arrays = [array.dims for array in record.shape.operand_arrays if len(array.dims) == 4]
    if not arrays:
        return longest
    _, tokens, _, width = arrays[0]
    narrow = _NARROW if width < _WIDE and not masked else 1.0
    return narrow * longest * tokens / (tokens + _HALF_TOKENS[masked])


def odd_sizes(record: InstructionRecord) -> tuple[int, ...]:
    """A matmul's dimensions, such as the vocabulary, that do not fill tensor cores."""
    matmul = record.shape.matmul
    sizes = (matmul.m, matmul.n, matmul.k) if matmul else ()
    return tuple(size for size in sizes if size > _TENSOR_CORE and size % _TENSOR_CORE)
