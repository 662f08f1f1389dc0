"""The step of every bundled model at full size, lowered without arrays: its FLOPs by two counts.

    python -m tests.campaigns.models [--topology=v5p:4x4x4] [REGEX]

With `--topology`, the step is lowered for these TPUs (which needs libtpu), weights split over them;
else for one CPU device. The traced FLOPs are those of one device's step with plain attention.
Exits 1 if a model fails, or its counts differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import time
from typing import Any

import jax

from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.planning.compilation.absent_devices import absent_devices
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step
from mfu_jax.util.yaml_files import model_names
from tests.support.tiny_models import analytic

LENGTH = 8192


def config_of(name: str, devices: int, **keys: Any) -> Config:
    """A bundled model, a sequence for each device, its weights split as often as they can be."""
    sizes = {"per_device_batch_size": 1, "max_target_length": _length(name), "dtype": "bfloat16"}
    own = {"model_name": name, "remat_policy": "full"}
    plain = pyconfig.from_mapping({}, overrides={**own, **sizes, **keys})
    fsdp = math.gcd(plain.emb_dim, devices)
    return dataclasses.replace(plain, fsdp=fsdp, data=devices // fsdp)


def _length(name: str) -> int:
    """Tokens of a sequence: no more than a model has learned positions for."""
    positions = pyconfig.from_mapping({}, overrides={"model_name": name}).trainable_position_size
    return min(LENGTH, positions) if positions > 0 else LENGTH


def lowered(config: Config, devices: list[Any]) -> jax.stages.Lowered:
    """The whole train step, for the devices."""
    grid = mesh.make_mesh(config, devices)
    config = state.resolve_attention(config, grid)
    return step.lower_train_step(config, grid, state.abstract_state(config, grid))


def traced(config: Config) -> int:
    """FLOPs of a train step on one device."""
    grid = mesh.make_mesh(config, jax.devices()[:1])
    weights, batch = state.abstract_state(config, grid), step.abstract_batch(config, grid, 1)
    count = count_model_flops(step.make_train_step(config), weights, batch)
    assert not count.unaccounted, count.unaccounted
    return count.total


def main() -> int:
    """One line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="")
    parser.add_argument("pattern", nargs="?", default="")
    arguments = parser.parse_args()
    devices = jax.devices()[:1]
    if arguments.topology:
        request = {
            "platform": "tpu",
            "topology": arguments.topology,
            "slices": 1,
            "target_config": "",
        }
        devices = absent_devices(request)
    failed = 0
    for name in model_names():
        if re.search(arguments.pattern, name):
            failed += not _shown(name, devices)
    return 1 if failed else 0


def _shown(name: str, devices: list[Any]) -> bool:
    begin = time.perf_counter()
    try:
        text = lowered(config_of(name, len(devices)), devices).as_text()
        plain = config_of(name, 1, attention="dot_product")
        found, expected = traced(plain), analytic(plain)
    except Exception as error:
        print(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    seconds = time.perf_counter() - begin
    beyond = f"traced {found:,}, by the config {expected:,}, {found - expected:+,}"
    print(f"{name}: {beyond}; {len(text):,} characters, {seconds:.1f} s", flush=True)
    return found == expected


if __name__ == "__main__":
    raise SystemExit(main())
