"""A ``config.json`` → the real PyTorch model of transformers, on the meta device → its matmuls.

The way for model types that no formula is written for: nothing is computed and no weight is
stored. Needs ``pip install 'mfu-jax[trace-hf]'``; remote code is never run.
"""

from mfu_jax.flops.pytorch.counting import Matmul, PyTorchCount, count_pytorch_model

__all__ = ["Matmul", "PyTorchCount", "count_pytorch_model"]
