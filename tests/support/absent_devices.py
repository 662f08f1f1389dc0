"""Devices to compile for without having them: TPUs via libtpu, H100s via JAX's CUDA plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# libtpu looks for attached TPUs and their metadata server unless these are set before jax starts.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}
# One host of each kind.
TPU_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}


def devices(platform: str, topology: str = "") -> Any:
    """Devices of a platform to compile for, attached or not.

    Args:
        platform: cpu (the attached ones), h100, or a key of `TPU_TOPOLOGIES`.
        topology: such as v5p:8x8x8; by default, one host.
    """
    import jax
    from jax.experimental import topologies

    if platform == "cpu":
        return jax.devices()
    if platform == "h100":
        target = (ROOT / "tests" / "data" / "h100_target_config.txtpb").read_text()
        options = {"target_config": target, "topology": topology or "1x1x8"}
        return topologies.get_topology_desc("h100", "cuda", **options).devices
    return topologies.get_topology_desc(topology or TPU_TOPOLOGIES[platform], "tpu").devices
