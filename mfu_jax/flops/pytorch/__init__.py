"""Counts the matmuls of the PyTorch model that transformers builds for a ``config.json``.

For model types without a formula: the model is on the meta device, nothing is computed and no
weight is stored. Needs ``pip install 'mfu-jax[trace-hf]'``; remote code is never run.
"""

from mfu_jax.flops.pytorch.counting import Matmul, PyTorchCount, count_pytorch_model

__all__ = ["Matmul", "PyTorchCount", "count_pytorch_model"]
