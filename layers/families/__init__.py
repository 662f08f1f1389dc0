"""One function per `decoder_block`: turns a config into the specs of its layers.

Adding one: ``@family("name")`` here, its name in mfu_jax/trainer/config/keys.yml. A new kind
of layer is a frozen spec and its module in a room of layers/, as in recurrences/delta_net.py.
"""

from . import deepseek, dense, gemma, mixtures
from .blocks import ModelSpec, family, model_spec
from .towers import known_towers

__all__ = [
    "ModelSpec",
    "deepseek",
    "dense",
    "family",
    "gemma",
    "known_towers",
    "mixtures",
    "model_spec",
]
